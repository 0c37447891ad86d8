"""What the benchmark scripts share: flags, errors in one sentence, files of results.

Imported first: it makes the packages importable by scripts where they are not installed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import _repository  # noqa: F401 (makes the packages importable)
from absl import flags


class UsageError(Exception):
    """Told in one sentence on standard error; the exit code is 2."""


@contextlib.contextmanager
def as_usage_error() -> Iterator[None]:
    """What jpaged raises for bad input, raised inside, is bad usage."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        raise UsageError(" ".join(str(error).split())) from error


def define_output_flags(values: flags.FlagValues, *, plot: str | None = None) -> None:
    """Define --json and, if `plot` says what there is to see, --plot."""
    flags.DEFINE_string("json", None, "File for the results, as JSON.", flag_values=values)
    if plot is not None:
        text = f"File for a plot of {plot} (needs matplotlib)."
        flags.DEFINE_string("plot", None, text, flag_values=values)


def integers(name: str, texts: Sequence[str]) -> list[int]:
    """The ints >= 1 of a list flag.

    Raises:
        UsageError: It is empty, or holds something else.
    """
    if not texts:
        raise UsageError(f"{name} must hold at least one int >= 1, got nothing")
    for text in texts:
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(f"{name} must be a list of ints >= 1, got {text!r}")
    return [int(text) for text in texts]


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files.

    Raises:
        UsageError: It is not installed.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise UsageError(
            "plot needs matplotlib: install the `bench` extra, as `pip install -e '.[bench]'` or "
            "`uv run --extra bench ...` do"
        ) from error
    matplotlib.use("Agg")  # no display is needed
    return importlib.import_module("matplotlib.pyplot")


def device_facts() -> dict[str, Any]:
    """What was measured on, for the head of a table."""
    import jax

    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
    }


def write_json(path: str | None, result: dict[str, Any]) -> None:
    """Write a result, if there is a file to write it to."""
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


def run_script(
    argv: Sequence[str],
    doc: str | None,
    values: flags.FlagValues,
    run: Callable[[flags.FlagValues], int],
) -> int:
    """Parse the flags, answer --help, check the files to be written, and run.

    Args:
        argv: The command and its arguments.
        doc: The script's text, for --help.
        values: Its flags, defined and not parsed.
        run: Does the work and returns the exit code; may raise UsageError.

    Returns:
        The exit code: run's, or 2 for bad usage, 130 when interrupted, and 141 if the reader of
        standard output went away.
    """
    flags.DEFINE_bool("help", False, "Show this.", flag_values=values)
    try:
        try:
            rest = values(list(argv))[1:]
        except flags.Error as error:
            raise UsageError(" ".join(str(error).split())) from error
        code = 0
        if values["help"].value:
            print(doc, values.get_help(), sep="\n")
        elif rest:
            raise UsageError(f"unexpected argument {rest[0]!r}")
        else:
            _check_files(values)
            code = run(values)
        sys.stdout.flush()  # what goes wrong with it is answered here
        return code
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


def _check_files(values: flags.FlagValues) -> None:
    """What would fail at the end of a long run is known before it."""
    for name in ("json", "plot"):
        path = values[name].value if name in values else None
        if path is not None and not os.path.isdir(os.path.dirname(path) or "."):
            raise UsageError(f"{name} must be in a folder that exists, got {path!r}")
    if "plot" in values and values["plot"].value is not None:
        pyplot()
