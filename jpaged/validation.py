"""Checks of scalar arguments, shared by the config and the sampling parameters.

Every function returns the value as a plain Python object (NumPy scalars are accepted) or raises
one sentence naming the argument, its value and what is allowed: `TypeError` for a wrong type (a
bool is no number here), `ValueError` for a value out of range.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from typing import Any


def shown(value: Any) -> str:
    """`value` and its type as an error message shows them, cut short when long."""
    return f"{reprlib.repr(value)} of type {type(value).__name__}"


def as_int(name: str, value: Any, *, allowed: str, low: int, high: int | None = None) -> int:
    """`value` as an int in [low, high]; `allowed` says in words what is accepted."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be {allowed}, got {shown(value)}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {allowed}, got {reprlib.repr(value)}")
    return number


def as_float(
    name: str,
    value: Any,
    *,
    allowed: str,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
) -> float:
    """`value` as a finite float in [low, high] ((low, high] if `low_open`)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {allowed}, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:  # an int beyond the range of a float
        number = math.inf
    # Written so that NaN, for which every comparison is false, is refused.
    above_low = number > low if low_open else number >= low
    if not (math.isfinite(number) and above_low and number <= high):
        raise ValueError(f"{name} must be {allowed}, got {reprlib.repr(value)}")
    return number


def as_bool(name: str, value: Any, *, or_else: str = "") -> bool:
    """`value` as a bool; NumPy's bool is accepted, numbers are not. `or_else` is what the caller
    takes besides, for the message."""
    if isinstance(value, bool):
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    choices = f"True, False or {or_else}" if or_else else "True or False"
    raise TypeError(f"{name} must be {choices}, got {shown(value)}")


def as_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """`value`, one of the strings `choices`."""
    allowed = "one of " + ", ".join(map(repr, choices))
    if not isinstance(value, str):
        raise TypeError(f"{name} must be {allowed}, got {shown(value)}")
    if value not in choices:
        raise ValueError(f"{name} must be {allowed}, got {reprlib.repr(value)}")
    return value
