"""The Llama family (Touvron et al. 2023, arXiv:2302.13971), with grouped-query attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int, Shaped

from jpaged.models.layers import (
    Embedding,
    LayerOf,
    Linear,
    RMSNorm,
    is_kernel,
    over_row_tiles,
)
from jpaged.models.rope import RopeConfig, rotate, rotation
from pallas_kernels import paged_attention, plan_attention, write_kv
from pallas_kernels.products import Arranged, has_kernel
from pallas_kernels.quantised import Quantised


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama model; hashable, so that it can be a static attribute of the module."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads={self.num_kv_heads}, "
                f"got {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if not self.rms_norm_eps >= 0:
            raise ValueError(f"rms_norm_eps must be at least 0, got {self.rms_norm_eps!r}")


class Attention(nnx.Module):
    """Grouped-query self-attention over the paged KV pool."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.config = config
        size, heads = config.hidden_size, config.num_heads
        group = heads // config.num_kv_heads
        make = partial(Linear, bias=config.attention_bias, dtype=dtype, rngs=rngs)
        # For each KV head its query heads, its keys and its values: one product for all three.
        out = (config.num_kv_heads, group + 2, config.head_dim)
        self.qkv_proj = make(size, out, axes=(None, "tp", None, None))
        self.o_proj = make(heads * config.head_dim, size, axes=("tp", None))

    def project(
        self,
        x: Float[Array, "T E"],
        cos: Float[Array, "T half"],
        sin: Float[Array, "T half"],
    ) -> tuple[Float[Array, "T H D"], Float[Array, "T K D"], Float[Array, "T K D"]]:
        """Queries and keys, rotated, and values."""
        qkv = self.qkv_proj(x)  # [T, K, G + 2, D]
        q = qkv[:, :, :-2].reshape(x.shape[0], self.config.num_heads, self.config.head_dim)
        q, k = (rotate(x, cos, sin) for x in (q, qkv[:, :, -2]))
        q, k, v = (y.astype(x.dtype) for y in (q, k, qkv[:, :, -1]))
        return q, k, v

    def output(self, attended: Float[Array, "T H D"]) -> Float[Array, "T E"]:
        """Return float32 [T, E]."""
        return self.o_proj(attended.reshape(attended.shape[0], -1))


class FeedForward(nnx.Module):
    """The gated feed-forward network: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        make = partial(Linear, bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.gate_up_proj = make(size, (2, inner), axes=(None, None, "tp"))
        self.down_proj = make(inner, size, axes=("tp", None))

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """Return float32 [T, E]."""
        gate_up = self.gate_up_proj(x)  # [T, 2, F]
        gated = jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]
        return self.down_proj(gated.astype(x.dtype))


class DecoderLayer(nnx.Module):
    """Pre-normalised attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(size, epsilon=epsilon, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.feed_forward_norm = RMSNorm(size, epsilon=epsilon, dtype=dtype)
        self.feed_forward = FeedForward(config, dtype=dtype, rngs=rngs)

    def before(
        self, x: Float[Array, "T E"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
    ) -> tuple[Float[Array, "T H D"], Float[Array, "T K D"], Float[Array, "T K D"]]:
        """What comes before attention, row by row: queries, keys and values."""
        return self.attention.project(self.attention_norm(x), cos, sin)

    def after(self, x: Float[Array, "T E"], attended: Float[Array, "T H D"]) -> Float[Array, "T E"]:
        """What comes after it, row by row: the layer's result."""
        x = x + self.attention.output(attended).astype(x.dtype)
        return x + self.feed_forward(self.feed_forward_norm(x)).astype(x.dtype)


class Llama(nnx.Module):
    """A Llama decoder over packed tokens and a paged KV pool.

    The layers' parameters are stacked ([num_layers, ...] leaves) and the layers scanned. A jitted
    step takes the flat leaves of `nnx.split(model, nnx.Param)` and merges them inside;
    `nnx.eval_shape` of the constructor gives the same graphdef.
    """

    def __init__(
        self, config: LlamaConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.config = config
        vocab, size = config.vocab_size, config.hidden_size
        with nnx.use_eager_sharding(False):  # the axes are metadata; no mesh need be set here
            self.embedding = Embedding(vocab, size, dtype=dtype, rngs=rngs)
            make = nnx.vmap(
                lambda rngs: DecoderLayer(config, dtype=dtype, rngs=rngs),
                in_axes=0,
                out_axes=0,
                transform_metadata={nnx.PARTITION_NAME: None},
            )
            self.layers = nnx.split_rngs(splits=config.num_layers)(make)(rngs)
            self.norm = RMSNorm(size, epsilon=config.rms_norm_eps, dtype=dtype)
            # [V, E] like the embedding, so that a tied and an untied head are the same product.
            self.head = (
                nnx.data(None)
                if config.tie_word_embeddings
                else Embedding(vocab, size, dtype=dtype, rngs=rngs)
            )

    def __call__(
        self,
        token_ids: Int[Array, " T"],
        positions: Int[Array, " T"],
        kv_pool: Shaped[Array, "L N 2 K B D"],
        slot_mapping: Int[Array, " T"],
        block_tables: Int[Array, "S M"],
        query_starts: Int[Array, " S+1"],
        context_lens: Int[Array, " S"],
        *,
        backend: str = "auto",
        row_tile: int | None = None,
    ) -> tuple[Float[Array, "T E"], Shaped[Array, "L N 2 K B D"]]:
        """Run one step: returns the hidden states after the final norm, and the updated pool.

        token_ids, positions and slot_mapping describe the packed query tokens, the rest the
        sequences (see `pallas_kernels.paged_attention`). Rows past query_starts[-1] are padding:
        their slots lie outside the pool, and their hidden states mean nothing. The pool is updated
        in place when the caller donates it.

        row_tile  if given, a divisor of T: everything is computed so many rows at a time, and
                  attention batch-invariant, so that a token's results do not depend, bit by bit, on
                  what else is in the batch. Only rows that are no padding are computed.
        """

        def by_row(function, *rows):
            if row_tile is None:
                return function(*rows)
            return over_row_tiles(function, row_tile, -(-query_starts[-1] // row_tile), *rows)

        rope = rotation(positions, self.config.rope, self.config.head_dim)
        x = self.embedding(token_ids)
        live = jnp.arange(x.shape[0]) < query_starts[-1]
        plan = None
        if row_tile is None:
            plan = plan_attention(
                query_starts,
                context_lens,
                num_tokens=x.shape[0],
                num_heads=self.config.num_heads,
                num_kv_heads=self.config.num_kv_heads,
                dtype=x.dtype,
                backend=backend,
            )
        graphdef, layers = nnx.split(self.layers)
        paths, treedef = jax.tree_util.tree_flatten_with_path(
            layers, is_leaf=lambda x: isinstance(x, Arranged | Quantised)
        )
        leaves = [leaf for _, leaf in paths]
        # What a kernel reads in the stack of all layers; the scan takes the others apart.
        rows = row_tile or x.shape[0]
        in_stack = [
            isinstance(leaf, Arranged | Quantised)
            or (backend in ("auto", "llvm") and is_kernel(path) and has_kernel(rows, leaf))
            for path, leaf in paths
        ]
        stacked = [None if whole else leaf for leaf, whole in zip(leaves, in_stack)]

        def step(carry, xs):
            x, kv_pool = carry
            layer, own = xs

            def block(live) -> DecoderLayer:
                num_live = live.sum(dtype=jnp.int32)
                mine = [
                    LayerOf(leaf, layer, num_live) if whole else one
                    for leaf, whole, one in zip(leaves, in_stack, own)
                ]
                return nnx.merge(graphdef, jax.tree.unflatten(treedef, mine))

            def before(x, cos, sin, live):
                return block(live).before(x, cos, sin)

            def after(x, attended, live):
                return block(live).after(x, attended)

            q, k, v = by_row(before, x, *rope, live)
            kv_pool = write_kv(kv_pool, layer, k, v, slot_mapping, backend=backend)
            attended = paged_attention(
                q,
                kv_pool,
                layer,
                block_tables,
                query_starts,
                context_lens,
                scale=self.config.head_dim**-0.5,
                batch_invariant=row_tile is not None,
                plan=plan,
                backend=backend,
            )
            return (by_row(after, x, attended, live), kv_pool), None

        numbers = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        (x, kv_pool), _ = lax.scan(step, (x, kv_pool), (numbers, stacked))
        return by_row(self.norm, x), kv_pool

    def logits(self, hidden: Float[Array, "R E"]) -> Float[Array, "R V"]:
        """Return float32 logits [R, V] of rows of hidden states."""
        return (self.embedding if self.head is None else self.head).logits(hidden)
