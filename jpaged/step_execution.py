"""From a plan to a batch on the device, and from its result back to the requests."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jpaged.memory import BlockManager
from jpaged.request_state import RequestState, SampleState
from jpaged.runner.batch import PARAMETERS, build_batch, pack_parameters
from jpaged.runner.buckets import choose_bucket
from jpaged.runner.model_runner import ModelRunner, StepResult
from jpaged.runner.sampler import MASKED_LOGIT
from jpaged.scheduling import Sequence, StepPlan


class StepExecutor:
    """Carries plans out on a runner.

    Attributes:
        padded_tokens: token rows computed for nothing so far: bucket sizes less the plans' tokens.
    """

    def __init__(self, runner: ModelRunner, manager: BlockManager) -> None:
        self.padded_tokens = 0
        self._runner = runner
        self._manager = manager
        # int32 [slots, P]: sampling parameters of the request in each slot.
        self._parameters = np.zeros((len(manager.tables), len(PARAMETERS)), np.int32)

    def execute(self, plan: StepPlan, tracked: Mapping[str, RequestState]) -> StepResult | None:
        """Moves the plan's blocks and dispatches its step; None if it computes nothing.

        tracked  the unfinished requests by id
        """
        self._runner.move_blocks(plan.moves.swapped_out, plan.moves.copied, plan.moves.swapped_in)
        for sequence in plan.admitted:
            self.bind(tracked[sequence.request.request_id], sequence)
        if not plan.sequences:
            return None
        context_lens = plan.starts + plan.lengths
        bucket = choose_bucket(
            self._runner.buckets,
            plan.num_tokens,
            len(plan.sequences),
            int(self._manager.blocks_for(context_lens.max())),
        )
        self.padded_tokens += bucket.tokens - plan.num_tokens
        buffer = build_batch(
            bucket,
            token_ids=[
                sequence.token_ids[start:end]
                for sequence, start, end in zip(
                    plan.sequences, plan.starts.tolist(), context_lens.tolist()
                )
            ],
            context_lens=context_lens,
            slots=plan.slots,
            num_sampled=plan.num_sampled,
            tables=self._manager.tables,
            parameters=self._parameters,
            logprob_targets=_logprob_targets(plan, tracked),
        )
        return self._runner.execute(bucket, buffer)

    def bind(self, tracked: RequestState, sequence: Sequence) -> None:
        """Write a request's sampling parameters into the rows of the slot that it was given."""
        params = tracked.request.sampling_params
        vocab_size = self._runner.vocab_size
        sample = tracked.sample_of(sequence)
        masks_stop_tokens = bool(
            sample is not None
            and tracked.request.stop_token_ids
            and sequence.num_output_tokens < params.min_tokens
        )
        if sample is not None:
            sample.masks_stop_tokens = masks_stop_tokens
        has_bias = bool(params.logit_bias) or masks_stop_tokens
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
        )
        if has_bias:
            row = np.zeros(vocab_size, np.float32)
            for token, bias in (params.logit_bias or {}).items():
                row[token] = min(max(bias, MASKED_LOGIT), -MASKED_LOGIT)
            if masks_stop_tokens:
                row[list(tracked.request.stop_token_ids)] = MASKED_LOGIT
            self._runner.set_bias(sequence.slot, row)

    def allow_stop_tokens(self, tracked: RequestState, sample: SampleState) -> None:
        """End the ban on stop tokens of a sample that has min_tokens, unless its slot is gone."""
        sequence = sample.sequence
        enough = sequence.num_output_tokens >= tracked.request.sampling_params.min_tokens
        if sample.masks_stop_tokens and enough and sequence.slot >= 0:
            self.bind(tracked, sequence)


def _logprob_targets(
    plan: StepPlan, tracked: Mapping[str, RequestState]
) -> list[tuple[int, np.ndarray]]:
    """For rows that want prompt logprobs: each query token's next prompt token, or -1."""
    targets = []
    for row, sequence in enumerate(plan.sequences):
        if sequence.request.sampling_params.prompt_logprobs is None:
            continue
        start, length = int(plan.starts[row]), int(plan.lengths[row])
        known = len(tracked[sequence.request.request_id].prompt_logprobs)
        places = np.arange(start + 1, start + length + 1)
        wanted = (places >= known) & (places < sequence.num_prompt_tokens)
        if wanted.any():
            places = np.minimum(places, sequence.num_prompt_tokens - 1)
            targets.append((row, np.where(wanted, sequence.token_ids[places], -1)))
    return targets


def collect_prompt_logprobs(
    plan: StepPlan, result: StepResult, tracked: Mapping[str, RequestState]
) -> None:
    """Hand the prompt logprobs that a step computed to their requests."""
    ends = np.cumsum(plan.lengths)
    for row, sequence in enumerate(plan.sequences):
        best = sequence.request.sampling_params.prompt_logprobs
        state = tracked.get(sequence.request.request_id)
        if best is None or state is None:
            continue
        known = state.prompt_logprobs
        offset = int(ends[row] - plan.lengths[row] - plan.starts[row])
        end = min(int(plan.starts[row] + plan.lengths[row]), sequence.num_prompt_tokens - 1)
        for place in range(len(known), end + 1):
            known.append(result.prompt_logprobs(offset + place - 1, best))
