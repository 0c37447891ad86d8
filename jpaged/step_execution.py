"""From a plan to a batch on the device, and from its result back to the requests."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from jaxtyping import Int

from jpaged.memory import BlockManager
from jpaged.request_state import RequestState
from jpaged.runner.batch import PARAMETERS, STOP_TOKENS, build_batch, pack_parameters
from jpaged.runner.buckets import Bucket, choose_bucket
from jpaged.runner.sampler import MASKED_LOGIT
from jpaged.scheduling import Sequence, StepPlan


class StepResults(Protocol):
    """A step's result on its way from the device; `StepResult` is one."""

    def is_ready(self) -> bool: ...

    def num_steps(self) -> int: ...

    def tokens(self, count: int, step: int = 0, /) -> Int[np.ndarray, " count"]: ...

    def wait_for_prompt_logprobs(self) -> None: ...

    def logprobs(self, row: int, best: int, step: int = 0, /) -> tuple[float, dict[int, float]]: ...

    def candidates(self, row: int, /) -> tuple[np.ndarray, np.ndarray]: ...

    def prompt_logprobs(self, index: int, best: int, /) -> dict[int, float]: ...


class StepRunner(Protocol):
    """What steps are run on: `ModelRunner`, or a stand-in for it."""

    buckets: list[Bucket]
    vocab_size: int

    def move_blocks(
        self, swapped_out: np.ndarray, copied: np.ndarray, swapped_in: np.ndarray, /
    ) -> None: ...

    def set_bias(self, slot: int, row: np.ndarray, /) -> None: ...

    def execute(
        self, bucket: Bucket, buffer: np.ndarray, logprob_targets: np.ndarray | None, /
    ) -> StepResults: ...

    def execute_decodes(self, bucket: Bucket, buffer: np.ndarray, /) -> StepResults: ...

    def restore_pools(self) -> None: ...


class StepExecutor:
    """Carries plans out on a runner.

    Attributes:
        padded_tokens: token rows computed for nothing so far: bucket sizes less the plans' tokens,
            also in those of a plan's steps that an early end has spared.
    """

    def __init__(self, runner: StepRunner, manager: BlockManager) -> None:
        self.padded_tokens = 0
        self._runner = runner
        self._manager = manager
        # int32 [slots, P]: sampling parameters of the request in each slot.
        self._parameters = np.zeros((len(manager.tables), len(PARAMETERS)), np.int32)
        self._masked: set[int] = set()  # slots whose row of the bias table bans stop tokens

    def execute(self, plan: StepPlan, tracked: Mapping[str, RequestState]) -> StepResults | None:
        """Moves the plan's blocks and dispatches its step; None if it computes nothing.

        tracked  the unfinished requests by id
        """
        self._runner.move_blocks(plan.moves.swapped_out, plan.moves.copied, plan.moves.swapped_in)
        for sequence in plan.admitted:
            self._bind(tracked[sequence.request.request_id], sequence)
        if self._masked:
            self._allow_stop_tokens(plan, tracked)
        if not plan.sequences:
            return None
        context_lens = plan.starts + plan.lengths
        bucket = choose_bucket(
            self._runner.buckets,
            plan.num_tokens,
            len(plan.sequences),
            int(self._manager.blocks_for(context_lens.max() + plan.num_steps - 1)),
        )
        self.padded_tokens += (bucket.tokens - plan.num_tokens) * plan.num_steps
        buffer = build_batch(
            bucket,
            token_ids=_token_ids(plan),
            lengths=plan.lengths,
            context_lens=context_lens,
            slots=plan.slots,
            num_sampled=plan.num_sampled,
            tables=self._manager.tables,
            parameters=self._parameters,
            num_steps=plan.num_steps,
        )
        if plan.num_steps > 1:
            return self._runner.execute_decodes(bucket, buffer)
        return self._runner.execute(bucket, buffer, _logprob_targets(plan, tracked))

    def _bind(self, tracked: RequestState, sequence: Sequence, num_output_tokens: int = -1) -> None:
        """Write a request's sampling parameters into the rows of the slot that it was given, for
        what is sampled after num_output_tokens tokens (-1: all that are known)."""
        params = tracked.request.sampling_params
        vocab_size = self._runner.vocab_size
        if num_output_tokens < 0:
            num_output_tokens = sequence.num_output_tokens
        # Beams see to it themselves.
        masks_stop_tokens = bool(
            tracked.request.beams is None
            and tracked.request.stop_token_ids
            and num_output_tokens < params.min_tokens
        )
        if masks_stop_tokens:
            self._masked.add(sequence.slot)
        else:
            self._masked.discard(sequence.slot)
        has_bias = bool(params.logit_bias) or masks_stop_tokens
        stops = itertools.chain(tracked.request.stop_token_ids, itertools.repeat(-1))
        self._parameters[sequence.slot] = pack_parameters(
            {
                "prompt_len": sequence.num_prompt_tokens,
                "temperature": min(params.temperature, 1e30),
                "top_k": min(params.top_k, vocab_size),
                "top_p": params.top_p,
                "min_p": params.min_p,
                "presence_penalty": params.presence_penalty,
                "frequency_penalty": params.frequency_penalty,
                # Beyond float32's range a penalty would turn logits into infinities and NaN.
                "repetition_penalty": min(max(params.repetition_penalty, 1e-30), 1e30),
                "seed_high": tracked.seed >> 32,
                "seed_low": tracked.seed,
                "sample_index": tracked.first_sample_index + sequence.index,
                "has_bias": has_bias,
                "wants_logprobs": tracked.needs_logprobs,
            }
            | dict(zip(STOP_TOKENS, stops))
        )
        if has_bias:
            row = np.zeros(vocab_size, np.float32)
            for token, bias in (params.logit_bias or {}).items():
                row[token] = min(max(bias, MASKED_LOGIT), -MASKED_LOGIT)
            if masks_stop_tokens:
                row[list(tracked.request.stop_token_ids)] = MASKED_LOGIT
            self._runner.set_bias(sequence.slot, row)

    def _allow_stop_tokens(self, plan: StepPlan, tracked: Mapping[str, RequestState]) -> None:
        """End the ban on stop tokens where this step samples a token after min_tokens."""
        for row, sequence in enumerate(plan.sequences[: plan.num_sampled]):
            if sequence.slot not in self._masked:
                continue
            context_len = int(plan.starts[row] + plan.lengths[row])
            num_output_tokens = context_len - sequence.num_prompt_tokens
            if num_output_tokens >= sequence.request.sampling_params.min_tokens:
                self._bind(tracked[sequence.request.request_id], sequence, num_output_tokens)


def _token_ids(plan: StepPlan) -> Int[np.ndarray, " tokens"]:
    """The tokens that a plan computes, row after row."""
    tokens = np.empty(plan.num_tokens, np.int32)
    starts = plan.starts.tolist()
    # The decodes, which come first, one by one: slices of one element would take longer.
    count = plan.num_decodes
    tokens[:count] = [s.token_ids[start] for s, start in zip(plan.sequences[:count], starts)]
    lengths = plan.lengths.tolist()
    for row in range(plan.num_decodes, len(starts)):
        chunk = plan.sequences[row].token_ids[starts[row] : starts[row] + lengths[row]]
        tokens[count : count + len(chunk)] = chunk
        count += len(chunk)
    return tokens


def _logprob_targets(
    plan: StepPlan, tracked: Mapping[str, RequestState]
) -> Int[np.ndarray, " tokens"] | None:
    """Of each token that a plan computes the next prompt token, where its logprob is wanted, else
    -1; None if none is."""
    targets = None
    for row, sequence in enumerate(plan.sequences):
        if sequence.request.sampling_params.prompt_logprobs is None:
            continue
        start, length = int(plan.starts[row]), int(plan.lengths[row])
        known = len(tracked[sequence.request.request_id].prompt_logprobs)
        places = np.arange(start + 1, start + length + 1)
        wanted = (places >= known) & (places < sequence.num_prompt_tokens)
        if wanted.any():
            if targets is None:
                targets = np.full(plan.num_tokens, -1, np.int32)
                ends = np.cumsum(plan.lengths)
            places = np.minimum(places, sequence.num_prompt_tokens - 1)
            found = np.where(wanted, sequence.token_ids[places], -1)
            targets[ends[row] - length : ends[row]] = found
    return targets


def collect_prompt_logprobs(
    plan: StepPlan, result: StepResults, tracked: Mapping[str, RequestState]
) -> None:
    """Hand the prompt logprobs that a step computed to their requests."""
    ends = np.cumsum(plan.lengths)
    for row, sequence in enumerate(plan.sequences):
        best = sequence.request.sampling_params.prompt_logprobs
        state = tracked.get(sequence.request.request_id)
        # The name may be another request's by now.
        if best is None or state is None or state.request is not sequence.request:
            continue
        known = state.prompt_logprobs
        offset = int(ends[row] - plan.lengths[row] - plan.starts[row])
        end = min(int(plan.starts[row] + plan.lengths[row]), sequence.num_prompt_tokens - 1)
        for place in range(len(known), end + 1):
            known.append(result.prompt_logprobs(offset + place - 1, best))
