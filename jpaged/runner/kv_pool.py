"""The KV pool: how many blocks it has, and its arrays on the device."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import psutil
from jaxtyping import Array, Float, Int

from pallas_kernels.memory import unwritten

logger = logging.getLogger(__name__)

_GIB = 2**30
_MAX_CPU_POOL_BYTES = 4 * _GIB
_MAX_CPU_SHARE = 0.25
_CGROUP = Path("/sys/fs/cgroup")


def storage_dtype(dtype, platform: str) -> jnp.dtype:
    """The dtype that the pool is stored in for keys and values of `dtype`.

    jax 0.10's CPU backend copies a whole bfloat16 array at every scattered write (seconds a step
    for a pool of a gigabyte), so there bfloat16 is stored by its bits, as uint16.
    """
    old_jax = tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 11)
    if jnp.dtype(dtype) == jnp.bfloat16 and platform == "cpu" and old_jax:
        return jnp.dtype(jnp.uint16)
    return jnp.dtype(dtype)


def block_bytes(num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype) -> int:
    """Bytes of one block: keys and values of `block_size` tokens in all layers."""
    return num_layers * 2 * num_kv_heads * block_size * head_dim * jnp.dtype(dtype).itemsize


def leading_bits(value: int, count: int) -> int:
    """`value` rounded down to its `count` leading bits.

    Programs are compiled for the pool's shape, and what memory is free differs a little at each
    start: a size in steps lets the next start find them in the compilation cache.
    """
    dropped = max(value.bit_length() - count, 0)
    return value >> dropped << dropped


def cpu_pool_bytes(available_bytes: float) -> int:
    """Bytes for the pool on a CPU: 4 GiB or a quarter of the available memory, if that is less;
    one of few sizes, 4, 3, 2, 1.5 GiB and so on, since other programs come and go by gigabytes."""
    return leading_bits(min(_MAX_CPU_POOL_BYTES, int(available_bytes * _MAX_CPU_SHARE)), 2)


def container_bytes_left(cgroup: Path) -> int | float:
    """Bytes that a container's limit leaves (cgroup v2), infinite without one. Files that the
    system keeps in memory and nobody has read lately count as free, as psutil counts them."""
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max" if there is none
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return math.inf
    return max(0, limit - used + _inactive_file_bytes(cgroup))


def _inactive_file_bytes(cgroup: Path) -> int:
    try:
        found = re.search(r"^inactive_file (\d+)$", (cgroup / "memory.stat").read_text(), re.M)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def host_bytes_left() -> int | float:
    """Bytes of the host's memory that this process may still take, as the system sees it: what
    pools hold that nobody has written yet is not known to it."""
    return min(psutil.virtual_memory().available, container_bytes_left(_CGROUP))


def gpu_pool_bytes(
    total_bytes: int, used_bytes: int, temporary_bytes: int, utilization: float
) -> int:
    """Bytes for the pool on a GPU: what `utilization` of the memory leaves after the rest, but for
    up to 1/64 of it (see `leading_bits`).

    used_bytes       what is allocated now (weights, bias table, hidden states)
    temporary_bytes  temporary memory of the largest bucket's compiled program
    """
    return leading_bits(int(total_bytes * utilization) - used_bytes - temporary_bytes, 7)


def available_pool_bytes(
    device: jax.Device, temporary_bytes: int, gpu_memory_utilization: float
) -> int:
    """Bytes that the pool may take on `device` now."""
    if device.platform == "cpu":
        return cpu_pool_bytes(host_bytes_left())
    stats = device.memory_stats()
    return gpu_pool_bytes(
        stats["bytes_limit"], stats["bytes_in_use"], temporary_bytes, gpu_memory_utilization
    )


def blocks_in(pool_bytes: int, bytes_per_block: int, block_size: int) -> int:
    """Blocks that fit in `pool_bytes`, at most as many as a 32-bit slot number can name.

    Raises ValueError if not even one fits.
    """
    blocks = min(pool_bytes // bytes_per_block, (2**31 - 1) // block_size - 1)
    if blocks < 1:
        raise ValueError(
            f"num_blocks cannot be chosen: {pool_bytes} bytes are left for the KV pool and one "
            f"block takes {bytes_per_block}; raise gpu_memory_utilization or give num_blocks"
        )
    return blocks


def allocate_pool(
    num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype
) -> tuple[Float[Array, "L N 2 K B D"], Int[Array, "N B"]]:
    """The KV pool and the token pool, both empty.

    On a CPU the KV pool's memory is not zero but unwritten: to write 4 GiB takes over a second of a
    start, and what nobody uses stays free. No result depends on a slot before it is written.

    The token pool holds, at the slot of each cached token, that token's id. It is addressed by the
    same block tables, so what shares, moves or frees a block does so for both, and the penalties
    can count a sequence's tokens on the device without the host sending its history at each step.
    """
    shape = num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim
    return unwritten(shape, dtype), jnp.zeros((num_blocks, block_size), jnp.int32)


def set_tokens(
    token_pool: Int[Array, "N B"], index: tuple[Int[Array, " n"], ...], tokens: Int[Array, "n ..."]
) -> Int[Array, "N B"]:
    """token_pool.at[index].set(tokens), dropping what lies outside, and in place for n == 1 too:
    XLA makes of a scatter with one index a select between two whole pools."""
    if tokens.shape[0] == 1:
        index = tuple(jnp.repeat(i, 2) for i in index)
        tokens = jnp.repeat(tokens, 2, axis=0)
    return token_pool.at[index].set(tokens, mode="drop", wrap_negative_indices=False)


def log_pool(num_blocks: int, block_size: int, max_model_len: int, bytes_per_block: int) -> None:
    """State the pool's size in the terms that a user plans with."""
    tokens = num_blocks * block_size
    logger.info(
        "KV pool: %d blocks = %d tokens = %.1f requests of max_model_len %d at once (%.2f GiB)",
        num_blocks, tokens, tokens / max_model_len, max_model_len,
        num_blocks * bytes_per_block / _GIB,
    )  # fmt: skip
