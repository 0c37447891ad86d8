import jax
import jax.numpy as jnp
import pytest

from jpaged.runner.kv_pool import (
    allocate_pool,
    block_bytes,
    blocks_in,
    container_bytes_left,
    cpu_pool_bytes,
    gpu_pool_bytes,
    storage_dtype,
)

GIB = 2**30


def test_a_cpu_pool_is_4_gib_or_a_quarter_of_what_is_available():
    assert cpu_pool_bytes(64 * GIB) == 4 * GIB
    assert cpu_pool_bytes(16 * GIB) == 4 * GIB
    assert cpu_pool_bytes(8 * GIB) == 2 * GIB
    assert cpu_pool_bytes(14 * GIB) == 3 * GIB
    assert cpu_pool_bytes(10**4) == 2048


def test_a_pool_is_as_large_at_the_next_start_if_about_as_much_memory_is_free():
    assert cpu_pool_bytes(15.9 * GIB) == cpu_pool_bytes(12.1 * GIB) == 3 * GIB
    pools = {
        gpu_pool_bytes(141 * GIB, used, 300 * 2**20, 0.9) for used in (16 * GIB, 17_180_000_000)
    }
    assert pools == {110 * GIB}


def test_a_container_has_what_its_limit_leaves(tmp_path):
    assert container_bytes_left(tmp_path) == float("inf")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert container_bytes_left(tmp_path) == float("inf")
    (tmp_path / "memory.max").write_text("1000\n")
    assert container_bytes_left(tmp_path) == 900
    # A checkpoint that was read stays in memory until something else needs the room.
    (tmp_path / "memory.stat").write_text("anon 30\ninactive_file 60\nslab 5\n")
    assert container_bytes_left(tmp_path) == 960


def test_a_gpu_pool_is_what_weights_and_temporaries_leave():
    assert gpu_pool_bytes(80 * GIB, 16 * GIB, 2 * GIB, 0.9) == 54 * GIB
    assert 0.984 < gpu_pool_bytes(79_999, 0, 0, 0.9) / (79_999 * 0.9) < 1
    assert gpu_pool_bytes(10 * GIB, 16 * GIB, 2 * GIB, 0.9) < 0


def test_block_bytes_of_opt_13b_are_the_papers():
    # 800 KiB a token (section 3 of the paper): OPT-13B has 40 layers, 40 heads of 128.
    assert block_bytes(40, 40, 1, 128, jnp.bfloat16) == 800 * 1024
    # 12 GiB hold 15.7K token slots (table 1).
    assert blocks_in(12 * GIB, block_bytes(40, 40, 16, 128, jnp.bfloat16), 16) * 16 == 15_728


def test_a_pool_without_room_for_a_block_is_refused():
    with pytest.raises(ValueError, match="num_blocks"):
        blocks_in(-5, 1024, 16)


def test_slot_numbers_fit_in_32_bits():
    blocks = blocks_in(2**60, 8, 16)
    assert blocks * 16 <= 2**31 - 1  # the padding slot, one past the last, included


def test_pool_shapes():
    kv_pool, token_pool = allocate_pool(2, 5, 3, 8, 16, jnp.bfloat16)
    assert kv_pool.shape == (2, 5, 2, 3, 8, 16) and kv_pool.dtype == jnp.bfloat16
    assert token_pool.shape == (5, 8) and token_pool.dtype == jnp.int32


def test_bfloat16_is_stored_by_its_bits_where_the_cpu_backend_would_copy_the_pool():
    old = tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 11)
    assert storage_dtype(jnp.bfloat16, "cpu") == (jnp.uint16 if old else jnp.bfloat16)
    assert storage_dtype(jnp.bfloat16, "gpu") == jnp.bfloat16
    assert storage_dtype(jnp.float32, "cpu") == jnp.float32
