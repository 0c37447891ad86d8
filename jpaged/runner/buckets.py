"""The few fixed shapes that steps are padded to, so that nothing recompiles while serving."""

from __future__ import annotations

from typing import NamedTuple

# Rows are padded to a multiple of 8: fewer take as long, which is what reading the weights takes.
_ROWS = 8
# Block tables are read in column groups of this many blocks, so their width is a multiple of it.
TABLE_GROUP = 16
# Up to this many blocks a sequence, one table width serves every step: it is only copied, never
# computed over, so a second width would double the number of programs to save microseconds.
_ONE_WIDTH_BLOCKS = 512
_WIDTH_RATIO = 4


class Bucket(NamedTuple):
    """Shape of one compiled step: tokens T, sequences S, blocks a sequence M."""

    tokens: int
    sequences: int
    blocks: int


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def table_width(max_model_len: int, block_size: int) -> int:
    """Columns of a block table row: blocks of a full-length sequence, padded to TABLE_GROUP."""
    return round_up(-(-max_model_len // block_size), TABLE_GROUP)


def _token_counts(largest: int) -> list[int]:
    """8, 16, 24, 32, 48, 64, 96, ...: steps of at most 1.5x, so padding wastes a third at worst."""
    counts = [_ROWS, 16, 24]
    power = 32
    while power <= largest:
        counts += [power, power + power // 2]
        power *= 2
    return sorted({count for count in counts if count < largest} | {largest})


def make_buckets(
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_blocks_per_sequence: int,
    *,
    row_tile: int | None = None,
) -> list[Bucket]:
    """All buckets that serving with these limits can need, smallest first.

    A step never holds more sequences than tokens, and neither attention nor sampling works for an
    empty row, so S follows from T instead of multiplying the number of buckets.
    `max_blocks_per_sequence` is a multiple of TABLE_GROUP. T and S are multiples of `row_tile`,
    else of 8.
    """
    multiple = row_tile or _ROWS
    counts = _token_counts(round_up(max_num_batched_tokens, multiple))
    tokens = sorted({round_up(count, multiple) for count in counts})
    most_sequences = round_up(max_num_seqs, multiple)
    widths = [max_blocks_per_sequence]
    while widths[0] > _ONE_WIDTH_BLOCKS:
        widths.insert(
            0, max(_ONE_WIDTH_BLOCKS, round_up(-(-widths[0] // _WIDTH_RATIO), TABLE_GROUP))
        )
    return [
        Bucket(count, min(count, most_sequences), width) for width in widths for count in tokens
    ]


def choose_bucket(buckets: list[Bucket], tokens: int, sequences: int, blocks: int) -> Bucket:
    """The first bucket that holds a step of these sizes.

    Raises ValueError if there is none, which means that the scheduler broke its limits.
    """
    for bucket in buckets:
        if bucket.tokens >= tokens and bucket.sequences >= sequences and bucket.blocks >= blocks:
            return bucket
    raise ValueError(
        f"no bucket holds a step of {tokens} tokens, {sequences} sequences and {blocks} blocks "
        f"a sequence; the largest is {buckets[-1]}"
    )


def decode_buckets(buckets: list[Bucket]) -> list[Bucket]:
    """Of the buckets of `make_buckets` those that decodes alone need: of each width up to the first
    that holds as many sequences as there may be."""
    most = max(bucket.sequences for bucket in buckets)
    full: set[int] = set()
    found = []
    for bucket in buckets:
        if bucket.blocks not in full:
            found.append(bucket)
        if bucket.sequences == most:
            full.add(bucket.blocks)
    return found
