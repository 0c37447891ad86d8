"""Generates text from prompts with a paged KV cache.

    generate.py --prompt "Once upon a time"
    generate.py --prompts_file prompts.jsonl --output outputs.jsonl

A line of the prompts file is a JSON object with one of "prompt", "prompt_token_ids" and "messages",
and any sampling parameters of its own. Standard output holds results alone.

Exit codes: 0 all is well, 1 a line of the prompts file was refused (the others ran), 2 bad usage or
no such model, 130 interrupted, 141 the reader of standard output went away.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from absl import flags

from jpaged.block_history import BlockHistory
from jpaged.block_picture import check_drawing
from jpaged.flags import (
    define_engine_flags,
    define_sampling_flags,
    engine_arguments,
    sampling_arguments,
    sampling_arguments_from_json,
)
from jpaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jpaged.llm import LLM, PreparedRequest
    from jpaged.outputs import RequestOutput

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
MAX_TOKENS = 2**31 - 1
# What jpaged raises for bad input; anything else is a bug and deserves its traceback.
BAD_INPUT = (ValueError, TypeError, NotImplementedError, OSError)


class UsageError(Exception):
    """Told in one sentence on standard error; the exit code is 2."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A well-formed line of a prompts file."""

    number: int
    prompt: Any  # a string, token ids or messages, by `key`
    key: str
    sampling: dict[str, Any]


def parse_flags(argv: Sequence[str]) -> flags.FlagValues | None:
    """The parsed flags; None if --help was given and answered."""
    values = flags.FlagValues()
    define_engine_flags(values)
    define_sampling_flags(values)
    flags.DEFINE_multi_string("prompt", [], "A prompt (repeatable).", flag_values=values)
    flags.DEFINE_string(
        "prompts_file", None, "JSON Lines file of prompts, - for stdin.", flag_values=values
    )
    flags.DEFINE_string(
        "output", None, "JSON Lines file for the results, - for stdout.", flag_values=values
    )
    flags.DEFINE_bool("chat", False, "Prompts are a user's messages.", flag_values=values)
    flags.DEFINE_bool("stream", False, "Print text as it comes.", flag_values=values)
    flags.DEFINE_bool("stats", False, "Print the engine's counters to stderr.", flag_values=values)
    flags.DEFINE_string(
        "draw_blocks",
        None,
        "Picture of the KV pool over time (.png, .pdf or .svg); needs the extra 'bench'.",
        flag_values=values,
    )
    flags.DEFINE_bool("help", False, "Show this.", flag_values=values)
    try:
        rest = values(list(argv))[1:]
    except flags.Error as error:
        raise UsageError(_one_line(error)) from error
    if values["help"].value:
        print(__doc__, values.get_help(), sep="\n")
        return None
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}: give prompts with --prompt")
    return values


def check_usage(values: flags.FlagValues) -> None:
    """Refuse flags that do not go together."""
    if not values.prompt and values.prompts_file is None:
        raise UsageError("give --prompt or --prompts_file")
    if values.prompt and values.prompts_file is not None:
        raise UsageError("give --prompt or --prompts_file, not both")
    if values.stream and (values.prompts_file is not None or values.output is not None):
        raise UsageError("--stream prints text, so it goes with --prompt and without --output")
    if values.draw_blocks is not None:
        try:
            check_drawing(values.draw_blocks)
        except (ValueError, ImportError) as error:
            raise UsageError(_one_line(error)) from error


def parse_line(number: int, raw: bytes) -> Line:
    """A line of a prompts file; `ValueError` or `TypeError` says what is wrong with it."""
    try:
        data = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"a line must be UTF-8, got a bad byte at {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a line must be a JSON object: {error}") from error
    if not isinstance(data, dict):
        raise TypeError(f"a line must be a JSON object, got a {type(data).__name__}")
    keys = [key for key in PROMPT_KEYS if key in data]
    if len(keys) != 1:
        raise ValueError(
            f"a line must have one of {', '.join(PROMPT_KEYS)}, got {' and '.join(keys) or 'none'}"
        )
    prompt = data.pop(keys[0])
    allowed, kind = {"prompt": ("a string", str)}.get(keys[0], ("a list", list))
    if not isinstance(prompt, kind):
        raise TypeError(f"{keys[0]} must be {allowed}, got {prompt!r}")
    return Line(number, prompt, keys[0], sampling_arguments_from_json(data))


def check_early(sampling: dict[str, Any]) -> SamplingParams:
    """Raise what is wrong with sampling parameters, before the model is loaded: its
    generation_config.json may give a max_tokens, so that min_tokens is not judged without one."""
    return SamplingParams(**({"max_tokens": MAX_TOKENS} | sampling))


@contextlib.contextmanager
def as_usage_error() -> Iterator[None]:
    """Bad input raised inside is bad usage."""
    try:
        yield
    except BAD_INPUT as error:
        raise UsageError(_one_line(error)) from error


@contextlib.contextmanager
def opened(name: str, path: str, mode: str, use: str) -> Iterator[IO[Any]]:
    """The file that flag `name` gives, or a usage error."""
    try:
        file = open(path, mode, encoding=None if "b" in mode else "utf-8")  # noqa: SIM115 (below)
    except OSError as error:
        raise UsageError(
            f"{name} must be a file that can be {use}, got {path!r} ({error.strerror})"
        ) from error
    with file:
        yield file


def open_output(path: str | None, mode: str = "w") -> contextlib.AbstractContextManager[IO[str]]:
    """Where results go; standard output stays open."""
    if path is None or path == "-":
        return contextlib.nullcontext(sys.stdout)
    return opened("output", path, mode, "written")


class PromptsFile:
    """Reads a prompts file and reports its bad lines on standard error.

    Attributes:
        num_bad_lines: lines that were refused so far.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.num_bad_lines = 0

    @contextlib.contextmanager
    def reporting(self, number: int) -> Iterator[None]:
        """Report bad input of line `number`, raised inside, and go on."""
        try:
            yield
        except BAD_INPUT as error:
            self.num_bad_lines += 1
            print(f"{self._path}: line {number}: {_one_line(error)}", file=sys.stderr)

    def read(self, given: dict[str, Any]) -> list[Line]:
        """The well-formed lines, with `given` as the parameters that a line may override. Blank
        lines are skipped."""
        lines = []
        with (
            contextlib.nullcontext(sys.stdin.buffer)
            if self._path == "-"
            else opened("prompts_file", self._path, "rb", "read")
        ) as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    with self.reporting(number):
                        line = parse_line(number, raw)
                        check_early(given | line.sampling)
                        lines.append(line)
        return lines


def output_line(output: RequestOutput) -> str:
    """A result as one line of JSON."""
    record = dataclasses.asdict(output)
    del record["finished"]  # every result that is written is
    if record["prompt_logprobs"] is None:
        del record["prompt_logprobs"]
    return json.dumps(record, ensure_ascii=False)


def load(values: flags.FlagValues) -> LLM:
    """The model and engine that the flags ask for."""
    from jpaged.llm import LLM  # not before the flags were found good: importing jax takes seconds

    with as_usage_error():
        return LLM(**engine_arguments(values))


def prepare(llm: LLM, key: str, prompt: Any, chat: bool, params: SamplingParams) -> PreparedRequest:
    """A checked request; with `chat` a text is what the user says."""
    if key == "prompt" and chat:
        key, prompt = "messages", [{"role": "user", "content": prompt}]
    return (llm.prepare_chat if key == "messages" else llm.prepare)(prompt, params)


def stream(llm: LLM, requests: list[PreparedRequest]) -> None:
    """Print the text of one request after another as it comes."""
    for request in requests:
        num_printed = 0
        for output in llm.run_stream(request):
            text = output.outputs[0].text
            print(text[num_printed:], end="", flush=True)
            num_printed = len(text)
        print(flush=True)


def write(outputs: Iterator[RequestOutput], path: str | None, *, as_json: bool) -> None:
    """Write results, a line each, as they come; an earlier file is emptied by the first."""
    first = next(outputs)
    with open_output(path) as file:
        for output in itertools.chain([first], outputs):
            texts = [completion.text for completion in output.outputs]
            for line in [output_line(output)] if as_json else texts:
                print(line, file=file, flush=True)


def print_stats(llm: LLM, seconds: float) -> None:
    """The engine's counters and the speed of the run, as one line of JSON on standard error."""
    counters = llm.stats()
    stats = dataclasses.asdict(counters)
    stats["internal_waste"] = counters.internal_waste
    stats["prefix_hit_rate"] = round(counters.prefix_hit_rate, 4)
    stats["seconds"] = round(seconds, 3)  # of generation: without loading and compiling
    stats["generated_tokens_per_second"] = round(stats["generated_tokens"] / seconds, 1)
    print(json.dumps(stats), file=sys.stderr)


def generate(values: flags.FlagValues) -> int:
    """Do what the flags ask for; returns the exit code."""
    check_usage(values)
    with as_usage_error():
        given = sampling_arguments(values)
        if check_early(given).num_sequences > 1 and values.stream:
            raise ValueError("--stream prints one sequence: n, best_of and beam_width must be 1")
    prompts_file = None
    if values.prompts_file is not None:
        prompts_file = PromptsFile(values.prompts_file)
        lines = prompts_file.read(given)
    else:
        lines = [Line(number, text, "prompt", {}) for number, text in enumerate(values.prompt)]
    with as_usage_error():
        if any(not line.prompt for line in lines) and prompts_file is None:
            raise ValueError("a prompt must hold at least one token, got ''")
    with open_output(values.output, "a"):
        pass  # it can be written: known before the model loads, and nothing in it is lost yet
    if values.draw_blocks is not None:
        with opened("draw_blocks", values.draw_blocks, "ab", "written"):
            pass
    requests: list[PreparedRequest] = []
    if lines:
        llm = load(values)
        with as_usage_error():
            defaults = dataclasses.replace(llm.engine.get_default_sampling_params(), **given)
        for line in lines:
            with prompts_file.reporting(line.number) if prompts_file else as_usage_error():
                params = dataclasses.replace(defaults, **line.sampling)
                requests.append(prepare(llm, line.key, line.prompt, values.chat, params))
    if requests:
        history = None if values.draw_blocks is None else BlockHistory(llm.engine)
        began = time.perf_counter()
        if values.stream:
            stream(llm, requests)
        else:
            as_json = prompts_file is not None or values.output is not None
            write(llm.iterate(requests, use_tqdm=len(requests) > 1), values.output, as_json=as_json)
        if values.stats:
            print_stats(llm, time.perf_counter() - began)
        if history is not None:
            history.close()
            with as_usage_error():
                history.draw(values.draw_blocks)
    return 1 if prompts_file is not None and prompts_file.num_bad_lines else 0


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def main(argv: Sequence[str]) -> int:
    """Run the script; returns the exit code."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("jpaged").setLevel(logging.INFO)
    for standard in (sys.stdout, sys.stderr):  # whatever the locale: results may be Korean
        if hasattr(standard, "reconfigure"):
            standard.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        values = parse_flags(argv)
        return 0 if values is None else generate(values)
    except UsageError as error:
        print(f"{os.path.basename(argv[0])}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Python would complain once more when it flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv))
