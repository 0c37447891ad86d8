"""Operators on a paged KV cache.

The KV pool is one array `[L, N, 2, K, B, D]`: layers, blocks, key or value, KV heads, block size,
head dim. A token slot is a place for one token's key and value in every layer; its number is
`block * block_size + offset`. A sequence's block table lists its blocks in the order of its tokens.
Memory of the pool that was never written may hold anything, NaN included: nothing of it reaches a
result. A pool of dtype uint16 holds bfloat16 bit patterns (XLA copies a bfloat16 pool at every
write on a CPU in some versions); its keys, values and queries are bfloat16.

Axis letters: T tokens in the step, S sequences, M blocks a sequence, N blocks in the pool, B block
size, L layers, H query heads, K KV heads, D head dim, C blocks in a list, n parts to merge.

Every operator is a pure function that may be called under `jax.jit`. `backend` is one of `mosaic`
(Pallas/Mosaic kernels for Hopper GPUs), `triton` (Pallas/Triton kernels for NVIDIA GPUs from Ampere
on), `llvm` (decode rows by a kernel that LLVM compiles for the CPU at hand, all else as xla), `xla`
(any platform, all features), `reference` (slow, the definition of the semantics) and `auto`: mosaic
on Hopper, triton on other NVIDIA GPUs, llvm on CPUs, xla elsewhere, and the next of them where one
does not support a call, which is said once in the log. A backend asked for by name that does not
support a call raises NotImplementedError. On a CPU the Pallas backends run interpreted.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int32, Shaped

from pallas_kernels.arguments import (
    Attention,
    check_array,
    check_attention,
    check_layer,
    check_like_pool,
    check_pool,
    pool_case,
)
from pallas_kernels.plan import Plan
from pallas_kernels.support import Case, choose

__all__ = [
    "copy_blocks",
    "gather_blocks",
    "merge_states",
    "paged_attention",
    "plan_attention",
    "scatter_blocks",
    "write_kv",
]


def paged_attention(
    q: Float[Array, "T H D"],
    kv_pool: Shaped[Array, "L N 2 K B D"],
    layer: int | Int32[Array, ""],
    block_tables: Int32[Array, "S M"],
    query_starts: Int32[Array, " S+1"],
    context_lens: Int32[Array, " S"],
    *,
    scale: float | Float[Array, ""],
    window: int | Int32[Array, ""] | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Float32[Array, " H"] | None = None,
    sinks: Float32[Array, " H"] | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    plan: Plan | None = None,
    backend: str = "auto",
) -> Float[Array, "T H D"] | tuple[Float[Array, "T H D"], Float32[Array, "T H"]]:
    """Causal attention of the step's query tokens over their sequences' keys and values.

    Query i of sequence s stands at position `p = context_lens[s] - query_len[s] + i`, where
    `query_len[s] = query_starts[s + 1] - query_starts[s]`, and sees the keys at positions 0 .. p,
    which the pool already holds. So decode rows have query_len 1, a chunk of a prompt has more, and
    one call takes both. The softmax is in float32; float32 inputs mean float32 products (no TF32).

    Args:
        q: The queries of all sequences, packed; float32, bfloat16 or float16 like the pool. Rows
            past `query_starts[S]` are padding.
        kv_pool: The pool.
        layer: The pool's layer to read, 0 .. L - 1; may be traced.
        block_tables: The sequences' blocks. Entries past a sequence's last block may be any
            integer.
        query_starts: Row of each sequence's first query; ascending from 0.
        context_lens: Tokens of each sequence in the pool, those of this step included; at most
            M * B; 0 for an empty row.
        scale: Factor on the products of query and key.
        window: A query sees the keys at p - window + 1 .. p alone. None, or <= 0, means no window.
        soft_cap: Scaled scores x become `soft_cap * tanh(x / soft_cap)`.
        alibi_slopes: Adds `slope * (key position - p)` to the scores (ALiBi, Press et al. 2022).
        sinks: One more logit a head in the softmax's denominator (and in lse), without a value.
        return_lse: Also return the natural logarithm of the softmax's denominator.
        batch_invariant: A query's result is bitwise the same whatever else is in the batch and
            however its sequence was cut into calls (for one block size). Slower, and by the xla
            backend alone.
        plan: Work lists for these query_starts and context_lens, of `plan_attention` or of
            `pallas_kernels.plan.make_plan`, for a backend that uses them (mosaic and triton, which
            share them). Made in the call if None, which costs some ten small launches: make it once
            for all layers.
        backend: See the module.

    Returns:
        The outputs in q's dtype, and lse if asked for. Rows that see no key (padding) are 0, with
        lse -inf.

    Raises:
        TypeError: An argument is no array, or of a wrong dtype or type.
        ValueError: Shapes that do not go together, H % K != 0, layer outside the pool,
            soft_cap <= 0, unknown backend.
        NotImplementedError: The backend does not support the call.
    """
    call = Attention(
        q,
        kv_pool,
        layer,
        block_tables,
        query_starts,
        context_lens,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        return_lse=return_lse,
        batch_invariant=batch_invariant,
        plan=plan,
    )
    check_attention(call)
    arrays = (q, kv_pool, block_tables, query_starts, context_lens)
    q, kv_pool, block_tables, query_starts, context_lens = map(jnp.asarray, arrays)
    call = call._replace(
        q=q,
        kv_pool=kv_pool,
        block_tables=block_tables,
        query_starts=query_starts,
        context_lens=context_lens,
    )
    return choose(call.case, backend).paged_attention(call)


def plan_attention(
    query_starts: Int32[Array, " S+1"],
    context_lens: Int32[Array, " S"],
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    dtype: DTypeLike,
    window: int | Int32[Array, ""] | None = None,
    backend: str = "auto",
) -> Plan | None:
    """Work lists for `paged_attention`, made on the device: once a step, outside the layers' loop.

    Args:
        query_starts: As in paged_attention.
        context_lens: As in paged_attention.
        num_tokens: Rows of q, padding included.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        dtype: q's.
        window: A window that the layers share: contexts are then split by what it shows. The plan
            is right for any window all the same.
        backend: The one that paged_attention will be called with.

    Returns:
        The plan, or None if the backend needs none.

    Raises:
        TypeError: An argument is no array, or of a wrong dtype.
        ValueError: Shapes that do not go together, unknown backend.
        NotImplementedError: The backend does not support the call.
    """
    sizes: dict[str, int] = {}
    check_array("context_lens", context_lens, "S", (jnp.int32,), sizes)
    check_array("query_starts", query_starts, "S+1", (jnp.int32,), sizes)
    query_starts, context_lens = jnp.asarray(query_starts), jnp.asarray(context_lens)
    case = Case("plan_attention", jnp.dtype(dtype), group=num_heads // num_kv_heads)
    return choose(case, backend).plan_attention(
        query_starts,
        context_lens,
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        dtype=dtype,
        window=window,
    )


def write_kv(
    kv_pool: Shaped[Array, "L N 2 K B D"],
    layer: int | Int32[Array, ""],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    slot_mapping: Int32[Array, " T"],
    *,
    backend: str = "auto",
) -> Shaped[Array, "L N 2 K B D"]:
    """Writes one layer's new keys and values into their token slots.

    In place when the pool is donated, also when it is the carry of a loop over layers.

    Args:
        kv_pool: The pool.
        layer: The layer to write, 0 .. L - 1; may be traced.
        k: Keys, of the pool's dtype (bfloat16 for a pool of uint16).
        v: Values, likewise.
        slot_mapping: Slot of each token; slots outside 0 .. N * B - 1 are dropped (padding tokens
            have N * B). A slot given twice ends up with either.
        backend: See the module.

    Returns:
        The pool.

    Raises:
        TypeError: An argument is no array, or of a wrong dtype.
        ValueError: Shapes that do not go together, layer outside the pool, unknown backend.
        NotImplementedError: The backend does not support the call.
    """
    sizes: dict[str, int] = {}
    check_pool(kv_pool, sizes)
    check_layer(layer, sizes)
    check_like_pool("k", k, "T K D", kv_pool, sizes)
    check_like_pool("v", v, "T K D", kv_pool, sizes)
    check_array("slot_mapping", slot_mapping, "T", (jnp.int32,), sizes)
    kv_pool, k, v, slot_mapping = map(jnp.asarray, (kv_pool, k, v, slot_mapping))
    module = choose(pool_case("write_kv", kv_pool), backend)
    return module.write_kv(kv_pool, layer, k, v, slot_mapping)


def copy_blocks(
    kv_pool: Shaped[Array, "L N 2 K B D"],
    sources: Int32[Array, " C"],
    destinations: Int32[Array, " C"],
    *,
    backend: str = "auto",
) -> Shaped[Array, "L N 2 K B D"]:
    """Copies blocks, in all layers; in place when the pool is donated.

    The copies are simultaneous: a source is read as it was before the call.

    Args:
        kv_pool: The pool.
        sources: Block ids to read.
        destinations: Block ids to write, each at most once; a pair whose destination lies outside
            0 .. N - 1 is dropped, whatever its source.
        backend: See the module.

    Returns:
        The pool.

    Raises:
        TypeError: An argument is no array, or of a wrong dtype.
        ValueError: Shapes that do not go together, unknown backend.
        NotImplementedError: The backend does not support the call.
    """
    sizes: dict[str, int] = {}
    check_pool(kv_pool, sizes)
    check_array("sources", sources, "C", (jnp.int32,), sizes)
    check_array("destinations", destinations, "C", (jnp.int32,), sizes)
    kv_pool, sources, destinations = map(jnp.asarray, (kv_pool, sources, destinations))
    module = choose(pool_case("copy_blocks", kv_pool), backend)
    return module.copy_blocks(kv_pool, sources, destinations)


def gather_blocks(
    kv_pool: Shaped[Array, "L N 2 K B D"],
    blocks: Int32[Array, " C"],
    *,
    backend: str = "auto",
) -> Shaped[Array, "L C 2 K B D"]:
    """Reads blocks of all layers, as they are swapped out.

    Args:
        kv_pool: The pool.
        blocks: Block ids; one outside 0 .. N - 1 reads some block or other.
        backend: See the module.

    Returns:
        The blocks, in the pool's dtype.

    Raises:
        TypeError: An argument is no array, or of a wrong dtype.
        ValueError: Shapes that do not go together, unknown backend.
        NotImplementedError: The backend does not support the call.
    """
    sizes: dict[str, int] = {}
    check_pool(kv_pool, sizes)
    check_array("blocks", blocks, "C", (jnp.int32,), sizes)
    kv_pool, blocks = jnp.asarray(kv_pool), jnp.asarray(blocks)
    module = choose(pool_case("gather_blocks", kv_pool), backend)
    return module.gather_blocks(kv_pool, blocks)


def scatter_blocks(
    kv_pool: Shaped[Array, "L N 2 K B D"],
    blocks: Int32[Array, " C"],
    data: Shaped[Array, "L C 2 K B D"],
    *,
    backend: str = "auto",
) -> Shaped[Array, "L N 2 K B D"]:
    """Writes blocks of all layers, as they are swapped in; in place when the pool is donated.

    Args:
        kv_pool: The pool.
        blocks: Block ids, each at most once; those outside 0 .. N - 1 are dropped.
        data: What `gather_blocks` returned, in the pool's dtype.
        backend: See the module.

    Returns:
        The pool.

    Raises:
        TypeError: An argument is no array, or of a wrong dtype.
        ValueError: Shapes that do not go together, unknown backend.
        NotImplementedError: The backend does not support the call.
    """
    sizes: dict[str, int] = {}
    check_pool(kv_pool, sizes)
    check_array("blocks", blocks, "C", (jnp.int32,), sizes)
    check_array("data", data, "L C 2 K B D", (kv_pool.dtype,), sizes)
    kv_pool, blocks, data = map(jnp.asarray, (kv_pool, blocks, data))
    module = choose(pool_case("scatter_blocks", kv_pool), backend)
    return module.scatter_blocks(kv_pool, blocks, data)


def merge_states(
    outs: Float[Array, "n T H D"],
    lses: Float32[Array, "n T H"],
    *,
    backend: str = "auto",
) -> tuple[Float[Array, "T H D"], Float32[Array, "T H"]]:
    """Combines attention over disjoint ranges of keys into attention over their union.

    Args:
        outs: The parts' outputs; float32, bfloat16 or float16.
        lses: The parts' log denominators (natural logarithm); -inf for a part that saw no key,
            whose output is ignored.
        backend: See the module.

    Returns:
        The output, in outs' dtype, and its lse. A row that no part saw a key of is 0, with -inf.

    Raises:
        TypeError: An argument is no array, or of a wrong dtype.
        ValueError: Shapes that do not go together, unknown backend.
        NotImplementedError: The backend does not support the call.
    """
    sizes: dict[str, int] = {}
    check_array("outs", outs, "n T H D", (jnp.float32, jnp.bfloat16, jnp.float16), sizes)
    check_array("lses", lses, "n T H", (jnp.float32,), sizes)
    outs, lses = jnp.asarray(outs), jnp.asarray(lses)
    case = Case("merge_states", outs.dtype, head_dim=outs.shape[3])
    return choose(case, backend).merge_states(outs, lses)
