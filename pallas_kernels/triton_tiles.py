"""Tile sizes of the Triton attention kernels."""

from typing import NamedTuple

import jax.experimental.pallas.triton as plt
import jax.numpy as jnp

from pallas_kernels.plan import TileRows, decode_rows, power_of_two, ragged_rows


class Config(NamedTuple):
    """What is static in a kernel. Triton wants powers of two, so M and `padded_dim` are padded."""

    group: int  # query heads that share a KV head
    heads: int  # of those, how many a tile takes (all, unless the group is large)
    rows: int  # M: query tokens * heads, padded
    tokens: int  # query tokens in a tile
    keys: int  # keys in a tile
    head_dim: int
    padded_dim: int
    block_size: int
    num_warps: int
    num_stages: int
    window: bool
    soft_cap: bool
    alibi: bool
    sinks: bool
    is_float32: bool

    @property
    def chunks(self) -> int:
        """Tiles that the query heads of one KV head take."""
        return -(-self.group // self.heads)

    @property
    def compiler_params(self):
        return plt.CompilerParams(num_warps=self.num_warps, num_stages=self.num_stages)


def tile_configs(
    group: int, head_dim: int, block_size: int, dtype, *, is_hopper: bool, **features: bool
) -> tuple[Config, Config]:
    """The tiles of the decode and of the ragged kernel.

    The ragged kernel's 64 rows spill registers on Ampere unless eight warps share them. Fewer keys
    where the registers are scarce: for large heads, and for float32 products, which have no tensor
    cores.
    """
    is_float32 = dtype == jnp.float32
    padded_dim = max(16, power_of_two(head_dim))
    if is_float32:
        decode_keys = ragged_keys = 32 if padded_dim <= 64 else 16
        decode_stages = 3
    else:
        decode_keys, decode_stages = _decode_loop(padded_dim, is_hopper)
        ragged_keys = 64 if padded_dim <= 128 else 32

    def config(tile: TileRows, keys: int, num_warps: int, num_stages: int) -> Config:
        return Config(
            group=group,
            heads=tile.heads,
            rows=tile.rows,
            tokens=tile.tokens,
            keys=keys,
            head_dim=head_dim,
            padded_dim=padded_dim,
            block_size=block_size,
            num_warps=num_warps,
            num_stages=num_stages,
            is_float32=is_float32,
            **features,
        )

    num_warps = 4 if is_hopper or is_float32 else 8
    return (
        config(decode_rows(group), decode_keys, num_warps=4, num_stages=decode_stages),
        config(ragged_rows(group, is_float32), ragged_keys, num_warps, num_stages=2),
    )


def _decode_loop(padded_dim: int, is_hopper: bool) -> tuple[int, int]:
    """Keys in a tile, and stages, of a decode kernel for 16-bit numbers.

    Of a loop whose loads of keys wait for loads of block ids, Triton keeps (stages - 1) // 2 tiles
    of keys and values on their way. These are the choices that have the most bytes on their way in
    all the programs that fit on a multiprocessor, and spill no registers.
    """
    if padded_dim > 128:
        return 32, 3
    if is_hopper:
        return 32, 5
    return (64, 5) if padded_dim <= 64 else (64, 3)
