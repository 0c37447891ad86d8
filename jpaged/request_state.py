"""What the engine keeps of an unfinished request beside the scheduler's state."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from jpaged.detokenizer import Detokenizer
from jpaged.outputs import CompletionOutput, RequestOutput
from jpaged.scheduling import Request, Sequence
from jpaged.scheduling.beam_search import BeamHypothesis


@dataclasses.dataclass(eq=False)
class SampleState:
    """The way from one sequence's tokens to its output; filled by the engine after each step.

    Attributes:
        sequence: the scheduler's side of it.
        detokenizer: None without a tokenizer.
        logprobs: of the generated tokens so far, if asked for.
        cumulative_logprob: sum over the chosen tokens, if asked for.
    """

    sequence: Sequence
    detokenizer: Detokenizer | None
    logprobs: list[dict[int, float]] = dataclasses.field(default_factory=list)
    cumulative_logprob: float = 0.0
    _detokenized: int = 0

    def detokenize(self) -> str | None:
        """Give the detokenizer the tokens that it has not seen; the stop string they complete."""
        if self.detokenizer is None:
            return None
        sequence = self.sequence
        tokens = sequence.output_token_ids[self._detokenized :].tolist()
        self._detokenized += len(tokens)
        if tokens and sequence.finish_reason == "stop":
            tokens.pop()  # the stop token that ended it is no part of the text
        return self.detokenizer.add(tokens)

    def output(self, index: int) -> CompletionOutput:
        """A snapshot for the caller, as the request's completion number `index`."""
        sequence = self.sequence
        params = sequence.request.sampling_params
        text = ""
        if self.detokenizer is not None:
            if sequence.finish_reason is not None:
                self.detokenize()
                self.detokenizer.finish()
            text = self.detokenizer.text
        wants_logprobs = params.logprobs is not None
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=sequence.output_token_ids.tolist(),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            cumulative_logprob=self.cumulative_logprob if wants_logprobs else None,
            logprobs=list(self.logprobs) if wants_logprobs else None,
        )


@dataclasses.dataclass(eq=False)
class RequestState:
    """A request's samples, and what they have in common.

    Attributes:
        request: the scheduler's side of it.
        prompt: the prompt's text, or None.
        stream: whether `Engine.step` returns it before it is finished.
        seed: the seed of its samples, given or derived.
        first_sample_index: the number by which the first of its samples is told from others of
            the same seed.
        branch_numbers: numbers for the samples of branches, which all descendants share, so that
            no two draw alike.
        make_detokenizer: a fresh one for a sample; returns None without a tokenizer.
        samples: one for each sequence; of beams, none.
        prompt_logprobs: of the prompt tokens so far, if asked for; the first has none.
        chooses_samples: whether more sequences are sampled than returned (best_of > n).
        needs_logprobs: whether its rows need log-probabilities from the device.
        reports_progress: whether its outputs mean something before it is finished: not where the
            best samples or beams are chosen at the end.
        reads_tokens: whether the engine looks at its tokens one by one as they come.
    """

    request: Request
    prompt: str | None
    stream: bool
    seed: int
    first_sample_index: int
    make_detokenizer: Callable[[], Detokenizer | None]
    branch_numbers: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))
    samples: list[SampleState] = dataclasses.field(init=False)
    prompt_logprobs: list[dict[int, float] | None] = dataclasses.field(
        default_factory=lambda: [None]
    )

    chooses_samples: bool = dataclasses.field(init=False)
    needs_logprobs: bool = dataclasses.field(init=False)
    reports_progress: bool = dataclasses.field(init=False)
    reads_tokens: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        params, beams = self.request.sampling_params, self.request.beams
        self.samples = []
        if beams is None:
            self.samples = [
                SampleState(sequence, self.make_detokenizer())
                for sequence in self.request.sequences
            ]
        self.chooses_samples = len(self.samples) > params.n
        chooses = self.chooses_samples or beams is not None
        self.needs_logprobs = chooses or params.logprobs is not None
        self.reports_progress = self.stream and not chooses
        self.reads_tokens = self.needs_logprobs or self.reports_progress or bool(params.stop)

    def text_so_far(self) -> str | None:
        """The prompt's text and what its one sample has added; None if that has no text."""
        if self.prompt is None or len(self.samples) != 1:
            return None
        self.samples[0].detokenize()  # a request that does not stream is behind with it
        return self.prompt + self.samples[0].output(0).text

    def output(self) -> RequestOutput:
        """A snapshot for the caller."""
        request = self.request
        params = request.sampling_params
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=self._completions(),
            prompt_logprobs=(
                list(self.prompt_logprobs) if params.prompt_logprobs is not None else None
            ),
            finished=request.finished,
        )

    def _completions(self) -> list[CompletionOutput]:
        search, n = self.request.beams, self.request.sampling_params.n
        if search is None:
            samples = self.samples
            if self.chooses_samples:
                samples = sorted(samples, key=lambda sample: -sample.cumulative_logprob)
            return [sample.output(i) for i, sample in enumerate(samples[:n])]
        if search.done:
            return [self._hypothesis(i, h) for i, h in enumerate(search.best(n))]
        # Aborted: the beams as they stand, best first.
        beams = self.request.sequences[:n]
        return [
            SampleState(sequence, self.make_detokenizer()).output(i)
            for i, sequence in enumerate(beams)
        ]

    def _hypothesis(self, index: int, hypothesis: BeamHypothesis) -> CompletionOutput:
        tokens = hypothesis.token_ids.tolist()
        stopped = hypothesis.finish_reason == "stop"
        text, detokenizer = "", self.make_detokenizer()
        if detokenizer is not None:
            detokenizer.add(tokens[:-1] if stopped else tokens)
            detokenizer.finish()
            text = detokenizer.text
        listed = self.request.sampling_params.stop_token_ids or ()
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=tokens,
            finish_reason=hypothesis.finish_reason,
            stop_reason=tokens[-1] if stopped and tokens[-1] in listed else None,
            cumulative_logprob=hypothesis.cumulative_logprob,
            logprobs=None,
        )
