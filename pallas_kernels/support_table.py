"""The table of what each backend supports, from the backends' own answers.

`python -m pallas_kernels.support_table` prints it. Each row varies one thing of a plain case
(bfloat16, head dim 128, blocks of 16, groups of 4, no features, on an H200). The rows are
independent of each other: `exceptions` looks through all their combinations for a case where that
does not hold.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from pallas_kernels.devices import Target
from pallas_kernels.support import FEATURES, Case, load

BACKENDS = ("mosaic", "triton", "xla")
OPERATORS = (
    "paged_attention",
    "write_kv",
    "copy_blocks",
    "gather_blocks",
    "scatter_blocks",
    "merge_states",
)
_H200 = Target("gpu", "NVIDIA H200", 132, (9, 0))
_TARGETS = {
    "V100": Target("gpu", "NVIDIA V100", 80, (7, 0)),
    "A100": Target("gpu", "NVIDIA A100", 108, (8, 0)),
    "H100, H200": _H200,
    "B200": Target("gpu", "NVIDIA B200", 148, (10, 0)),
    "CPU": Target("cpu", "cpu", None),
}
_PLAIN = Case("paged_attention", jnp.dtype(jnp.bfloat16), 128, 16, 4)
_AXES: dict[str, dict[str, dict[str, Any]]] = {
    "dtype": {name: {"dtype": jnp.dtype(name)} for name in ("float16", "bfloat16", "float32")},
    "head dim": {str(size): {"head_dim": size} for size in (32, 64, 80, 96, 128, 192, 256, 512)},
    "block size": {str(size): {"block_size": size} for size in (1, 8, 16, 32, 48, 64, 128, 256)},
    "group": {str(size): {"group": size} for size in (1, 3, 4, 7, 8, 16, 32, 64, 128)},
    "feature": {name: {"features": frozenset({name})} for name in FEATURES},
}


def supported(backend: str, case: Case, target: Target = _H200) -> bool:
    """Whether a backend supports a case on a device."""
    return load(backend).unsupported(case, target) is None


def rows() -> Iterator[tuple[str, str, list[bool]]]:
    """What varies, its value, and the answer of each of BACKENDS."""
    for name, target in _TARGETS.items():
        yield "device", name, [supported(backend, _PLAIN, target) for backend in BACKENDS]
    for operator in OPERATORS:
        case = _PLAIN._replace(operator=operator)
        yield "operator", operator, [supported(backend, case) for backend in BACKENDS]
    for axis, values in _AXES.items():
        for name, change in values.items():
            case = _PLAIN._replace(**change)
            yield axis, name, [supported(backend, case) for backend in BACKENDS]


def exceptions() -> Iterator[tuple[str, Case]]:
    """Combinations whose support is not what the rows say of each value alone."""
    choices = [list(values.values()) for values in _AXES.values()]
    for backend in BACKENDS:
        alone = [
            [supported(backend, _PLAIN._replace(**change)) for change in values]
            for values in choices
        ]
        for places in itertools.product(*(range(len(values)) for values in choices)):
            changes = {}
            for values, place in zip(choices, places, strict=True):
                changes.update(values[place])
            case = _PLAIN._replace(**changes)
            if case.features == {"uint16 pool"} and case.dtype != jnp.bfloat16:
                continue  # no such pool
            expected = all(answers[place] for answers, place in zip(alone, places, strict=True))
            if supported(backend, case) != expected:
                yield backend, case


def table() -> Iterator[str]:
    """The rows as lines of Markdown, values with equal answers on one line."""
    yield f"| paged attention | | {' | '.join(BACKENDS)} |"
    yield "|---|---|" + "---|" * len(BACKENDS)
    for (axis, answers), group in itertools.groupby(rows(), lambda row: (row[0], row[2])):
        names = ", ".join(name for _, name, _ in group)
        yield f"| {axis} | {names} | {' | '.join('yes' if yes else 'no' for yes in answers)} |"


if __name__ == "__main__":
    print("\n".join(table()))
