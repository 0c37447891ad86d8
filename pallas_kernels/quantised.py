"""Weights as quantised checkpoints hold them, for kernels that read them so: a number of 4 or 8
bits each, and a scale (and an offset) for every group of 32."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import UInt8

GROUP = 32  # successive inputs of one output that share a scale
COLUMNS = 32  # outputs that lie side by side
_HALF = 16  # outputs whose numbers lie side by side: LANES of the kernels


def group_bytes(bits: int) -> int:
    """Bytes of a group of COLUMNS outputs: numbers, scales and, of 4 bits, offsets."""
    return COLUMNS * GROUP * bits // 8 + 2 * COLUMNS * (2 if bits == 4 else 1)


def groups_shape(layers: int, depth: int, width: int, bits: int) -> tuple[int, int, int, int]:
    """That of the groups of weights [layers, depth, width]."""
    return layers, width // COLUMNS, depth // GROUP, group_bytes(bits)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["groups"],
    meta_fields=["outputs", "bits", "dtype_name"],
)
@dataclass(frozen=True)
class Quantised:
    """Weights [L, E, *outputs], each scale * number + offset: numbers of 4 bits are 0 to 15, those
    of 8 are -128 to 127 and have no offset.

    Attributes:
        groups: [L, C, E / 32, bytes]: COLUMNS outputs' numbers of GROUP inputs, then their scales,
            then their offsets (float16). Of the numbers come those of 16 outputs first. They lie
            there in pairs of successive inputs, output by output; of 4 bits, two bytes hold four
            pairs' numbers of the same place, the first one lowest.
        outputs: the axes of the outputs.
        bits: of a number, 4 or 8.
        dtype_name: the weights' dtype: what a product computes with is rounded to it.
    """

    groups: UInt8[jax.Array, "L C G bytes"]
    outputs: tuple[int, ...]
    bits: int
    dtype_name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """[L, E, *outputs]."""
        return (self.groups.shape[0], self.groups.shape[2] * GROUP, *self.outputs)

    @property
    def dtype(self) -> np.dtype:
        """That of the weights."""
        return jax.numpy.dtype(self.dtype_name)


def pack(
    numbers: UInt8[np.ndarray, "F E"],
    scales: np.ndarray,
    offsets: np.ndarray | None = None,
) -> UInt8[np.ndarray, "C G bytes"]:
    """One layer's groups, for `Quantised.groups`.

    Args:
        numbers: of 0 to 15 with offsets, else the bytes of int8.
        scales, offsets: float16 [F, E / GROUP].
    """
    columns, groups = numbers.shape[0] // COLUMNS, numbers.shape[1] // GROUP
    if offsets is not None:
        # [F, group, four pairs, which of them, the two of a pair]
        fours = numbers.reshape(-1, groups, 4, 4, 2)
        low = fours[..., 0, :] | fours[..., 1, :] << 4
        high = fours[..., 2, :] | fours[..., 3, :] << 4
        pairs = np.stack([low, high], -1).reshape(*low.shape[:3], 4).view(np.uint32)
    else:
        pairs = numbers.reshape(-1, groups, GROUP // 2, 2).view(np.uint16)
    # [C, half, output, group, pairs] -> [C, group, half, pairs, output]
    pairs = pairs.reshape(columns, 2, _HALF, groups, -1).transpose(0, 3, 1, 4, 2)
    parts = [np.ascontiguousarray(pairs).view(np.uint8).reshape(columns, groups, -1)]
    for values in (scales, offsets):
        if values is not None:
            turned = values.reshape(columns, COLUMNS, groups).swapaxes(1, 2)
            parts.append(np.ascontiguousarray(turned).view(np.uint8))
    return np.concatenate(parts, -1)


def unpack(weights: Quantised, layer: int) -> np.ndarray:
    """One layer's weights [E, *outputs] in float32, as the kernels' results are checked against."""
    groups = np.asarray(weights.groups[layer])
    columns, num_groups, _ = groups.shape
    size = COLUMNS * GROUP * weights.bits // 8
    words = np.ascontiguousarray(groups[..., :size])
    if weights.bits == 4:
        fours = words.view(np.uint16).reshape(columns, num_groups, 2, 4, _HALF, 2)
        numbers = np.stack([fours >> 4 * i & 15 for i in range(4)], 4)  # [..., fours, 4, output, 2]
    else:
        numbers = words.view(np.int8)
    numbers = numbers.reshape(columns, num_groups, 2, GROUP // 2, _HALF, 2)
    numbers = numbers.transpose(1, 3, 5, 0, 2, 4).reshape(num_groups, GROUP, -1)

    def of_outputs(begin: int) -> np.ndarray:
        halves = np.ascontiguousarray(groups[..., begin : begin + 2 * COLUMNS]).view(np.float16)
        return halves.swapaxes(0, 1).reshape(num_groups, 1, -1).astype(np.float32)

    values = numbers.astype(np.float32) * of_outputs(size)
    if weights.bits == 4:
        values += of_outputs(size + 2 * COLUMNS)
    return values.reshape(-1, *weights.outputs)
