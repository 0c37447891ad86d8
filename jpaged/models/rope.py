"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) and their extensions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

_DEFAULT_THETA = 10000.0
# What each variant reads. A key outside its list would change nothing in transformers or something
# that we do not know, so it is refused.
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_OPTIONAL = {
    "default": (),
    "linear": (),
    "llama3": ("original_max_position_embeddings",),
    "yarn": (
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}


@dataclass(frozen=True)
class RopeConfig:
    """Which rotary embedding a model has; the fields past `theta` belong to some variants alone."""

    rope_type: str = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    # One divisor for each frequency, where a file gives the outcome of a variant instead of its
    # name (GGUF does).
    divisors: tuple[float, ...] = ()


def rope_config_from_hf(config: dict[str, Any], max_position_embeddings: int) -> RopeConfig:
    """Read transformers 5's `rope_parameters`, or the older `rope_theta` with `rope_scaling`.

    Raises ValueError naming the key for a variant or a key that is not understood, and where the
    two spellings stand side by side and disagree.
    """
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    parameters = config.get(key) or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"{key} must be an object, got {parameters!r}")
    if key == "rope_parameters" and config.get("rope_scaling") not in (None, {}, parameters):
        raise ValueError(
            f"rope_parameters and rope_scaling must agree where both are given, got {parameters!r} "
            f"and {config['rope_scaling']!r}"
        )
    given = {name: value for name, value in parameters.items() if value is not None}
    rope_type = given.pop("rope_type", None)
    old_name = given.pop("type", None)
    rope_type = rope_type or old_name or "default"
    if not isinstance(rope_type, str) or rope_type not in _REQUIRED:
        raise ValueError(
            f"{key} rope_type must be one of {', '.join(_REQUIRED)}, got {rope_type!r}"
        )
    theta = given.pop("rope_theta", config.get("rope_theta"))
    if config.get("rope_theta") not in (None, theta):
        raise ValueError(
            f"rope_theta must be the same in {key} and beside it, got {theta!r} "
            f"and {config['rope_theta']!r}"
        )
    partial = given.pop("partial_rotary_factor", 1.0)
    for where, value in ((key, partial), ("config", config.get("partial_rotary_factor"))):
        if value not in (None, 1.0):
            raise ValueError(f"partial_rotary_factor in {where} must be 1.0, got {value!r}")

    for name in _REQUIRED[rope_type]:
        if name not in given:
            raise ValueError(f"{key} of rope_type {rope_type!r} must have {name}, got {parameters}")
    unknown = sorted(set(given) - set(_REQUIRED[rope_type]) - set(_OPTIONAL[rope_type]))
    if unknown and rope_type == "default":
        # transformers ignores the leftovers of a variant that was switched off by name.
        unknown = [name for name in unknown if name not in RopeConfig.__dataclass_fields__]
        given = {}
    if unknown:
        raise ValueError(
            f"{key} of rope_type {rope_type!r} has a key that is not understood: "
            f"{unknown[0]}={parameters[unknown[0]]!r}"
        )
    # As in transformers, a value beside the variant's parameters wins over the one among them.
    original = config.get("original_max_position_embeddings") or given.get(
        "original_max_position_embeddings"
    )
    given["original_max_position_embeddings"] = original or max_position_embeddings
    for name, value in [("rope_theta", theta), *given.items()]:
        if value is None or (name == "truncate" and isinstance(value, bool)):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{name} in {key} must be a number above 0, got {value!r}")
    return RopeConfig(rope_type, _DEFAULT_THETA if theta is None else float(theta), **given)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Return the float32 inverse frequencies [head_dim / 2] and the factor on cos and sin.

    The variants are the published ones, in transformers' float32 order of operations: `linear`
    position interpolation (Chen et al. 2023, arXiv:2306.15595), `llama3` (Llama 3.1's smooth cut
    between wavelengths) and `yarn` (Peng et al. 2023, arXiv:2309.00071).
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.float32(rope.theta) ** exponents
    frequencies = np.float32(1.0) / powers
    factor = np.float32(rope.factor)
    if rope.rope_type == "linear":
        return frequencies / factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, frequencies), 1.0
    if rope.rope_type == "yarn":
        ramp = _yarn_ramp(rope, head_dim)
        interpolated = np.float32(1.0) / (factor * powers)
        return interpolated * ramp + frequencies * (1 - ramp), _yarn_attention_factor(rope)
    if rope.divisors:
        return frequencies / np.asarray(rope.divisors, np.float32), 1.0
    return frequencies, 1.0


def _llama3(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    context = rope.original_max_position_embeddings
    wavelengths = np.float32(2 * math.pi) / frequencies
    smooth = np.float32(context) / wavelengths - np.float32(rope.low_freq_factor)
    smooth = smooth / np.float32(rope.high_freq_factor - rope.low_freq_factor)
    scaled = frequencies / np.float32(rope.factor)
    blended = (1 - smooth) * frequencies / np.float32(rope.factor) + smooth * frequencies
    result = np.where(wavelengths > context / rope.low_freq_factor, scaled, blended)
    return np.where(wavelengths < context / rope.high_freq_factor, frequencies, result)


def _yarn_ramp(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Return each frequency's share of interpolation: 0 keeps it, 1 divides it by the factor."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    steps = np.arange(head_dim // 2, dtype=np.float32)
    return np.clip((steps - np.float32(low)) / np.float32(high - low), 0, 1).astype(np.float32)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return float(rope.attention_factor)

    def magnitude(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def rotation(
    positions: Int[Array, " T"], rope: RopeConfig, head_dim: int
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """Return float32 cos and sin [T, head_dim / 2] of each position's rotation angles."""
    frequencies, attention_factor = inverse_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def rotate(
    x: Float[Array, "T heads D"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "T heads D"]:
    """Rotate the pairs (i, i + D/2) of each head, in float32; the result has the dtype of x."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
