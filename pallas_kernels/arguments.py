"""Checks of the operators' arguments: shapes and dtypes alone, so that they also hold under jit.

Values (a block id, a context length) live on the device and are never looked at here.
"""

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.plan import (
    Plan,
    decode_rows,
    make_plan,
    num_merged,
    num_tiles,
    ragged_rows,
)
from pallas_kernels.support import Case

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def check_array(name: str, value, shape: str, dtypes: tuple, sizes: dict[str, int]) -> None:
    """Refuses a value that is no array, or whose rank, axis sizes or dtype differ.

    Args:
        name: The argument's name, for the message.
        value: The argument.
        shape: Axis letters or numbers, such as "T H D" or "S+1".
        dtypes: The allowed dtypes.
        sizes: The axis sizes known so far; axes met for the first time are added.

    Raises:
        TypeError: value is no array, or its dtype is not allowed.
        ValueError: value's rank or an axis differs.
    """
    if not isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"{name} must be an array, got {type(value).__name__}")
    axes = shape.split()
    if value.ndim != len(axes):
        raise ValueError(f"{name} must have shape [{', '.join(axes)}], got {value.shape}")
    for axis, size in zip(axes, value.shape, strict=True):
        if axis.isdigit():
            expected = int(axis)
        elif axis.endswith("+1"):
            expected = sizes[axis[:-2]] + 1
        else:
            expected = sizes.setdefault(axis, size)
        if size != expected:
            raise ValueError(
                f"{name} must have shape [{', '.join(axes)}] with {axis} = {expected}, "
                f"got {value.shape}"
            )
    if value.dtype not in dtypes:
        allowed = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
        raise TypeError(f"{name} must be {allowed}, got {value.dtype}")


def check_pool(kv_pool, sizes: dict[str, int]) -> None:
    """Refuses a value that is no KV pool; records its axis sizes."""
    check_array("kv_pool", kv_pool, "L N 2 K B D", (*_FLOATS, jnp.uint16), sizes)


def check_like_pool(name: str, value, shape: str, kv_pool, sizes: dict[str, int]) -> None:
    """Refuses an array whose dtype is not the one that the pool holds (bfloat16 for uint16)."""
    check_array(name, value, shape, (*_FLOATS, jnp.uint16), sizes)
    if value.dtype != value_dtype(kv_pool):
        raise TypeError(
            f"{name} must be {value_dtype(kv_pool).name} to go with a kv_pool of {kv_pool.dtype}, "
            f"got {value.dtype}"
        )


def check_scalar(name: str, value, *, integer: bool) -> None:
    """Refuses what is neither a Python number nor a scalar array (a bool is no number)."""
    kind = "an int" if integer else "a number"
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        wanted = jnp.integer if integer else jnp.number
        if value.ndim != 0:
            raise ValueError(f"{name} must be a scalar, got shape {value.shape}")
        if not jnp.issubdtype(value.dtype, wanted):
            raise TypeError(f"{name} must be {kind}, got {value.dtype}")
    elif isinstance(value, bool) or not isinstance(
        value, numbers.Integral if integer else numbers.Real
    ):
        raise TypeError(f"{name} must be {kind}, got {value!r}")


def check_layer(layer, sizes: dict[str, int]) -> None:
    """Refuses a layer that is no integer scalar or, where its value is known, lies outside."""
    check_scalar("layer", layer, integer=True)
    if isinstance(layer, int) and not 0 <= layer < sizes["L"]:
        raise ValueError(f"layer must be in [0, {sizes['L']}), got {layer}")


class Attention(NamedTuple):
    """The arguments of paged_attention, which says what they are: arrays, or scalars where it
    allows them."""

    q: Any
    kv_pool: Any
    layer: Any
    block_tables: Any
    query_starts: Any
    context_lens: Any
    scale: Any
    window: Any = None
    soft_cap: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    return_lse: bool = False
    batch_invariant: bool = False
    plan: Plan | None = None

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.q.shape[1] // self.kv_pool.shape[3]

    @property
    def case(self) -> Case:
        """What decides which backends support the call."""
        optional = ("window", "soft_cap", "alibi_slopes", "sinks")
        features = {name for name in optional if getattr(self, name) is not None}
        features |= {name for name in ("return_lse", "batch_invariant") if getattr(self, name)}
        return pool_case("paged_attention", self.kv_pool)._replace(
            group=self.group, features=frozenset(features) | pool_features(self.kv_pool)
        )


def pool_features(kv_pool) -> frozenset[str]:
    """Features of support.FEATURES that lie in the pool."""
    return frozenset({"uint16 pool"} if kv_pool.dtype == jnp.uint16 else ())


def pool_case(operator: str, kv_pool) -> Case:
    """The case of an operator on a pool."""
    return Case(
        operator,
        value_dtype(kv_pool),
        head_dim=kv_pool.shape[5],
        block_size=kv_pool.shape[4],
        features=pool_features(kv_pool),
    )


def check_attention(call: Attention) -> None:
    """Refuses a call of paged_attention whose arguments do not fit together."""
    sizes: dict[str, int] = {}
    check_pool(call.kv_pool, sizes)
    check_like_pool("q", call.q, "T H D", call.kv_pool, sizes)
    if sizes["H"] % sizes["K"]:
        raise ValueError(
            f"q must have a multiple of kv_pool's {sizes['K']} heads, got {sizes['H']} heads"
        )
    check_layer(call.layer, sizes)
    check_array("context_lens", call.context_lens, "S", (jnp.int32,), sizes)
    check_array("query_starts", call.query_starts, "S+1", (jnp.int32,), sizes)
    check_array("block_tables", call.block_tables, "S M", (jnp.int32,), sizes)
    check_scalar("scale", call.scale, integer=False)
    if call.window is not None:
        check_scalar("window", call.window, integer=True)
    if call.soft_cap is not None:
        check_scalar("soft_cap", call.soft_cap, integer=False)
        if isinstance(call.soft_cap, int | float) and not call.soft_cap > 0:
            raise ValueError(f"soft_cap must be None or > 0, got {call.soft_cap!r}")
    for name in ("alibi_slopes", "sinks"):
        if getattr(call, name) is not None:
            check_array(name, getattr(call, name), "H", (jnp.float32,), sizes)
    if call.plan is not None:
        check_plan(call.plan)


def check_plan(plan) -> None:
    """Refuses what is no work list; whether it is one for this batch, the backend sees."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan of pallas_kernels.plan, got {type(plan).__name__}")
    for field, rows in (("tiles", 4), ("items", 6), ("merged", 4)):
        check_array(f"plan.{field}", getattr(plan, field), f"{rows} W", (jnp.int32,), {})


def value_dtype(kv_pool) -> np.dtype:
    """The dtype of the numbers in a pool: a pool of uint16 holds bfloat16 bit patterns."""
    return jnp.dtype(jnp.bfloat16 if kv_pool.dtype == jnp.uint16 else kv_pool.dtype)


def plan_of_call(call: Attention, num_cores: int | None) -> Plan:
    """The plan that a call brings, which has to fit it (ValueError), or one made here."""
    num_tokens, num_heads, _ = call.q.shape
    num_sequences, max_blocks = call.block_tables.shape
    num_kv_heads, block_size = call.kv_pool.shape[3:5]
    if call.plan is None:
        return make_plan(
            call.query_starts,
            jnp.minimum(call.context_lens, max_blocks * block_size),
            num_tokens=num_tokens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            dtype=call.q.dtype,
            num_cores=num_cores,
            window=call.window,
            xp=jnp,
        )
    decode_tokens = decode_rows(call.group).tokens
    ragged_tokens = ragged_rows(call.group, call.q.dtype == jnp.float32).tokens
    shapes = (call.plan.tiles.shape, call.plan.merged.shape)
    expected = (
        (4, num_tiles(num_tokens, num_sequences, ragged_tokens)),
        (4, num_merged(num_tokens, num_sequences, decode_tokens)),
    )
    if shapes != expected:
        raise ValueError(
            f"plan must be made for {num_tokens} tokens of {num_sequences} sequences, {num_heads} "
            f"query heads, {num_kv_heads} KV heads and {call.q.dtype}: tiles and merged must have "
            f"shapes {expected}, got {shapes}"
        )
    return call.plan
