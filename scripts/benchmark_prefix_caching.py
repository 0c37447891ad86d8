"""What prefix caching saves: many requests behind one system prompt, a chat, two tenants.

    benchmark_prefix_caching.py
    benchmark_prefix_caching.py --requests 256 --system_tokens 4000 --json caching.json

Three experiments, in one process:

  system prompt   --requests prompts that begin with the same --system_tokens tokens, computed with
                  caching off and on; the time of prefill is the time until each of them has its
                  first token, and the tokens must be the same
  chat            a conversation whose second turn begins with its first: how many tokens of the
                  second prompt were found, of those that both turns have in common in full blocks;
                  the answer must be the one without caching
  salts           two requests of the same prompt and of different cache_salt run side by side: how
                  many blocks both hold and how many tokens of the second were found, which must be
                  none; and, to see that there is something to share, the same with one salt

Exit codes: 0 all is well, 1 something was not as it must be, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from _command_line import (
    UsageError,
    as_usage_error,
    define_output_flags,
    device_facts,
    run_script,
    write_json,
)
from absl import flags

from jpaged.flags import define_engine_flags, engine_arguments
from jpaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jpaged.llm import LLM

QUESTIONS = (
    "Tell me about three kinds of clouds and what weather each of them announces.",
    "Which of them would you like to see on a day of hiking, and why?",
)


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Requests behind one system prompt.

    Attributes:
        seconds: until each has its first token.
        token_ids: the tokens of each.
        cached_tokens: tokens of their prompts that were found.
        prompt_tokens: tokens of their prompts.
    """

    seconds: float
    token_ids: list[list[int]]
    cached_tokens: int
    prompt_tokens: int


@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation of two turns.

    Attributes:
        prompt_tokens: tokens of the second turn's prompt.
        common_tokens: how many of its first tokens are those of the first turn, its answer (without
            the last token, which was never computed) included.
        cached_tokens: how many were found in the cache.
        answers: token ids of both answers.
    """

    prompt_tokens: int
    common_tokens: int
    cached_tokens: int
    answers: list[list[int]]


@dataclasses.dataclass(frozen=True)
class Neighbours:
    """Two requests of one prompt, side by side.

    Attributes:
        shared_blocks: blocks that both held.
        cached_tokens: tokens of the second one's prompt that were found.
    """

    shared_blocks: int
    cached_tokens: int


def make_prompts(
    num_requests: int, system_tokens: int, own_tokens: int, vocab_size: int, seed: int
) -> list[list[int]]:
    """Prompts of random tokens that begin with the same ones."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, vocab_size, system_tokens).tolist()
    return [system + rng.integers(0, vocab_size, own_tokens).tolist() for _ in range(num_requests)]


def run_prefill(llm: LLM, prompts: list[list[int]], max_tokens: int) -> Prefill:
    """Run the prompts together; the clock stops when the last of them has its first token."""
    engine, before = llm.engine, llm.stats()
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    token_ids: dict[str, list[int]] = {}
    seconds = 0.0
    began = time.perf_counter()
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if len(token_ids) < len(ids):
            seconds = time.perf_counter() - began
        token_ids.update({output.request_id: output.outputs[0].token_ids for output in outputs})
    after = llm.stats()
    return Prefill(
        seconds=seconds,
        token_ids=[token_ids[request_id] for request_id in ids],
        cached_tokens=after.prefix_cached_tokens - before.prefix_cached_tokens,
        prompt_tokens=after.prompt_tokens - before.prompt_tokens,
    )


def run_chat(llm: LLM, max_tokens: int) -> Chat:
    """Ask both questions, the second with the first and its answer before it."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    messages: list[dict[str, str]] = []
    outputs = []
    cached_tokens = 0
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        before = llm.stats().prefix_cached_tokens
        (output,) = llm.chat(messages, params)
        cached_tokens = llm.stats().prefix_cached_tokens - before
        outputs.append(output)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
    first, second = outputs
    computed = first.prompt_token_ids + first.outputs[0].token_ids[:-1]
    return Chat(
        prompt_tokens=len(second.prompt_token_ids),
        common_tokens=_common(computed, second.prompt_token_ids),
        cached_tokens=cached_tokens,
        answers=[output.outputs[0].token_ids for output in outputs],
    )


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for i, (a, b) in enumerate(zip(first, second)):
        if a != b:
            return i
    return min(len(first), len(second))


def run_neighbours(llm: LLM, prompt: list[int], salts: tuple[str, str]) -> Neighbours:
    """Run a request of each salt, the second when the first has computed its prompt."""
    engine = llm.engine
    ids = []
    for salt in salts:
        before = llm.stats().prefix_cached_tokens
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, cache_salt=salt)
        ids.append(engine.add_request(prompt, params))
        while not any(output.request_id == ids[-1] for output in engine.step()):
            pass
    cached_tokens = llm.stats().prefix_cached_tokens - before
    owners = engine.block_map().values()
    shared_blocks = sum(set(ids) <= set(owner) for owner in owners)
    while engine.has_unfinished_requests():
        engine.step()
    return Neighbours(shared_blocks, cached_tokens)


def load(values: flags.FlagValues, caching: bool) -> LLM:
    """The model and engine that the flags ask for, with prefix caching on or off."""
    from jpaged.llm import LLM  # importing jax takes seconds

    with as_usage_error():
        return LLM(**engine_arguments(values) | {"enable_prefix_caching": caching})


def define_flags() -> flags.FlagValues:
    """The script's flags, not yet parsed."""
    values = flags.FlagValues()
    define_engine_flags(values)

    def define_integer(name: str, default: int, help_text: str) -> None:
        flags.DEFINE_integer(name, default, help_text, lower_bound=1, flag_values=values)

    define_integer("requests", 64, "Requests behind the system prompt.")
    define_integer("system_tokens", 1000, "Tokens of the system prompt.")
    define_integer("own_tokens", 20, "Tokens of each request after it.")
    define_integer("max_tokens", 1, "Tokens that each of them generates.")
    define_integer("chat_tokens", 64, "Tokens of an answer in the chat.")
    define_output_flags(values)
    for name, default in (
        ("num_blocks", 1024),  # a fixed number: both engines run the same compiled programs
        ("max_model_len", 2048),
        ("max_num_seqs", 64),
        ("max_num_batched_tokens", 512),
        ("swap_space_gib", 0.0),
        ("preemption_mode", "recompute"),
    ):
        values.set_default(name, default)
    return values


def check(
    prefills: dict[bool, Prefill],
    chats: dict[bool, Chat],
    different: Neighbours,
    same: Neighbours,
    block_size: int,
) -> list[str]:
    """What is not as it must be, a sentence each."""
    chat = chats[True]
    common = min(chat.common_tokens, chat.prompt_tokens - 1)  # one is left to compute
    expected = common // block_size * block_size
    checks = {
        "caching changed the tokens behind the system prompt": (
            prefills[True].token_ids == prefills[False].token_ids
        ),
        "caching changed an answer of the chat": chats[True].answers == chats[False].answers,
        f"the chat's second turn found {chat.cached_tokens} tokens instead of {expected}": (
            chat.cached_tokens == expected
        ),
        "something was found with caching off": (
            prefills[False].cached_tokens == chats[False].cached_tokens == 0
        ),
        "requests of different salts shared something": (
            different.shared_blocks == different.cached_tokens == 0
        ),
        "requests of one salt shared nothing": same.shared_blocks > 0 and same.cached_tokens > 0,
    }
    return [sentence for sentence, holds in checks.items() if not holds]


def report(
    prefills: dict[bool, Prefill], chats: dict[bool, Chat], different: Neighbours, same: Neighbours
) -> list[str]:
    """The figures, a line for each experiment."""
    off, on, chat = prefills[False], prefills[True], chats[True]
    return [
        f"system prompt: {len(on.token_ids)} requests, {on.prompt_tokens} prompt tokens: prefill "
        f"{off.seconds:.2f} s without caching, {on.seconds:.2f} s with it, "
        f"{off.seconds / on.seconds:.1f} times as fast; {on.cached_tokens} tokens found",
        f"chat: the second turn's {chat.prompt_tokens} tokens begin with {chat.common_tokens} of "
        f"the first; {chat.cached_tokens} found ({chat.cached_tokens / chat.prompt_tokens:.0%})",
        f"salts: two share {different.shared_blocks} blocks, the second request found "
        f"{different.cached_tokens} tokens; with one salt {same.shared_blocks} blocks, "
        f"{same.cached_tokens} tokens",
    ]


def run(values: flags.FlagValues) -> int:
    """Do what the flags ask for; returns the exit code."""
    if values["enable_prefix_caching"].present:
        raise UsageError("enable_prefix_caching must be left out: both off and on are run")
    prompts: list[list[int]] = []
    prefills: dict[bool, Prefill] = {}
    chats: dict[bool, Chat] = {}
    for caching in (False, True):
        llm = load(values, caching)
        if not prompts:
            sizes = (values.requests, values.system_tokens, values.own_tokens)
            prompts = make_prompts(*sizes, llm.engine.vocab_size, values.seed)
        with as_usage_error():
            for prompt in prompts:
                llm.prepare(prompt, SamplingParams(max_tokens=values.max_tokens))
        prefills[caching] = run_prefill(llm, prompts, values.max_tokens)
        chats[caching] = run_chat(llm, values.chat_tokens)
        if caching:
            different = run_neighbours(llm, prompts[0], ("tenant a", "tenant b"))
            same = run_neighbours(llm, prompts[0], ("tenant c", "tenant c"))
        block_size = llm.engine.config.block_size
        del llm  # one pool at a time
    wrong = check(prefills, chats, different, same, block_size)
    print(*report(prefills, chats, different, same), sep="\n")
    for sentence in wrong:
        print(f"WRONG: {sentence}")
    result = {
        "model": values.model,
        "speedup": prefills[False].seconds / prefills[True].seconds,
        "prefill_without": dataclasses.asdict(prefills[False]),
        "prefill_with": dataclasses.asdict(prefills[True]),
        "chat": dataclasses.asdict(chats[True]),
        "two_salts": dataclasses.asdict(different),
        "one_salt": dataclasses.asdict(same),
        "wrong": wrong,
    }
    write_json(values.json, device_facts() | result)
    return 1 if wrong else 0


def main(argv: Sequence[str]) -> int:
    """Run the script; returns the exit code."""
    return run_script(argv, __doc__, define_flags(), run)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
