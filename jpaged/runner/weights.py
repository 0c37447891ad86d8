"""A model's parameters in the form in which a device's kernels read them."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey

from jpaged.models.layers import is_kernel, is_table
from pallas_kernels.memory import in_large_pages
from pallas_kernels.products import Arranged, Table, arrange, arranges, has_head
from pallas_kernels.quantised import Quantised

_LOG = logging.getLogger("jpaged")
_BACKENDS = ("auto", "llvm")  # attention backends with which kernels for CPUs are used


def _columns(weights: jax.Array) -> jax.Array:
    return arrange(weights).columns


def _copy(table: jax.Array) -> jax.Array:
    return table


def _in_large_pages(weights: Quantised) -> Quantised:
    groups = in_large_pages(_copy, weights.groups).block_until_ready()
    return dataclasses.replace(weights, groups=groups)


def _is_form(leaf: Any) -> bool:
    return isinstance(leaf, Quantised | Table)


def weights_dtype(params: Any) -> jnp.dtype:
    """The dtype of a model's parameters, however they are stored."""
    return next(leaf.dtype for leaf in jax.tree.leaves(params, is_leaf=_is_form))


def reads_quantised_weights(backend: str) -> bool:
    """Whether `load_checkpoint` should leave weights quantised for an engine with this attention
    backend on JAX's default device: one that is for CPUs, or is chosen for them."""
    return jax.default_backend() == "cpu" and backend in _BACKENDS


def for_device(params: Any, device: jax.Device, backend: str) -> Any:
    """The parameters, of which the layers' kernels are arranged, and the tables marked, where
    kernels for `device` read them so and the attention backend does not forbid it. What each step
    reads whole is a copy in large pages: whoever still holds the parameters has it twice.

    Raises ValueError if weights are quantised that only kernels for CPUs read.
    """
    if device.platform != "cpu" or backend not in _BACKENDS:
        if any(map(_is_form, jax.tree.leaves(params, is_leaf=_is_form))):
            raise ValueError(
                f"the checkpoint must be loaded without keep_quantised for "
                f"attention_backend={backend!r} on {device.platform}"
            )
        return params
    copied = 0
    quantised = 0
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    has_own_head = any(DictKey("head") in path for path in paths)

    def form(path: tuple, leaf: jax.Array) -> Any:
        nonlocal copied, quantised
        if isinstance(leaf, Quantised):
            quantised += leaf.groups.nbytes
            return _in_large_pages(leaf)
        if isinstance(leaf, Table):
            if leaf.quantised is None:
                return leaf
            quantised += leaf.quantised.groups.nbytes
            return dataclasses.replace(leaf, quantised=_in_large_pages(leaf.quantised))
        in_layers = DictKey("layers") in path
        if in_layers and is_kernel(path) and arranges(leaf.shape, leaf.dtype):
            copied += leaf.nbytes
            outputs = leaf.shape[2:]
            # Finished here: what is measured of the memory later has it all.
            return Arranged(in_large_pages(_columns, leaf).block_until_ready(), outputs)
        if is_table(path) and has_head(leaf.shape, leaf.dtype):
            if has_own_head and DictKey("head") not in path:
                return Table(leaf)  # an embedding, of which a step reads some rows
            copied += leaf.nbytes
            return Table(in_large_pages(_copy, leaf).block_until_ready())
        return leaf

    with jax.default_device(device):
        found = jax.tree_util.tree_map_with_path(form, params, is_leaf=_is_form)
    if quantised:
        _LOG.info("weights read as the checkpoint has them, quantised: %d bytes", quantised)
    if copied:
        _LOG.info("weights laid out for the CPU's matrix unit (AMX): a copy of %d bytes", copied)
    return found
