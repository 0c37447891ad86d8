"""What the benchmark times: the backends of pallas_kernels, and attention that is not ours.

A contender is a function of a point and its inputs that yields `Prepared`s (several where a rival
has settings to choose from: the fastest counts), or raises `Refusal` or NotImplementedError with
the reason why it cannot be timed. Rivals get the same keys and values in the layout they want.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import _repository  # noqa: F401 (makes the packages importable)
import jax
import jax.numpy as jnp
from _kernel_benchmark import Inputs, Point, Refusal, check_room, platform
from jax import lax

import pallas_kernels

BACKENDS = ("mosaic", "triton", "xla")
# A rival takes each of its pools as an array of its own, and a call for each in the program.
_MAX_RIVAL_POOLS = 16
_INTERPRETED = "interpreted on a CPU: a time would say nothing about a GPU"
_DECODE_ONLY = "decode only (one query token a sequence)"


class Prepared(NamedTuple):
    """A pass, ready to be jitted: `run(*arguments)` attends once in each of `num_pools` pools.

    output    takes from its results the output of the first pool
    settings  what was chosen, for the table
    plan      what a model runs once a step, before its layers, with its arguments: timed apart
    """

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    num_pools: int
    output: Callable[[Any], Any]
    settings: str = ""
    plan: tuple[Callable[..., Any], tuple[Any, ...]] | None = None


Contender = Callable[[Point, Inputs], Iterator[Prepared]]


def contenders(operators: Any = pallas_kernels) -> dict[str, Contender]:
    """All of them by name; `operators` is the module whose backends are ours."""
    ours = {name: _ours(name, operators) for name in BACKENDS}
    return ours | {
        "JAX paged_attention": jax_paged,
        "cuDNN paged": cudnn_paged,
        "contiguous cuDNN": contiguous_cudnn,
        "contiguous Pallas": contiguous_pallas,
        "contiguous XLA": contiguous_xla,
    }


def _ours(backend: str, operators: Any) -> Contender:
    def prepare(point: Point, inputs: Inputs) -> Iterator[Prepared]:
        yield _prepare_ours(point, inputs, backend, operators)

    prepare.is_ours = True  # type: ignore[attr-defined]
    return prepare


def _prepare_ours(point: Point, inputs: Inputs, backend: str, operators: Any) -> Prepared:
    if backend != "xla" and platform() == "cpu":
        raise Refusal(_INTERPRETED)
    pools = inputs.num_pools
    make_plan = jax.jit(
        functools.partial(
            operators.plan_attention,
            num_tokens=point.num_tokens,
            num_heads=point.num_heads,
            num_kv_heads=point.num_kv_heads,
            dtype=jnp.dtype(point.dtype),
            backend=backend,
        )
    )
    batch = (inputs.query_starts, inputs.context_lens)
    plan = make_plan(*batch)

    def run(plan, q, *others):
        def attend(step, _):
            kv_pool, *batch = others
            layer = pools - 1 - step  # the first pool last, whose output is looked at
            return operators.paged_attention(
                q, kv_pool, layer, *batch, scale=point.scale, plan=plan, backend=backend
            )

        return lax.fori_loop(0, pools, attend, jnp.zeros_like(q))

    once = None if plan is None else (make_plan, batch)
    return Prepared(run, (plan, *inputs), pools, lambda out: out, plan=once)


def _prepare_chain(
    attend: Callable[..., Any], q: Any, pools: list[Any], settings: str = ""
) -> Prepared:
    """A pass over pools that are arrays of their own.

    Each call's queries are the outputs of the one before it, so that no two run at once.
    """

    def run(q, pools):
        outs = []
        for pool in pools:
            q = attend(q, *pool)
            outs.append(q)
        return outs[0], outs[-1]

    return Prepared(run, (q, pools), len(pools), lambda outs: outs[0], settings)


def _rival_pools(
    point: Point, inputs: Inputs, convert: Callable, slots: int, what: str
) -> list[Any]:
    """The first pools in a rival's layout, made by `convert(pool [N, 2, K, B, D])`.

    slots  token slots in one converted pool, for the check that memory suffices
    """
    count = min(inputs.num_pools, _MAX_RIVAL_POOLS)
    itemsize = inputs.kv_pool.dtype.itemsize
    size = 2 * slots * point.num_kv_heads * point.head_dim * itemsize
    check_room((count + 1) * size, what)  # one more for what the conversion itself takes
    converted = jax.jit(lambda pool, layer: convert(pool[layer]))
    return [converted(inputs.kv_pool, layer) for layer in range(count)]


def _power_of_two_below(size: float) -> int:
    """The largest power of two that is <= size, and at least 1."""
    return 1 << max(int(size).bit_length() - 1, 0)


def _check_decode(point: Point) -> None:
    if point.chunks:
        raise Refusal(_DECODE_ONLY)


def _check_gpu(reason: str = _INTERPRETED) -> None:
    if platform() == "cpu":
        raise Refusal(reason)


def _import(module: str) -> Any:
    """A module of JAX that an installed version may lack."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module(module)
    except ImportError as error:
        raise Refusal(f"jax {jax.__version__} has no {module} ({error})") from error


def jax_paged(point: Point, inputs: Inputs) -> Iterator[Prepared]:
    """jax.experimental.pallas.ops.gpu.paged_attention, over several numbers of splits."""
    _check_decode(point)
    module = _import("jax.experimental.pallas.ops.gpu.paged_attention")
    _check_gpu()
    slots = point.num_blocks * point.block_size
    pools = _rival_pools(
        point,
        inputs,
        lambda pool: tuple(pool.transpose(1, 2, 0, 3, 4)),  # K and V as [K, N, B, D]
        slots,
        "its pool layout",
    )
    for splits in (16, 4, 1):
        # 128 keys a loop trip, as by default with blocks of 16, or what a split has; the table's
        # width has to be a multiple of the splits' pages.
        pages = max(1, min(128 // point.block_size, _power_of_two_below(point.max_blocks / splits)))
        unit = splits * pages
        width = -(-point.max_blocks // unit) * unit
        tables = jnp.pad(inputs.block_tables, ((0, 0), (0, width - point.max_blocks)))

        def attend(q, k, v, tables=tables, splits=splits, pages=pages):
            # It has no scale.
            return module.paged_attention(
                q * jnp.asarray(point.scale, q.dtype),
                k,
                v,
                tables,
                inputs.context_lens,
                k_splits=splits,
                pages_per_compute_block=pages,
            )

        yield _prepare_chain(attend, inputs.q, pools, f"k_splits={splits}")


def cudnn_paged(point: Point, inputs: Inputs) -> Iterator[Prepared]:
    """cuDNN's paged attention, as an internal module of JAX exposes it."""
    _check_decode(point)
    _check_gpu("cuDNN needs an NVIDIA GPU")
    module = _import("jax._src.cudnn.fused_attention_stablehlo")
    if not hasattr(module, "paged_attention"):
        raise Refusal(f"jax {jax.__version__} does not expose cuDNN's paged attention")
    if point.dtype == "float32":
        raise Refusal("cuDNN's attention takes bfloat16 and float16")
    # It wants as many pages as the tables have entries, so unused entries get a page too.
    entries = point.batch * point.max_blocks
    order = jax.random.permutation(jax.random.key(1), entries).astype(jnp.int32)
    tables = order.reshape(point.batch, 1, point.max_blocks, 1)
    page_of = jnp.zeros(entries, jnp.int32).at[order].set(inputs.block_tables.reshape(-1))
    pools = _rival_pools(
        point,
        inputs,
        lambda pool: (pool[page_of, 0], pool[page_of, 1]),  # [S * M, K, B, D]
        entries * point.block_size,
        "its pool layout",
    )
    ones = jnp.ones(point.batch, jnp.int32)

    def attend(q, k, v):
        return module.paged_attention(
            q,
            k,
            v,
            ones,
            inputs.context_lens,
            tables,
            tables,
            scale=point.scale,
            mask_type=module.MaskType.PADDING,
            qkv_layout="BNTH",
        )

    q = inputs.q[:, :, None]  # [S, H, 1, D]
    yield _prepare_chain(attend, q, pools)


def _contiguous(point: Point, inputs: Inputs, *, heads_first: bool, multiple: int = 1) -> list:
    """Each pool as contiguous caches of keys and values: [S, context, K, D] or [S, K, context, D],
    with the context rounded up to a multiple."""
    length = point.max_blocks * point.block_size
    padded = -(-length // multiple) * multiple

    def convert(pool):
        pages = pool[inputs.block_tables]  # [S, M, 2, K, B, D]
        caches = pages.transpose(2, 0, 3, 1, 4, 5)  # [2, S, K, M, B, D]
        caches = caches.reshape(2, point.batch, point.num_kv_heads, length, point.head_dim)
        caches = jnp.pad(caches, ((0, 0), (0, 0), (0, 0), (0, padded - length), (0, 0)))
        return tuple(caches if heads_first else caches.swapaxes(2, 3))

    return _rival_pools(point, inputs, convert, point.batch * padded, "its contiguous cache")


def _dot_product_attention(
    point: Point, inputs: Inputs, implementation: Literal["xla", "cudnn"]
) -> Prepared:
    pools = _contiguous(point, inputs, heads_first=False)
    ones = jnp.ones(point.batch, jnp.int32)

    def attend(q, k, v):
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=point.scale,
            query_seq_lengths=ones,
            key_value_seq_lengths=inputs.context_lens,
            implementation=implementation,
        )

    return _prepare_chain(attend, inputs.q[:, None], pools)


def contiguous_xla(point: Point, inputs: Inputs) -> Iterator[Prepared]:
    """jax.nn.dot_product_attention over a cache [S, context, K, D], by XLA."""
    _check_decode(point)
    yield _dot_product_attention(point, inputs, "xla")


def contiguous_cudnn(point: Point, inputs: Inputs) -> Iterator[Prepared]:
    """jax.nn.dot_product_attention over a cache [S, context, K, D], by cuDNN."""
    _check_decode(point)
    _check_gpu("cuDNN needs an NVIDIA GPU")
    if point.dtype == "float32":
        raise Refusal("cuDNN's attention takes bfloat16 and float16")
    yield _dot_product_attention(point, inputs, "cudnn")


def contiguous_pallas(point: Point, inputs: Inputs) -> Iterator[Prepared]:
    """The kernel of jax.experimental.pallas.ops.gpu.decode_attention over a cache [S, K, context,
    D]: its public function would copy the cache of the other layout at every call."""
    _check_decode(point)
    module = _import("jax.experimental.pallas.ops.gpu.decode_attention")
    _check_gpu()
    if not hasattr(module, "decode_attn_unbatched"):
        raise Refusal(f"the kernel has another name in jax {jax.__version__}")
    # So that 16 splits of 64 keys or more have the same length.
    pools = _contiguous(point, inputs, heads_first=True, multiple=16 * 64)
    length = pools[0][0].shape[2]
    for splits in (16, 4, 1):
        keys = 128 if point.head_dim <= 128 and length // splits % 128 == 0 else 64
        kernel = functools.partial(
            module.decode_attn_unbatched,
            sm_scale=point.scale,
            block_h=16,
            block_k=keys,
            k_splits=splits,
            num_warps=4,
            num_stages=2,
            grid=None,
            interpret=False,
            debug=False,
            return_residuals=False,
            normalize_output=True,
        )

        def attend(q, k, v, kernel=kernel):
            heads = jax.vmap(kernel, in_axes=(0, 0, 0, None, None))
            group = (point.num_kv_heads, point.num_heads // point.num_kv_heads, point.head_dim)
            batch = jax.vmap(heads, in_axes=(0, 0, 0, None, 0))
            out = batch(q.reshape(-1, *group), k, v, None, inputs.context_lens)
            return out.reshape(q.shape)

        yield _prepare_chain(attend, inputs.q, pools, f"k_splits={splits}")
