"""Fills a model's stacked parameter leaves from a checkpoint, tensor by tensor."""

from __future__ import annotations

import math
import re
from collections.abc import Set
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from flax import nnx
from jaxtyping import DTypeLike

from jpaged.models import LlamaConfig, model_class
from pallas_kernels.products import Table, reads_quantised
from pallas_kernels.quantised import Quantised, groups_shape, pack

_ALL = (...,)
# The parts of a fused projection's outputs, by the tensors that fill them: see models/llama.py.
_FUSED: dict[str, dict[str, tuple]] = {
    "attention.qkv_proj": {
        "self_attn.q_proj": (..., slice(None, -2), slice(None)),
        "self_attn.k_proj": (..., -2, slice(None)),
        "self_attn.v_proj": (..., -1, slice(None)),
    },
    "attention.o_proj": {"self_attn.o_proj": _ALL},
    "feed_forward.gate_up_proj": {
        "mlp.gate_proj": (..., 0, slice(None)),
        "mlp.up_proj": (..., 1, slice(None)),
    },
    "feed_forward.down_proj": {"mlp.down_proj": _ALL},
}
# Where a leaf of the model comes from: the tensors in Hugging Face's names, `{}` being the layer,
# and the part of the leaf that each of them fills.
_LLAMA: dict[str, dict[str, tuple]] = {
    "embedding.table": {"model.embed_tokens.weight": _ALL},
    "norm.scale": {"model.norm.weight": _ALL},
    "head.table": {"lm_head.weight": _ALL},
    "layers.attention_norm.scale": {"model.layers.{}.input_layernorm.weight": _ALL},
    "layers.feed_forward_norm.scale": {"model.layers.{}.post_attention_layernorm.weight": _ALL},
    **{
        f"layers.{ours}.{leaf}": {
            f"model.layers.{{}}.{theirs}.{name}": part for theirs, part in parts.items()
        }
        for ours, parts in _FUSED.items()
        for leaf, name in (("kernel", "weight"), ("bias", "bias"))
    },
}
# What stands there only to be ignored: old folders store the inverse frequencies, which follow from
# the config; a tied head may be stored besides the embedding.
_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq|lm_head\.weight")


class QuantisedRows(NamedTuple):
    """A matrix [out, in], scale * number + offset, in groups of 32 inputs."""

    numbers: np.ndarray  # uint8 [out, in]: 0 to 15 where there are offsets, else the bytes of int8
    scales: np.ndarray  # float16 [out, in / 32]
    offsets: np.ndarray | None  # like scales


class TensorSource(Protocol):
    """A checkpoint's tensors under Hugging Face's names and in its layout (matrices [out, in])."""

    name: str

    def tensor_names(self) -> Set[str]:
        """Return the names of all tensors."""

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""

    def read_tensor(self, name: str) -> np.ndarray:
        """Read one tensor (float32, float16, bfloat16 or float64)."""


@runtime_checkable
class QuantisedSource(TensorSource, Protocol):
    """A checkpoint some of whose matrices may be quantised."""

    def quantised_bits(self, name: str) -> int | None:
        """Return the bits of a number in a tensor that `read_quantised` reads, else None."""

    def read_quantised(self, name: str) -> QuantisedRows:
        """Read one tensor as it is."""


def load_parameters(
    config: LlamaConfig, source: TensorSource, dtype: DTypeLike, *, keep_quantised: bool = False
) -> tuple[nnx.GraphDef, nnx.State]:
    """Return the graphdef of the model that `config` describes, and its parameters on the device.

    With keep_quantised, what CPUs have kernels for is `Quantised`, if the source has it so:
    kernels, and the head in a `Table`, which holds the rows too where they are the embedding's.

    Only one stacked leaf is held on the host besides what is already on the device. Names and
    shapes of all tensors are checked before any is read: ValueError names the tensor, its shape and
    the shape expected.
    """
    found = len(source.tensor_names())
    if config.num_layers > found:  # said before names are made for layers without end
        raise ValueError(
            f"{source.name} must have tensors for the {config.num_layers} layers of its config, "
            f"got {found} tensors"
        )
    model = nnx.eval_shape(lambda: model_class(config)(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, abstract = nnx.split(model, nnx.Param)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    plans = [_LeafPlan(_dotted(path), leaf, config.num_layers) for path, leaf in leaves]
    head = "embedding.table" if config.tie_word_embeddings else "head.table"
    _check_names(source, {name for plan in plans for name, _ in plan.tensors})
    for plan in plans:
        plan.check_shapes(source)

    def load(plan: _LeafPlan) -> jax.Array | Quantised | Table:
        quantised = None
        wanted = keep_quantised and (not plan.is_table or plan.path == head)
        if wanted and isinstance(source, QuantisedSource):
            quantised = plan.load_quantised(source)
        if quantised is None:
            return plan.load(source)
        if not plan.is_table:
            return quantised
        return Table(plan.load(source) if config.tie_word_embeddings else None, quantised)

    return graphdef, jax.tree_util.tree_unflatten(treedef, [load(plan) for plan in plans])


def _dotted(path: tuple) -> str:
    """Return a leaf's path as "layers.attention.o_proj.kernel"."""
    return ".".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))


class _LeafPlan:
    """One leaf of the model and the tensors that fill it."""

    def __init__(self, path: str, leaf: jax.ShapeDtypeStruct, num_layers: int) -> None:
        stacked = path.startswith("layers.")
        self.path = path
        self.shape, self.dtype = leaf.shape, leaf.dtype
        self.transposed = path.endswith(".kernel")  # ours [in, *out], theirs [out, in]
        self.is_table = path.endswith(".table")
        # (tensor, the part of the leaf that it fills)
        self.tensors: list[tuple[str, tuple]] = []
        for template, part in _LLAMA[path].items():
            if stacked:
                self.tensors += [(template.format(i), (i, *part)) for i in range(num_layers)]
            else:
                self.tensors.append((template, part))

    def _shape_in_file(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor that fills a part of this shape."""
        if self.is_table:
            return part
        if self.transposed:
            return math.prod(part[1:]), part[0]
        return (math.prod(part),)

    def check_shapes(self, source: TensorSource) -> None:
        leaf = np.broadcast_to(np.int8(0), self.shape)  # takes no memory
        for name, part in self.tensors:
            expected = self._shape_in_file(leaf[part].shape)
            found = tuple(source.tensor_shape(name))
            if found != expected:
                raise ValueError(
                    f"tensor {name!r} of {source.name} must have shape {expected}, got {found}"
                )

    def load(self, source: TensorSource) -> jax.Array:
        """The leaf, dequantised."""
        # JAX lets go of host memory that it has copied when it is next called: with this call, the
        # leaf before is gone before this one is filled.
        jax.device_put(np.int8(0)).block_until_ready()
        host = np.empty(self.shape, self.dtype)
        for name, part in self.tensors:
            tensor = source.read_tensor(name)
            # One assignment transposes and converts: no further copy of the tensor is made.
            place = host[part]
            if self.transposed:  # [out, in] -> [*out, in] -> [in, *out], all views
                tensor = np.moveaxis(tensor.reshape(*place.shape[1:], -1), -1, 0)
            place[...] = tensor if self.is_table else tensor.reshape(place.shape)
        return jax.device_put(host).block_until_ready()

    def load_quantised(self, source: QuantisedSource) -> Quantised | None:
        """The leaf (of a table its transpose, as the only layer) as the source has it; None where
        that, or what kernels read, is something else."""
        if not (self.is_table or self.transposed):
            return None
        outputs = self.shape[:1] if self.is_table else self.shape[2:]
        found = {source.quantised_bits(name) for name, _ in self.tensors}
        bits = found.pop()
        if found or bits is None or not reads_quantised(self.shape[1], math.prod(outputs)):
            return None
        jax.device_put(np.int8(0)).block_until_ready()  # as `load` does
        layers = 1 if self.is_table else self.shape[0]
        groups = np.empty(groups_shape(layers, self.shape[1], math.prod(outputs), bits), np.uint8)
        for layer in range(layers):
            hosts: list[np.ndarray] = []  # numbers, scales and offsets: [*out, in]
            for name, part in self.tensors:
                if not self.is_table and part[0] != layer:
                    continue
                arrays = [array for array in source.read_quantised(name) if array is not None]
                hosts = hosts or [np.empty((*outputs, x.shape[1]), x.dtype) for x in arrays]
                for host, array in zip(hosts, arrays, strict=True):
                    place = host if self.is_table else np.moveaxis(host, -1, 0)[part[1:]]
                    rows = array.reshape(*place.shape[1:], -1)
                    place[...] = array if self.is_table else np.moveaxis(rows, -1, 0)
            if not all(np.isfinite(host).all() for host in hosts[1:]):
                return None  # of NaN and infinity the kernels make other NaN
            groups[layer] = pack(*(host.reshape(-1, host.shape[-1]) for host in hosts))
        packed = jax.device_put(groups).block_until_ready()
        return Quantised(packed, tuple(outputs), bits, np.dtype(self.dtype).name)


def _check_names(source: TensorSource, wanted: Set[str]) -> None:
    found = source.tensor_names()
    missing = sorted(wanted - found)
    if missing:
        raise ValueError(f"{source.name} lacks tensor {missing[0]!r}{_and_more(missing)}")
    unknown = sorted(name for name in found - wanted if not _IGNORED.fullmatch(name))
    if unknown:
        raise ValueError(
            f"{source.name} has tensor {unknown[0]!r}{_and_more(unknown)}, for which the model "
            f"that its config describes has no place"
        )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
