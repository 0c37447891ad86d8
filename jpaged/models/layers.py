"""Building blocks that the model families share: Linear, RMSNorm, Embedding, loops over rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int, Shaped

from pallas_kernels.products import Arranged, Table, head_product, stacked_product
from pallas_kernels.quantised import Quantised

_INIT = jax.nn.initializers.normal(0.02)


def precision(dtype: DTypeLike) -> lax.Precision | None:
    """Return the precision of a product: float32 operands mean IEEE float32, never TF32."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


class Linear(nnx.Module):
    """y = x @ kernel + bias; kernel [in, *out], products accumulated in float32.

    `axes` are the mesh axes of (in, *out): (None, "tp") splits the outputs over the devices, ("tp",
    None) the inputs. Projections of the same input are one product with several axes of outputs, of
    which the one that is split is a whole unit of each (a KV head with its query heads, say).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        *,
        bias: bool,
        axes: tuple[str | None, ...],
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        out = (out_features,) if isinstance(out_features, int) else out_features
        kernel = _INIT(rngs.params(), (in_features, *out), dtype)
        self.kernel = nnx.Param(kernel, out_sharding=axes)
        self.bias = (
            nnx.Param(jnp.zeros(out, dtype), out_sharding=axes[1:]) if bias else nnx.data(None)
        )

    def __call__(self, x: Float[Array, "T in"]) -> Float[Array, "T ..."]:
        """Return [T, *out] in float32; the caller rounds to the model's dtype where it wants to."""
        kernel = self.kernel.get_value()
        y = stacked_product(x, *kernel) if isinstance(kernel, LayerOf) else _product(x, kernel)
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)


def is_kernel(path: tuple) -> bool:
    """Whether a parameter at this path of a model's layers is the kernel of a Linear."""
    return jax.tree_util.DictKey("kernel") in path


def is_table(path: tuple) -> bool:
    """Whether it is the table of an Embedding."""
    return jax.tree_util.DictKey("table") in path


class LayerOf(NamedTuple):
    """The kernel of one of several layers, as the value of a Linear's parameter: to be read in the
    stack of all (`pallas_kernels.products`)."""

    stack: Float[Array, "L E ..."] | Arranged | Quantised
    layer: Int[Array, ""]
    num_live: Int[Array, ""]  # rows that count, the first ones


def _product(x: Float[Array, "T in"], kernel: Float[Array, "in ..."]) -> Float[Array, "T ..."]:
    return lax.dot_general(
        x,
        kernel,
        (((1,), (0,)), ((), ())),
        precision=precision(kernel.dtype),
        preferred_element_type=jnp.float32,
    )


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467) in float32."""

    def __init__(self, features: int, *, epsilon: float, dtype: DTypeLike) -> None:
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((features,), dtype), out_sharding=(None,))

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """Return the normalised rows, rounded to x's dtype before they are scaled."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * lax.rsqrt(mean_square + self.epsilon)).astype(x.dtype) * self.scale[...]


class Embedding(nnx.Module):
    """A table [V, E]: token ids to rows, and (as a head) rows to logits over the vocabulary."""

    def __init__(self, vocab_size: int, features: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        table = _INIT(rngs.params(), (vocab_size, features), dtype)
        self.table = nnx.Param(table, out_sharding=("tp", None))

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T E"]:
        """Return the rows of the table."""
        return jnp.take(self._rows(), token_ids, axis=0, mode="clip")

    def _rows(self) -> Float[Array, "V E"]:
        table = self.table.get_value()
        if not isinstance(table, Table):
            return table
        assert table.rows is not None, "a table without rows is a head's"
        return table.rows

    def logits(self, x: Float[Array, "R E"]) -> Float[Array, "R V"]:
        """Return float32 x @ table.T, without a transpose (9x faster in bfloat16 on a CPU)."""
        table = self.table.get_value()
        if isinstance(table, Table):
            return head_product(x, table)
        return lax.dot_general(
            x,
            table,
            (((1,), (1,)), ((), ())),
            precision=precision(table.dtype),
            preferred_element_type=jnp.float32,
        )


def over_row_tiles(
    function: Callable[..., Any],
    size: int,
    num_tiles: Int[Array, ""],
    *rows: Shaped[Array, "T ..."],
) -> Any:
    """`function` of `size` rows of each array at a time, its results joined; T % size == 0.

    Only the first num_tiles tiles are computed, the other rows of the results are zero. The trip
    count is traced, so that XLA compiles the same loop body for every T: its products round
    alike.
    """
    first = [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in rows]
    shapes = jax.eval_shape(function, *first)
    empty = jax.tree.map(lambda x: jnp.zeros((rows[0].shape[0], *x.shape[1:]), x.dtype), shapes)

    def trip(i, results):
        tiles = [lax.dynamic_slice_in_dim(x, i * size, size) for x in rows]
        return jax.tree.map(
            lambda all_rows, tile: lax.dynamic_update_slice_in_dim(all_rows, tile, i * size, 0),
            results,
            function(*tiles),
        )

    return lax.fori_loop(0, num_tiles, trip, empty)
