"""The backend for CPUs: attention of decode rows and short queries by a kernel that LLVM compiles
for the machine at hand, all else of these operators as the xla backend does it."""

import importlib.util
import sys

from pallas_kernels import xla_attention
from pallas_kernels.arguments import Attention
from pallas_kernels.devices import Target
from pallas_kernels.support import Case
from pallas_kernels.xla import (
    copy_blocks,
    gather_blocks,
    merge_states,
    plan_attention,
    scatter_blocks,
    write_kv,
)

__all__ = [
    "copy_blocks",
    "gather_blocks",
    "merge_states",
    "paged_attention",
    "plan_attention",
    "scatter_blocks",
    "unsupported",
    "write_kv",
]


CHUNK = 128  # keys in a chunk of the softmax, about: whole blocks
# Scores of a chunk, of all query heads that share a KV head: they lie on a thread's stack.
_MOST_SCORES = 1 << 16
_MOST_SUMS = 1 << 14  # floats of all query heads that share a KV head: loops over them are unrolled


def missing() -> str | None:
    """What this Python lacks to compile kernels, in words, or None."""
    if sys.platform == "win32":
        return "Windows"
    if importlib.util.find_spec("llvmlite") is None:
        return "a Python without llvmlite"
    return None


def unsupported(case: Case, target: Target) -> str | None:
    """What about a call has no kernel here, in words, or None."""
    if target.platform != "cpu":
        return f"{target.platform}: its kernels are for CPUs"
    if case.operator != "paged_attention":
        return None
    for feature in ("soft_cap", "alibi_slopes"):
        if feature in case.features:
            return feature
    if case.head_dim is not None and case.head_dim % 4:
        return f"head dims that are no multiple of 4 (got {case.head_dim})"
    if (case.group or 1) * max(case.block_size or 1, CHUNK) > _MOST_SCORES:
        return f"groups of {case.group} with blocks of {case.block_size}"
    if (case.group or 1) * (case.head_dim or 1) > _MOST_SUMS:
        return f"groups of {case.group} with head dims of {case.head_dim}"
    return missing()


def paged_attention(arguments: Attention):
    """The public operator's `llvm` backend; its arguments are checked there."""
    from pallas_kernels import llvm_attention  # llvmlite, which other backends do without

    return xla_attention.paged_attention(arguments, attend_rows=llvm_attention.attend_rows)
