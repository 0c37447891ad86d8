"""Which parameters get another form for the device, and that it is the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.models import Llama, LlamaConfig
from jpaged.runner.weights import for_device
from pallas_kernels import llvm_tiles
from pallas_kernels.products import Arranged, Table, arrange

CPU = jax.devices("cpu")[0]


def parameters(dtype=jnp.float32, **changes):
    sizes = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "attention_bias": True,
    }  # fmt: skip
    model = Llama(LlamaConfig(**sizes | changes), dtype=dtype, rngs=nnx.Rngs(0))
    return nnx.split(model, nnx.Param)[1]


def forms(params) -> dict:
    def is_leaf(x):
        return isinstance(x, Arranged | Table | jax.Array)

    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


@pytest.fixture(autouse=True)
def matrix_unit(monkeypatch):
    monkeypatch.setattr(llvm_tiles, "has_tiles", lambda: True)


@pytest.mark.parametrize("backend", ["auto", "llvm"])
def test_kernels_are_arranged_and_tables_copied(backend):
    params = parameters()
    before, after = forms(params), forms(for_device(params, CPU, backend))
    assert len(before) == len(after)
    for (name, leaf), form in zip(before.items(), after.values(), strict=True):
        if "kernel" in name:
            assert isinstance(form, Arranged)
            np.testing.assert_array_equal(form.columns, arrange(leaf).columns)
        elif "table" in name:
            assert isinstance(form, Table)
            assert (form.rows is leaf) == ("embedding" in name)  # of which a step reads some rows
            np.testing.assert_array_equal(form.rows, leaf)
        else:
            assert form is leaf
    assert sum(isinstance(form, Arranged) for form in after.values()) == 4
    assert sum(isinstance(form, Table) for form in after.values()) == 2  # embedding and head


def test_what_does_not_fit_stays_as_it_is():
    params = parameters(intermediate_size=80, vocab_size=90)
    after = forms(for_device(params, CPU, "auto"))
    arranged = {name for name, form in after.items() if isinstance(form, Arranged)}
    assert len(arranged) == 3 and not any("down_proj" in name for name in arranged)
    assert not any(isinstance(form, Table) for form in after.values())


def test_other_backends_dtypes_and_machines_take_the_parameters(monkeypatch):
    params = parameters()
    for backend in ("xla", "triton", "reference"):
        assert for_device(params, CPU, backend) is params
    half = forms(for_device(parameters(jnp.float16), CPU, "auto"))
    assert all(isinstance(form, jax.Array) for form in half.values())
    monkeypatch.setattr(llvm_tiles, "has_tiles", lambda: False)
    assert all(isinstance(x, jax.Array) for x in forms(for_device(params, CPU, "auto")).values())
