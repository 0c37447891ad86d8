"""Batch descriptors: one packed int32 buffer a step, filled by the host and unpacked in the jit.

Everything that a step needs to know travels in one buffer: a transfer costs the host about as much
for one array as for a kilobyte more of it. Floats travel as their bit patterns. (But for the
tokens of prompts whose logprobs are wanted, which few steps are asked for.)
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpaged.runner.buckets import Bucket

# Columns of a request's row of sampling parameters. "f" marks a float32 stored by its bits. A row
# of zeros is padding: it asks for the best token and for nothing else.
PARAMETERS = {
    "prompt_len": "i",  # tokens of the prompt: where generated tokens begin
    "temperature": "f",
    "top_k": "i",
    "top_p": "f",
    "min_p": "f",
    "presence_penalty": "f",
    "frequency_penalty": "f",
    "repetition_penalty": "f",
    "seed_high": "i",  # the 64-bit seed of the request, as two words
    "seed_low": "i",
    "sample_index": "i",
    "has_bias": "i",  # 1 if the request's row of the bias table is to be added
    "wants_logprobs": "i",
}
# Several decode steps in one call stop after one of these (-1: none). What a request has beyond
# them the host finds out afterwards.
STOP_TOKENS = tuple(f"stop_token_{i}" for i in range(4))
PARAMETERS |= dict.fromkeys(STOP_TOKENS, "i")
_COLUMN = {name: column for column, name in enumerate(PARAMETERS)}
_HEADER = 2  # num_sampled, num_steps


class Batch(NamedTuple):
    """What a step computes, as arrays on the device. Rows past the live ones are zero.

    Sequences that sample a token in this step come first (`num_sampled` of them).
    """

    num_sampled: Int[Array, ""]
    num_steps: Int[Array, ""]  # more than 1: decode steps of the same sequences, in one call
    token_ids: Int[Array, " T"]  # -1: the token that was sampled last in the row's slot
    query_starts: Int[Array, " S+1"]
    context_lens: Int[Array, " S"]
    slots: Int[Array, " S"]  # the sequence's place in last_tokens and in the bias table
    parameters: Int[Array, "S P"]
    block_tables: Int[Array, "S M"]


def parameter(parameters: Int[Array, "R P"], name: str) -> Float[Array, " R"] | Int[Array, " R"]:
    """One sampling parameter of every row."""
    column = parameters[:, _COLUMN[name]]
    if PARAMETERS[name] == "f":
        return jax.lax.bitcast_convert_type(column, jnp.float32)
    return column


def _shapes(bucket: Bucket) -> dict[str, tuple[int, ...]]:
    T, S, M = bucket
    return {
        "header": (_HEADER,),
        "token_ids": (T,),
        "query_starts": (S + 1,),
        "context_lens": (S,),
        "slots": (S,),
        "parameters": (S, len(PARAMETERS)),
        "block_tables": (S, M),
    }


def buffer_size(bucket: Bucket) -> int:
    """Length of the packed buffer, in int32 words."""
    return sum(int(np.prod(shape)) for shape in _shapes(bucket).values())


def _split(buffer, bucket: Bucket) -> dict:
    parts, offset = {}, 0
    for name, shape in _shapes(bucket).items():
        size = int(np.prod(shape))
        parts[name] = buffer[offset : offset + size].reshape(shape)
        offset += size
    return parts


def unpack(buffer: Int[Array, " words"], bucket: Bucket) -> Batch:
    """The fields of a packed buffer; called inside the jitted step."""
    parts = _split(buffer, bucket)
    header = parts.pop("header")
    num_sampled, num_steps = header
    return Batch(num_sampled, num_steps, **parts)


def read_num_steps(buffer: Int[np.ndarray, " words"]) -> int:
    """How many steps a packed buffer asks for; for stand-ins of the runner."""
    return int(buffer[1])


def pack_parameters(values: dict[str, int | float]) -> Int[np.ndarray, " P"]:
    """One request's row of sampling parameters, from a value for each name in PARAMETERS."""
    row = np.empty(len(PARAMETERS), np.int32)
    for name, kind in PARAMETERS.items():
        column = _COLUMN[name]
        if kind == "f":
            row[column : column + 1].view(np.float32)[0] = values[name]
        else:
            row[column : column + 1].view(np.uint32)[0] = int(values[name]) & 0xFFFFFFFF
    return row


def build_batch(
    bucket: Bucket,
    *,
    token_ids: Int[np.ndarray, " tokens"],
    lengths: Int[np.ndarray, " n"],
    context_lens: Int[np.ndarray, " n"],
    slots: Int[np.ndarray, " n"],
    num_sampled: int,
    tables: Int[np.ndarray, "slots M_all"],
    parameters: Int[np.ndarray, "slots P"],
    num_steps: int = 1,
) -> Int[np.ndarray, " words"]:
    """The packed buffer of a step: a fresh array, since the device may read it after we return.

    token_ids        the tokens that this step computes, row after row; -1 for the token that was
                     sampled last in the row's slot
    lengths          tokens of each row
    context_lens     tokens in each row's cache after this step (after the first of several)
    slots            each row's row in `tables` and `parameters`
    num_sampled      how many of the first rows sample a token
    num_steps        decode steps in one call
    """
    buffer = np.zeros(buffer_size(bucket), np.int32)
    parts = _split(buffer, bucket)
    n = len(lengths)
    parts["header"][0] = num_sampled
    parts["header"][1] = num_steps
    parts["token_ids"][: len(token_ids)] = token_ids
    starts = parts["query_starts"]
    np.cumsum(lengths, out=starts[1 : n + 1])
    starts[n + 1 :] = len(token_ids)  # empty rows begin and end where the live ones end
    parts["context_lens"][:n] = context_lens
    parts["slots"][:n] = slots
    parts["parameters"][:n] = parameters[slots]
    columns = min(bucket.blocks, tables.shape[1])
    parts["block_tables"][:n, :columns] = tables[slots, :columns]
    return buffer
