"""Readers of trace files: each yields one dictionary of `WorkloadRequest` fields a line."""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_SHAREGPT_COLUMNS = ("num_prefill_tokens", "num_decode_tokens")
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_JSONL_KEYS = ("prompt_token_ids", "input_length", "max_tokens", "arrival_time")
# What every request of a workload does anyway: a line may say so, and nothing else.
_JSONL_FIXED = {"temperature": 0, "ignore_eos": True}

MOONCAKE_BLOCK = 512  # tokens that an id in `hash_ids` stands for


class TraceError(ValueError):
    """A trace that is not in its format; the message names the file and the line."""


def read_records(path: str, kind: str) -> list[dict[str, Any]]:
    """The requests of a trace file, as keyword arguments of `WorkloadRequest`.

    Raises:
        TraceError: a line is not in the format.
        OSError: the file cannot be read.
    """
    # Bad bytes become lone surrogates, so that the line that holds them can be named.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        records = []
        lines = _csv_lines(file, path) if kind in ("sharegpt", "azure") else _json_lines(file, path)
        for number, line in lines:
            try:
                records.append(_READERS[kind](line) | {"source": f"line {number}"})
            except (ValueError, TypeError) as error:
                raise TraceError(f"{path}: line {number}: {error}") from error
    if not records:
        raise TraceError(f"{path}: a trace must hold at least one request, got none")
    _start_at_zero(records, path)
    return records


def _csv_lines(file: Any, path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(file)
    try:
        for row in reader:
            for value in row.values():
                _check_utf_8(value if isinstance(value, str) else "")
            yield reader.line_num, row
    except (csv.Error, ValueError) as error:
        raise TraceError(f"{path}: line {reader.line_num}: {error}") from error


def _json_lines(file: Any, path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, text in enumerate(file, start=1):
        try:
            _check_utf_8(text)
            if not text.strip():
                continue
            line = json.loads(text)
            if not isinstance(line, dict):
                raise ValueError(f"a line must be a JSON object, got {text.strip()[:40]!r}")
        except ValueError as error:
            raise TraceError(f"{path}: line {number}: {error}") from error
        yield number, line


def _check_utf_8(text: str) -> None:
    """Refuses what was read with `errors="surrogateescape"` from bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it must be UTF-8, got a bad byte at character {error.start}") from error


def _start_at_zero(records: list[dict[str, Any]], path: str) -> None:
    """Count arrival times from the first request on; all or none must have one."""
    known = [record["arrival_time"] for record in records if "arrival_time" in record]
    if not known:
        return
    first = min(known)
    for record in records:
        if "arrival_time" not in record:
            raise TraceError(
                f"{path}: {record['source']}: arrival_time must be in all lines or none"
            )
        record["arrival_time"] -= first


def _sharegpt(line: Mapping[str, Any]) -> dict[str, Any]:
    prompt, output = (_column(line, name) for name in _SHAREGPT_COLUMNS)
    return {"prompt_len": _count(prompt), "output_len": _count(output)}


def _azure(line: Mapping[str, Any]) -> dict[str, Any]:
    time, prompt, output = (_column(line, name) for name in _AZURE_COLUMNS)
    moment = datetime.datetime.fromisoformat(time)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)  # differences alone are used
    return {
        "arrival_time": moment.timestamp(),
        "prompt_len": _count(prompt),
        "output_len": _count(output),
    }


def _mooncake(line: Mapping[str, Any]) -> dict[str, Any]:
    _check_keys(line, _MOONCAKE_KEYS)
    prompt_len = _integer(line, "input_length", low=1)
    blocks = line.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(_is_count(block) for block in blocks):
        raise ValueError(f"hash_ids must be a list of ints >= 0, got {blocks!r}")
    if len(blocks) > -(-prompt_len // MOONCAKE_BLOCK):
        raise ValueError(
            f"hash_ids must be at most one for {MOONCAKE_BLOCK} tokens of input_length="
            f"{prompt_len}, got {len(blocks)}"
        )
    return {
        "arrival_time": _number(line, "timestamp") / 1000,
        "prompt_len": prompt_len,
        "output_len": _integer(line, "output_length", low=1),
        "prefix_blocks": tuple(blocks),
        "prefix_block_len": MOONCAKE_BLOCK,
    }


def _jsonl(line: Mapping[str, Any]) -> dict[str, Any]:
    _check_keys(line, (*_JSONL_KEYS, *_JSONL_FIXED))
    for name, value in _JSONL_FIXED.items():
        if line.get(name, value) != value:
            raise ValueError(f"{name} must be {json.dumps(value)}, got {line[name]!r}")
    if ("prompt_token_ids" in line) == ("input_length" in line):
        raise ValueError("a line must have one of prompt_token_ids and input_length")
    record: dict[str, Any] = {"output_len": _integer(line, "max_tokens", low=1)}
    if "arrival_time" in line:
        record["arrival_time"] = _number(line, "arrival_time")
    if "input_length" in line:
        return record | {"prompt_len": _integer(line, "input_length", low=1)}
    token_ids = line["prompt_token_ids"]
    if not isinstance(token_ids, list) or not token_ids or not all(map(_is_count, token_ids)):
        raise ValueError("prompt_token_ids must be a non-empty list of ints >= 0")
    return record | {"prompt_len": len(token_ids), "prompt_token_ids": tuple(token_ids)}


_READERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "sharegpt": _sharegpt,
    "azure": _azure,
    "mooncake": _mooncake,
    "jsonl": _jsonl,
}


def _column(line: Mapping[str, Any], name: str) -> str:
    value = line.get(name)
    if value is None:
        raise ValueError(f"a column {name} is missing")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"a number of tokens must be an int >= 1, got {text!r}")
    return int(text)


def _check_keys(line: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in line:
        if name not in known:
            raise ValueError(f"a line's keys must be among {', '.join(known)}, got {name!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _integer(line: Mapping[str, Any], name: str, *, low: int) -> int:
    value = line.get(name)
    if not _is_count(value) or value < low:  # type: ignore[operator]
        raise ValueError(f"{name} must be an int >= {low}, got {value!r}")
    return value  # type: ignore[return-value]


def _number(line: Mapping[str, Any], name: str) -> float:
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
    return float(value)
