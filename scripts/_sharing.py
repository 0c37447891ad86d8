"""Measures how many blocks sharing saves: parallel sampling without a model, beam search with one.

In a step, L is what the running sequences would hold if none shared (the blocks of their tables,
each sequence's counted) and P what they hold (each block once). The paper's figure 15 is "blocks
saved by sharing / blocks without sharing" in a saturated system; the authors' script
(plot/plot_fig15.py in github.com/sosp-ae-39/sosp-ae-astra) averages L / P over steps and plots
1 - 1 / mean. That is `Sharing.saving`; the mean of 1 - P / L, and 1 - sum P / sum L, which is a
mean weighted by memory, are there for comparison. As with the authors, all sequences of a request
hold its prompt while it is computed, whether they have been forked by then or not.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import _repository  # noqa: F401 (makes the packages importable)
import numpy as np
from jaxtyping import Int

from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Request, Scheduler

if TYPE_CHECKING:
    from jpaged.llm import LLM, PreparedRequest

# What the authors ran with.
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 2560

# Prompts of beam searches are cut from these: instructions such as those of the Alpaca data set.
INSTRUCTIONS = """
Give three tips for sleeping better.
What are the phases of the Moon?
Describe the parts of a flower.
How can a city reduce its traffic?
Write a short story about a lighthouse keeper who finds a bottle on the beach.
Rewrite the sentence in the passive voice: The committee approved the new budget last week.
Explain why the sky is blue to a child who is six years old.
Name five rivers in Europe and the countries through which they flow.
Summarise the main causes of the French Revolution in two sentences.
Suggest a name for a small bakery that sells sourdough bread.
Translate the phrase "good morning" into Spanish, German and Italian.
Compare the lives of a city dweller and of a farmer.
What is the difference between weather and climate?
Generate a list of ten questions for a job interview with a nurse.
Write a polite email that asks a colleague to move a meeting to Thursday.
How do vaccines work?
Find the average of the numbers 12, 15, 18 and 27.
Give an example of a metaphor and say what it means.
Plan a day in Lisbon for a family with two children.
Why do leaves change their colour in autumn?
Classify these animals as mammals or reptiles: lizard, whale, bat, tortoise.
Write a recipe for lentil soup.
Explain how a bill becomes a law.
Describe a sunset over the sea.
What would happen if the Moon were twice as far away?
Correct the spelling in this sentence: She recieved the adress yesterday.
List the advantages and disadvantages of working from home.
Tell a joke about a computer.
Outline the plot of a film in which a robot learns to paint.
What should I pack for a week of hiking in the mountains?
""".strip().split("\n")


@dataclasses.dataclass
class Sharing:
    """Blocks held over the steps of a run.

    Attributes:
        without, held: L and P of each step.
        slots_used: for each step, the share of the allocated token slots that held a token.
        least: for each step, what the running requests would hold if their sequences, all as long
            as the first (as beams are), shared everything but their last blocks.
        apart: for each step and each request of several sequences, how many of their last tokens
            lie after the last one that all of them share.
        preemptions: of all kinds.
    """

    without: list[int] = dataclasses.field(default_factory=list)
    held: list[int] = dataclasses.field(default_factory=list)
    slots_used: list[float] = dataclasses.field(default_factory=list)
    least: list[int] = dataclasses.field(default_factory=list)
    apart: list[int] = dataclasses.field(default_factory=list)
    preemptions: int = 0

    @property
    def saving(self) -> float:
        """1 - 1 / mean(L / P): the authors' average."""
        return 1 - 1 / float(np.mean(np.array(self.without) / self.held))

    @property
    def mean_saving(self) -> float:
        """The mean of 1 - P / L over steps."""
        return float(np.mean(1 - np.array(self.held) / self.without))

    @property
    def total_saving(self) -> float:
        """1 - sum P / sum L: a step counts by the blocks that it would take."""
        return 1 - sum(self.held) / sum(self.without)

    @property
    def largest_total_saving(self) -> float:
        """`total_saving` if sequences of a request shared everything but their last blocks."""
        return 1 - sum(self.least) / sum(self.without)

    @property
    def slots_used_share(self) -> float:
        """The mean of `slots_used`."""
        return float(np.mean(self.slots_used))

    @property
    def mean_apart(self) -> float:
        """The mean of `apart`; 0 if there was no request of several sequences."""
        return float(np.mean(self.apart)) if self.apart else 0.0

    def record(self, scheduler: Scheduler, *, tokens: bool = False) -> None:
        """Note what is held now, after a step was scheduled.

        tokens  also compare the sequences' tokens, for `apart`
        """
        manager = scheduler.block_manager
        if not manager.num_used_blocks:
            return
        least = not_forked = 0
        for request in scheduler.running:
            placed = [s for s in request.unfinished if s.slot >= 0]
            blocks = manager.num_blocks_of(placed[0].slot)
            not_forked += (request.num_rows - len(placed)) * blocks
            least += blocks - 1 + len(placed)
            if tokens and len(placed) > 1:
                end = min(s.num_tokens for s in placed)
                token_ids = np.stack([s.token_ids[:end] for s in placed])
                differs = np.flatnonzero((token_ids != token_ids[0]).any(axis=0))
                self.apart.append(end - int(differs[0]) if differs.size else 0)
        self.without.append(manager.num_table_blocks + not_forked)
        self.held.append(manager.num_used_blocks)
        self.slots_used.append(manager.slots_used_share)
        self.least.append(least)


def simulate_parallel(
    prompt_lens: Int[np.ndarray, " n"],
    output_lens: Int[np.ndarray, " n"],
    num_samples: int,
    *,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
) -> Sharing:
    """Schedule a saturated queue of requests of num_samples samples each, without a model.

    Samples run to their output length, and no two of them are alike. Steps count from when a tenth
    of the requests is finished until the queue runs dry.

    Raises:
        ValueError: There is no such step, or a request could never fit.
    """
    scheduler = Scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=max_model_len,
    )
    requests = [
        Request(
            str(number),
            number,
            range(prompt_len),
            SamplingParams(n=num_samples, max_tokens=output_len),
            stop_token_ids=frozenset(),
            max_total_tokens=prompt_len + output_len,
            arrival_time=0.0,
            num_sequences=num_samples,
        )
        for number, (prompt_len, output_len) in enumerate(
            zip(prompt_lens.tolist(), output_lens.tolist(), strict=True)
        )
    ]
    for request in requests:
        scheduler.add(request)
    sharing = Sharing()
    warm = requests[: len(requests) // 10]
    while scheduler.waiting:
        plan = scheduler.schedule()
        if warm:
            warm = [request for request in warm if not request.finished]
        else:
            sharing.record(scheduler)
        scheduler.update(plan, np.zeros(plan.num_sampled, np.int32))
    if not sharing.held:
        raise ValueError(
            f"requests must be many more than run at once, to keep a queue, got {len(requests)}"
        )
    memory = scheduler.memory
    sharing.preemptions = memory.preemptions_recompute + memory.preemptions_swap
    return sharing


def make_prompt(llm: LLM, length: int, rng: np.random.Generator) -> list[int]:
    """`length` tokens of instructions, one after the other, cut off where it ends."""
    assert llm.engine.tokenizer is not None
    token_ids: list[int] = []
    while len(token_ids) < length:
        text = INSTRUCTIONS[rng.integers(len(INSTRUCTIONS))]
        token_ids += llm.engine.tokenizer.encode(f" {text}" if token_ids else text)
    return token_ids[:length]


@contextlib.contextmanager
def recorded(scheduler: Scheduler) -> Iterator[Sharing]:
    """Records every step that is scheduled inside."""
    sharing = Sharing()
    schedule = scheduler.schedule

    def schedule_and_record():
        plan = schedule()
        sharing.record(scheduler, tokens=True)
        return plan

    scheduler.schedule = schedule_and_record  # type: ignore[method-assign]
    try:
        yield sharing
    finally:
        del scheduler.schedule  # the class has its own


def beam_requests(
    llm: LLM, prompts: list[list[int]], output_lens: Int[np.ndarray, " n"], width: int
) -> list[PreparedRequest]:
    """Searches with `width` beams from each prompt to its output length, through stop tokens too:
    the length penalty then changes nothing.

    Raises:
        ValueError: The engine cannot run one.
    """
    return [
        llm.prepare(prompt, SamplingParams(beam_width=width, max_tokens=length, ignore_eos=True))
        for prompt, length in zip(prompts, output_lens.tolist(), strict=True)
    ]


def run_beams(llm: LLM, requests: list[PreparedRequest]) -> Sharing:
    """Run beam searches together."""
    before = llm.stats()
    with recorded(llm.engine.scheduler) as sharing:
        llm.run(requests)
    after = llm.stats()
    sharing.preemptions = (
        after.preemptions_recompute
        + after.preemptions_swap
        - before.preemptions_recompute
        - before.preemptions_swap
    )
    return sharing
