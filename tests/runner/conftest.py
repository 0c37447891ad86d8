"""Pools of random blocks and the programs that move them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.runner.block_moves import BlockMoves
from jpaged.runner.kv_pool import storage_dtype


class MovesCase:
    """Compiled moves of small pools; lists are padded to 2 or 5, so that most take several calls.

    shape  L N 2 K B D
    """

    def __init__(self, dtype, *, shape=(2, 24, 2, 2, 4, 8), swapping=True, lengths=(2, 5)) -> None:
        device = jax.devices()[0]
        stored = storage_dtype(dtype, device.platform)
        self.moves = BlockMoves(
            shape, stored, device=device, backend="xla", swapping=swapping, lengths=lengths
        )
        self.moves.compile()
        self.shape = shape

    def random_pools(self, *, poisoned=()) -> tuple[np.ndarray, np.ndarray]:
        """Pools of random numbers, as NumPy arrays, with NaN in the poisoned blocks."""
        rng = np.random.default_rng(0)
        values = rng.standard_normal(self.shape, np.float32)
        values[:, list(poisoned)] = np.nan
        if self.moves.dtype == jnp.uint16:
            kv_pool = values.astype(jnp.bfloat16).view(np.uint16)
        else:
            kv_pool = values.astype(self.moves.dtype)
        num_blocks, block_size = self.shape[1], self.shape[4]
        return kv_pool, rng.integers(0, 2**31, (num_blocks, block_size), np.int32)

    def on_device(self, pools):
        """Copies: the programs take their arguments' memory."""
        return tuple(jnp.array(array) for array in pools)

    def assert_same_bits(self, pools, expected) -> None:
        for got, wanted in zip(pools, expected, strict=True):
            got = np.asarray(got)
            assert got.dtype == wanted.dtype
            np.testing.assert_array_equal(got.view(np.uint8), wanted.view(np.uint8))


@pytest.fixture(scope="session")
def make_moves_case(compilation_cache):
    """Makes a MovesCase of a dtype; one of equal arguments is made once a session."""
    made: dict = {}

    def make(dtype: str = "float32", **arguments) -> MovesCase:
        key = (dtype, *sorted(arguments.items()))
        if key not in made:
            made[key] = MovesCase(dtype, **arguments)
        return made[key]

    return make
