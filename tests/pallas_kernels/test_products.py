"""Products of few rows with stacked weights: values, exactness, and which calls have a kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import llvm_matmul, llvm_tiles, products
from pallas_kernels.products import has_kernel, stacked_product

multiply = jax.jit(stacked_product)
# Below one sheet of 64 rows of w, one over it, several; one unit of columns and many.
SHAPES = [(4, 32), (68, 96), (576, 960), (64, 1024)]


@pytest.fixture(autouse=True)
def no_matrix_unit(monkeypatch):
    """As on a machine without one, whose products these are; test_matrix_unit.py has the others."""
    monkeypatch.setattr(llvm_tiles, "has_tiles", lambda: False)


def weights_of(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def make(shape, num_rows, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_rows, shape[0]))
    weights = np.full((3, *shape), np.nan)
    weights[1] = rng.standard_normal(shape)
    return jnp.asarray(x, dtype), jnp.asarray(weights, dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [8, 16, 24, 64])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "bfloat16 widened"])
def test_is_the_product(shape, num_rows, kind, monkeypatch):
    """Of one layer; the others are NaN. More rows of bfloat16 than it is fast for."""
    monkeypatch.setattr(products, "_most_rows", lambda dtype: llvm_matmul.MOST_ROWS)
    if kind == "bfloat16 widened":
        monkeypatch.setattr(llvm_matmul, "multiplies_pairs", lambda: False)
    x, weights = make(shape, num_rows, kind.split()[0])
    got = jax.jit(lambda *a: stacked_product(*a))(x, weights, jnp.int32(1))
    wide = np.asarray(x, np.float64) @ np.asarray(weights[1], np.float64)
    assert got.dtype == jnp.float32 and got.shape == (num_rows, shape[1])
    # Each of E additions rounds to 2^-24 of a sum, which is at most that of the absolute values.
    absolute = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(weights[1], np.float64))
    assert (np.abs(got - wide) <= 2.0**-24 * shape[0] * absolute).all()
    assert np.linalg.norm(got - wide) < 2e-6 * np.linalg.norm(wide)


def test_where_python_ints_are_of_64_bits():
    x, weights = make((68, 96), 8, "float32")
    expected = stacked_product(x, weights, 1, 5)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(stacked_product(x, weights, 1, 5), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_the_others(dtype, monkeypatch):
    """To the bit, in any number of rows, with NaN beside it, on any thread."""
    monkeypatch.setattr(products, "_most_rows", lambda dtype: llvm_matmul.MOST_ROWS)
    x, weights = make((576, 960), 64, dtype)
    whole = np.asarray(multiply(x, weights, 1))
    for num_rows in (8, 32):
        for start in range(0, 64, num_rows):
            part = multiply(x[start : start + num_rows], weights, 1)
            np.testing.assert_array_equal(part, whole[start : start + num_rows])
    poisoned = multiply(x.at[3::5].set(jnp.nan), weights, 1)
    keep = [i for i in range(64) if i % 5 != 3]
    np.testing.assert_array_equal(np.asarray(poisoned)[keep], whole[keep])
    assert np.isnan(np.asarray(poisoned)[3::5]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_are_not_live_cost_nothing_and_change_nothing(dtype):
    x, weights = make((68, 96), 32, dtype)
    whole = np.asarray(multiply(x, weights, 1))
    for num_live in (0, 1, 7, 8, 9, 31, 32, 40):
        got = np.asarray(multiply(x, weights, 1, jnp.int32(num_live)))
        np.testing.assert_array_equal(got[:num_live], whole[:num_live])
        rest = got[-(-num_live // 8) * 8 :]
        np.testing.assert_array_equal(rest, np.zeros_like(rest))


def test_outputs_of_several_axes():
    x, weights = make((64, 128), 8, "float32")
    got = multiply(x, weights.reshape(3, 64, 2, 4, 16), 1)
    np.testing.assert_array_equal(got.reshape(8, 128), multiply(x, weights, 1))


def test_weights_are_read_where_they_lie():
    """In a scan over layers: no copy of a layer's weights."""
    weights = jax.ShapeDtypeStruct((20, 512, 512), jnp.float32)

    def run(x, weights):
        def layer(x, index):
            return stacked_product(x, weights, index) * 0.01, None

        return jax.lax.scan(layer, x, jnp.arange(20))[0]

    compiled = jax.jit(run).lower(jax.ShapeDtypeStruct((8, 512), jnp.float32), weights).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 512 * 512 * 4 / 4


def test_what_does_not_fit_is_refused():
    x, weights = make((64, 96), 8, "float32")
    with pytest.raises(TypeError, match=r"^x must be float32 like the weights, got bfloat16$"):
        stacked_product(x.astype(jnp.bfloat16), weights, 0)
    for wrong in (x[:, :60], x[0]):
        with pytest.raises(ValueError, match=r"^x must be \[T, 64\]"):
            stacked_product(wrong, weights, 0)
    for num_rows in (3, 12, 72):
        with pytest.raises(ValueError, match=r"^x and weights must be of shapes"):
            stacked_product(jnp.zeros((num_rows, 64)), weights, 0)
    with pytest.raises(ValueError, match=r"^x and weights must be of shapes"):
        stacked_product(x, weights[:, :, :80], 0)


@pytest.mark.parametrize(("layer", "read"), [(-3, 0), (7, 2)])
def test_a_layer_outside_is_the_nearest(layer, read):
    x, weights = make((64, 96), 8, "float32")
    weights = jnp.nan_to_num(weights).at[0].set(1.0).at[2].set(2.0)
    np.testing.assert_array_equal(multiply(x, weights, layer), multiply(x, weights, read))


def test_under_vmap():
    x, weights = make((64, 96), 8, "float32")
    both = jax.vmap(lambda x: stacked_product(x, weights, 1))(jnp.stack([x, 2 * x]))
    np.testing.assert_array_equal(both[0], multiply(x, weights, 1))
    np.testing.assert_array_equal(both[1], multiply(2 * x, weights, 1))


def test_which_products_have_a_kernel(monkeypatch):
    shape = (2, 64, 96)
    assert has_kernel(8, weights_of(shape)) and has_kernel(64, weights_of(shape))
    assert has_kernel(8, weights_of(shape, jnp.bfloat16))
    assert has_kernel(8, weights_of((2, 64, 3, 32)))
    for num_rows in (1, 4, 12, 72, 128):
        assert not has_kernel(num_rows, weights_of(shape))
    assert not has_kernel(40, weights_of(shape, jnp.bfloat16))
    assert not has_kernel(8, weights_of(shape, jnp.float16))
    assert not has_kernel(8, weights_of((2, 62, 96)))
    assert not has_kernel(8, weights_of((2, 64, 80)))
    gpu = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        assert not has_kernel(8, weights_of(shape))
    monkeypatch.setattr(products.llvm, "missing", lambda: "anything")
    assert not has_kernel(8, weights_of(shape))


@pytest.mark.parametrize("pairs", [False, True])
def test_fewer_rows_of_bfloat16_where_the_machine_has_no_product_for_them(pairs, monkeypatch):
    monkeypatch.setattr(llvm_matmul, "multiplies_pairs", lambda: pairs)
    shape = (2, 64, 96)
    assert has_kernel(8, weights_of(shape, jnp.bfloat16))
    assert has_kernel(32, weights_of(shape, jnp.bfloat16)) == pairs
    assert has_kernel(64, weights_of(shape))


def test_bfloat16_is_xlas_where_xla_has_the_matrix_unit(monkeypatch):
    monkeypatch.setattr(llvm_tiles, "has_tiles", lambda: True)
    assert not has_kernel(8, weights_of((2, 64, 96), jnp.bfloat16))
    assert has_kernel(8, weights_of((2, 64, 96)))
