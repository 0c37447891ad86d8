"""The merge of the parts that decode rows were split into, in Pallas/Triton."""

from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax

from pallas_kernels.triton_tiles import Config
from pallas_kernels.triton_walk import FLOOR, HIDDEN, LN_2, ceil_div, logarithm

_MERGED_AT_ONCE = 16  # parts


def _merge_kernel(merged, parts_ref, lses_ref, sinks_ref, *refs, config: Config):
    # The outputs are aliased to the inputs before them, and only some of their rows written.
    out_ref, lse_ref = (refs[1], None) if len(refs) == 2 else refs[2:]
    row, head = pl.program_id(0), pl.program_id(1)
    num_parts = merged[3, row]

    @pl.when(num_parts > 0)
    def _():
        token, within, first = merged[0, row], merged[1, row], merged[2, row]
        dims = jnp.arange(config.padded_dim, dtype=jnp.int32)
        is_dim = dims < config.head_dim
        lanes = jnp.arange(_MERGED_AT_ONCE, dtype=jnp.int32)

        def step(i, state):
            output, maximum, total = state
            part = i * _MERGED_AT_ONCE + lanes
            live = part < num_parts
            item = first + part
            lse = plt.load(lses_ref.at[item, within, head], mask=live, other=HIDDEN)
            out = plt.load(
                parts_ref.at[item[:, None], within, head, dims[None, :]],
                mask=live[:, None] & is_dim[None, :],
                other=0.0,
            )
            new_maximum = jnp.maximum(maximum, jnp.max(lse, axis=0))
            keep = jnp.exp2(maximum - new_maximum)
            weights = jnp.exp2(lse - new_maximum)
            output = output * keep + jnp.sum(weights[:, None] * out, axis=0)
            return output, new_maximum, total * keep + jnp.sum(weights, axis=0)

        state = jnp.zeros((config.padded_dim,), jnp.float32), jnp.float32(FLOOR), jnp.float32(0)
        steps = ceil_div(num_parts, _MERGED_AT_ONCE)
        output, maximum, total = lax.fori_loop(0, steps, step, state)
        sees_keys = total > 0
        if config.sinks:
            new_maximum = jnp.maximum(maximum, sinks_ref[head])
            keep = jnp.exp2(maximum - new_maximum)
            total = total * keep + jnp.exp2(sinks_ref[head] - new_maximum)
            output, maximum = output * keep, new_maximum
        total = jnp.where(sees_keys, total, 1.0)
        output = (output / total).astype(out_ref.dtype)
        plt.store(out_ref.at[token, head, dims], output, mask=is_dim)
        if lse_ref is not None:
            lse = jnp.where(sees_keys, logarithm(maximum, total) * LN_2, -jnp.inf)
            lse_ref[token, head] = lse


def merge_parts(merged, parts, lses, sinks, results, config: Config, *, interpret: bool) -> list:
    """Writes the rows of decode rows into the results, in place.

    Args:
        merged: The plan's, [4, rows].
        parts: float32 [items, tokens, H, D].
        lses: In base 2, float32 [items, tokens, H].
        sinks: In base 2, float32 [H], or None.
        results: The output [T, H, D], and the lse [T, H] if it is asked for.
        config: Of the decode kernel.
        interpret: Whether to run on a CPU.

    Returns:
        The results.
    """
    inputs = (merged, parts, lses, sinks)
    first = len(jax.tree.leaves(inputs))
    return pl.pallas_call(
        partial(_merge_kernel, config=config),
        grid=(merged.shape[1], parts.shape[2]),
        out_shape=[jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results],
        input_output_aliases={first + i: i for i in range(len(results))},
        compiler_params=plt.CompilerParams(
            num_warps=max(1, config.padded_dim // 128), num_stages=2
        ),
        interpret=interpret,
        name="paged_attention_merge",
    )(*inputs, *results)
