"""Which parameters get another form for the device, and that it is the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.models import Llama, LlamaConfig
from jpaged.runner.weights import for_device, reads_quantised_weights, weights_dtype
from pallas_kernels import llvm_tiles
from pallas_kernels.products import Arranged, Table, arrange
from pallas_kernels.quantised import Quantised

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


def test_quantised_weights_stay_so():
    """Copied, since each step reads them whole; of a table with its transpose only that one."""

    def weights(start, *outputs):
        size = 2 * 3 * 2 * 640
        groups = (jnp.arange(size) + start).astype(jnp.uint8).reshape(2, 3, 2, 640)
        return Quantised(groups, outputs, 4, "float32")

    kernel = weights(0, 2, 48)
    table = Table(jnp.ones((96, 64)), weights(1, 96))
    params = {"head": {"table": table}, "layers": {"kernel": kernel}, "norm": jnp.ones(64)}
    found = for_device(params, CPU, "auto")
    assert found["norm"] is params["norm"] and found["head"]["table"].rows is table.rows
    for before, after in (
        (kernel, found["layers"]["kernel"]),
        (table.quantised, found["head"]["table"].quantised),
    ):
        assert (after.outputs, after.bits, after.dtype_name) == (before.outputs, 4, "float32")
        assert after.groups is not before.groups
        np.testing.assert_array_equal(after.groups, before.groups)
    with pytest.raises(
        ValueError, match=r"loaded without keep_quantised for attention_backend='xla'"
    ):
        for_device(params, CPU, "xla")
    assert weights_dtype({"a": kernel, "b": jnp.ones(2)}) == jnp.float32


def test_who_keeps_weights_quantised(monkeypatch):
    assert reads_quantised_weights("auto") and reads_quantised_weights("llvm")
    assert not any(reads_quantised_weights(name) for name in ("xla", "triton", "mosaic"))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not reads_quantised_weights("auto")
