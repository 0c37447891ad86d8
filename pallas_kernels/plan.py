"""Work lists of the paged-attention kernels: which program does what.

They are made once a step, before the loop over the layers: on the host with NumPy (`make_plan`), or
on the device (`pallas_kernels.plan_attention`). Their sizes follow from the shapes of the batch
alone, so that no step compiles anything.

Rows with few query tokens (decode rows) have their contexts split among programs. A decode step is
bound by the reading of keys and values, and a GPU reads fast only when all its multiprocessors do:
one program for each sequence and KV head would leave most of them idle in a small batch, and let a
long sequence outlast all others in a skewed one. So the contexts are cut into parts of about equal
length; how many follows from the number of multiprocessors and from the sum of the context lengths,
not from the batch size alone (Flash-Decoding, Dao et al. 2023).
"""

from typing import Any, NamedTuple

import numpy as np

# Keys that a part is counted in, and the fewest units that are worth a part of their own: its
# partial result costs as much traffic as some 4 keys, but starting and merging take time too.
UNIT = 64
_MIN_UNITS = 2
# Programs for each multiprocessor: about as many as fit at once. More would mean a second wave that
# fills the GPU only in part, fewer that a long sequence among short ones outlasts them. Chosen by
# scripts/estimate_decode.py among 1 to 16.
PROGRAMS_A_CORE = 3
# Where the number of multiprocessors is not known.
_DEFAULT_CORES = 108
_MAX_PACKED_QUERIES = 8
_NOWHERE = -(2**30)  # the position of padding rows: they see no key


class Plan(NamedTuple):
    """Three work lists, one work item a column: a pytree of int32 arrays.

    tiles [4, tiles]    Tiles of the ragged kernel: sequence, first row of q, live query tokens (0:
                        nothing to do), position of the first. All rows that are no decode rows,
                        padding included.
    items [6, items]    Parts of decode rows: sequence, first row of q, query tokens (0: nothing to
                        do), position of the first, which part, of how many.
    merged [4, rows]    Rows of q to merge: row, which query token of its sequence, first item, how
                        many (0: nothing to do).
    """

    tiles: Any
    items: Any
    merged: Any


class TileRows(NamedTuple):
    """The rows of a tile of queries: `tokens` query tokens with `heads` query heads each."""

    heads: int
    rows: int  # a power of two, >= tokens * heads
    tokens: int


def decode_rows(group: int) -> TileRows:
    """As few rows as a tensor core takes (16), or the whole group if that is more."""
    heads = min(group, 64)
    rows = max(16, power_of_two(heads))
    return TileRows(heads, rows, min(rows // heads, _MAX_PACKED_QUERIES))


def ragged_rows(group: int, is_float32: bool) -> TileRows:
    """64 rows; fewer for float32 products, which take registers instead of tensor cores."""
    rows = 16 if is_float32 else 64
    heads = min(group, rows)
    return TileRows(heads, rows, rows // heads)


def power_of_two(size: int) -> int:
    """The smallest power of two that is >= size."""
    return 1 << max(size - 1, 0).bit_length()


def make_plan(
    query_starts,
    context_lens,
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    dtype,
    num_cores: int | None = None,
    window=None,
    programs_a_core: int = PROGRAMS_A_CORE,
    xp: Any = np,
) -> Plan:
    """Work lists for calls of paged_attention with these query_starts and context_lens.

    Args:
        query_starts: As in paged_attention, int32 [S + 1].
        context_lens: As in paged_attention, int32 [S].
        num_tokens: Rows of q, padding included.
        num_heads: Query heads on one device.
        num_kv_heads: KV heads on one device.
        dtype: q's.
        num_cores: Streaming multiprocessors of the GPU (132 for an H200); None if not known.
        window: A window that the layers share, so that parts are made of what it shows. The plan
            is right for any window all the same.
        programs_a_core: How finely contexts are split: programs for each multiprocessor.
        xp: numpy, or jax.numpy for arrays on the device.

    Returns:
        The plan. The sizes of its arrays do not depend on the values of the arguments' arrays.

    Raises:
        ValueError: The shapes do not go together.
    """
    if query_starts.ndim != 1 or query_starts.shape[0] != context_lens.shape[0] + 1:
        raise ValueError(
            f"query_starts must have shape [S + 1] with S = {context_lens.shape[0]}, "
            f"got {query_starts.shape}"
        )
    num_sequences = context_lens.shape[0]
    group = num_heads // num_kv_heads
    decode_tokens = decode_rows(group).tokens
    ragged_tokens = ragged_rows(group, np.dtype(dtype) == np.float32).tokens
    query_lens = xp.diff(query_starts)
    decodes = (query_lens >= 1) & (query_lens <= decode_tokens) & (context_lens > 0)

    visible = context_lens
    if window is not None:
        shown = xp.minimum(context_lens, window) + query_lens - 1
        visible = xp.where(window > 0, xp.minimum(shown, context_lens), context_lens)
    units = xp.where(decodes, -(-visible // UNIT), 0)
    size = num_items(num_sequences, num_kv_heads, num_cores, programs_a_core)
    parts = _split(units, size, xp)
    first_items = xp.concatenate([xp.zeros(1, np.int32), _running_sum(parts, xp)])

    # The padding rows of q are one more sequence, without a context.
    padding = num_tokens - query_starts[-1:]
    positions = xp.concatenate([context_lens - query_lens, xp.full(1, _NOWHERE, np.int32)])
    lens = xp.concatenate([xp.where(decodes, 0, query_lens), padding])
    counts = -(-lens // ragged_tokens)
    ends = _running_sum(counts, xp)
    tile = xp.arange(num_tiles(num_tokens, num_sequences, ragged_tokens), dtype=np.int32)
    owner = _owners(ends, tile, xp)
    skipped = (tile - ends[owner] + counts[owner]) * ragged_tokens
    live = xp.where(tile < ends[-1], xp.minimum(lens[owner] - skipped, ragged_tokens), 0)
    sequence = xp.minimum(owner, num_sequences - 1)
    tiles = [sequence, query_starts[owner] + skipped, live, positions[owner] + skipped]

    item = xp.arange(size, dtype=np.int32)
    owner = _owners(first_items[1:], item, xp)
    items = [
        owner,
        query_starts[owner],
        xp.where(item < first_items[-1], query_lens[owner], 0),
        positions[owner],
        item - first_items[owner],
        parts[owner],
    ]

    row = xp.arange(num_merged(num_tokens, num_sequences, decode_tokens), dtype=np.int32)
    if len(row) == num_tokens:
        token, owner = row, _owners(query_starts[1:], row, xp)
        within = token - query_starts[owner]
        used = token < query_starts[-1]
    else:
        owner, within = row // decode_tokens, row % decode_tokens
        token = query_starts[owner] + within
        used = within < query_lens[owner]
    merged = [token, within, first_items[owner], xp.where(used, parts[owner], 0)]
    return Plan(*(xp.stack(rows).astype(np.int32) for rows in (tiles, items, merged)))


def num_items(
    num_sequences: int,
    num_kv_heads: int,
    num_cores: int | None,
    programs_a_core: int = PROGRAMS_A_CORE,
) -> int:
    """Items of a plan: one for each sequence, and those that splitting may add."""
    cores = num_cores or _DEFAULT_CORES
    return num_sequences + -(-cores * programs_a_core // num_kv_heads)


def num_tiles(num_tokens: int, num_sequences: int, tokens_a_tile: int) -> int:
    """Tiles of a plan: each sequence, and the padding, may leave one partly empty."""
    return min(num_tokens, num_tokens // tokens_a_tile + num_sequences + 1)


def num_merged(num_tokens: int, num_sequences: int, decode_tokens: int) -> int:
    """Rows to merge in a plan: all, unless there are more than decode rows may have."""
    return min(num_tokens, num_sequences * decode_tokens)


def _split(units, size: int, xp):
    """How many parts each sequence of so many units is cut into: at most `size` in all.

    Parts of c units give at most `sum(units) / c + S` parts, so the smallest c for which that is
    at most `size` needs no search.
    """
    budget = size - units.shape[0]
    part = xp.maximum(-(-units.sum() // budget), _MIN_UNITS)
    return (-(-units // part)).astype(np.int32)


def _running_sum(values, xp):
    return xp.cumsum(values, dtype=np.int32)


def _owners(ends, items, xp):
    """Which sequence each item belongs to, when sequence s owns items ends[s - 1] .. ends[s] - 1;
    the last one for those past the end.

    One comparison of all with all: searchsorted is a loop of launches on a GPU.
    """
    owners = (ends[None, :] <= items[:, None]).sum(axis=1)
    return xp.minimum(owners, ends.shape[0] - 1).astype(np.int32)
