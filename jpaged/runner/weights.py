"""A model's parameters in the form in which a device's kernels read them."""

from __future__ import annotations

import logging
from typing import Any

import jax
from jax.tree_util import DictKey

from jpaged.models.layers import is_kernel, is_table
from pallas_kernels.memory import in_large_pages
from pallas_kernels.products import Arranged, Table, arrange, arranges, has_head

_LOG = logging.getLogger("jpaged")


def _columns(weights: jax.Array) -> jax.Array:
    return arrange(weights).columns


def _copy(table: jax.Array) -> jax.Array:
    return table


def for_device(params: Any, device: jax.Device, backend: str) -> Any:
    """The parameters, of which the layers' kernels are arranged, and the tables marked, where
    kernels for `device` read them so and the attention backend does not forbid it. What each step
    reads whole is a copy in large pages: whoever still holds the parameters has it twice."""
    if device.platform != "cpu" or backend not in ("auto", "llvm"):
        return params
    copied = 0
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    has_own_head = any(DictKey("head") in path for path in paths)

    def form(path: tuple, leaf: jax.Array) -> Any:
        nonlocal copied
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
        found = jax.tree_util.tree_map_with_path(form, params)
    if copied:
        _LOG.info("weights laid out for the CPU's matrix unit (AMX): a copy of %d bytes", copied)
    return found
