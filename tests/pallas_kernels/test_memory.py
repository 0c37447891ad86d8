import sys

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from pallas_kernels import memory
from pallas_kernels.memory import in_large_pages, unwritten


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.uint16])
def test_it_is_an_array_like_others(dtype):
    array = unwritten((2, 3, 5), dtype)
    assert array.shape == (2, 3, 5) and array.dtype == dtype
    filled = jax.jit(lambda x: x.at[...].set(7), donate_argnums=0)(array)
    assert array.is_deleted()
    np.testing.assert_array_equal(np.asarray(filled, np.float32), 7)


def test_it_takes_memory_where_it_is_written():
    size = 2**30
    unwritten((1,), jnp.float32).block_until_ready()  # what the first one makes stays
    fill = jax.jit(lambda x: x.at[: size // 16].set(1), donate_argnums=0)
    fill(jnp.zeros(size // 16)).block_until_ready()

    def grown() -> int:
        return psutil.Process().memory_info().rss - before

    before = psutil.Process().memory_info().rss
    array = unwritten((size // 4,), jnp.float32).block_until_ready()
    assert grown() < size // 8
    array = fill(array).block_until_ready()
    assert size // 8 < grown() < size // 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_made_in_large_pages_lies_where_they_were_asked_for(dtype, monkeypatch):
    asked = []
    ask = memory._ask_for_large_pages
    monkeypatch.setattr(
        memory, "_ask_for_large_pages", lambda *place: asked.append(place) or ask(*place)
    )
    x = jnp.arange(3 * 2**20, dtype=jnp.int32).astype(dtype).reshape(3, -1)
    got = in_large_pages(lambda x: x.T + 1, x).block_until_ready()
    np.testing.assert_array_equal(got, x.T + 1)
    if memory._has_kernel() and sys.platform == "linux":
        assert asked == [(got.unsafe_buffer_pointer(), got.nbytes)]
