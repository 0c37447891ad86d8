"""Products with arranged weights, and heads, by the matrix unit of Intel's CPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import llvm_tiles, products
from pallas_kernels.products import (
    Table,
    arrange,
    arranges,
    has_head,
    has_kernel,
    head_product,
    stacked_product,
)

needs_tiles = pytest.mark.skipif(
    not llvm_tiles.has_tiles(),
    reason="needs a CPU with AMX, which only some machines of any leg have",
)

multiply = jax.jit(stacked_product)
head = jax.jit(head_product)
DTYPES = ["float32", "bfloat16"]


def make(shape, num_rows, dtype, seed=0):
    """Rows, and weights of three layers, of which 0 and 2 are NaN."""
    rng = np.random.default_rng(seed)
    weights = np.full((3, *shape), np.nan)
    weights[1] = rng.standard_normal(shape)
    x = rng.standard_normal((num_rows, shape[0]))
    return jnp.asarray(x, dtype), jnp.asarray(weights, dtype)


def make_table(vocabulary, depth, num_rows, dtype):
    rng = np.random.default_rng(1)
    x, table = rng.standard_normal((num_rows, depth)), rng.standard_normal((vocabulary, depth))
    return jnp.asarray(x, dtype), Table(jnp.asarray(table, dtype))


def check(got, x, matrix, norm=4e-7):
    """Against float64: as near as sums of float32 in any order come."""
    x, matrix = np.asarray(x, np.float64), np.asarray(matrix, np.float64)
    assert got.dtype == jnp.float32 and got.shape == (len(x), matrix.shape[1])
    # Each of E additions rounds to 2^-24 of a sum, which is at most that of the absolute values,
    # and what each product leaves out is as much again.
    bound = 2.0**-24 * (x.shape[1] + 2) * (np.abs(x) @ np.abs(matrix))
    assert (np.abs(got - x @ matrix) <= bound).all()
    assert np.linalg.norm(got - x @ matrix) < norm * np.linalg.norm(x @ matrix)


@needs_tiles
def test_where_python_ints_are_of_64_bits():
    x, weights = make((64, 96), 8, "float32")
    arranged = arrange(weights)
    expected = stacked_product(x, arranged, 1, 5)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(stacked_product(x, arranged, 1, 5), expected)


# One product of tiles; fewer and more of them than the stack has room for (18); odd numbers.
@needs_tiles
@pytest.mark.parametrize("shape", [(32, 32), (576, 96), (608, 64), (1536, 32)])
@pytest.mark.parametrize("num_rows", [1, 8, 16, 17, 32, 40, 72, 600])
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_the_product(shape, num_rows, dtype):
    x, weights = make(shape, num_rows, dtype)
    check(multiply(x, arrange(weights), jnp.int32(1)), x, weights[1])


@needs_tiles
@pytest.mark.parametrize("num_live", [1, 130, 300])
def test_several_panels_of_rows(num_live):
    """Few rows of so deep a matrix fill the cache: w is read for four groups at a time."""
    x, weights = make((5504, 64), 300, "float32")
    got = multiply(x, arrange(weights), 1, jnp.int32(num_live))
    check(got[:num_live], x[:num_live], weights[1], norm=8e-7)
    np.testing.assert_array_equal(got[-(-num_live // 32) * 32 :], 0)


@needs_tiles
@pytest.mark.parametrize("scale", [2.0**-60, 2.0**60])
def test_float32_of_any_size(scale):
    """The small parts of a number are as exact as the number; far apart in one sum, too."""
    x, weights = make((64, 64), 8, "float32")
    x = x * jnp.where(jnp.arange(64) % 2, scale, 1.0)
    check(multiply(x, arrange(weights), 1), x, weights[1])


@needs_tiles
def test_numbers_of_24_bits_are_multiplied_exactly():
    """Where nothing is left out: a number of three parts times one of a single part."""
    rng = np.random.default_rng(0)
    x = np.zeros((8, 32), np.float32)
    x[:, 3] = rng.integers(2**23, 2**24, 8) * rng.choice([-1, 1], 8)
    weights = np.zeros((1, 32, 32), np.float32)
    weights[0, 3] = 2.0 ** rng.integers(-20, 20, 32)
    got = multiply(jnp.asarray(x), arrange(jnp.asarray(weights)), 0)
    np.testing.assert_array_equal(got, x[:, 3:4] * weights[0, 3])


@needs_tiles
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype):
    """To the bit, in any number of rows, with NaN beside it, on any thread."""
    x, weights = make((640, 96), 600, dtype)
    weights = arrange(weights)
    whole = np.asarray(multiply(x, weights, 1))
    for num_rows in (8, 24, 100):
        for start in range(0, 600, 3 * num_rows):
            part = multiply(x[start : start + num_rows], weights, 1)
            np.testing.assert_array_equal(part, whole[start : start + num_rows])
    poisoned = np.asarray(multiply(x.at[3::5].set(jnp.nan), weights, 1))
    keep = [i for i in range(600) if i % 5 != 3]
    np.testing.assert_array_equal(poisoned[keep], whole[keep])
    assert np.isnan(poisoned[3::5]).all()


@needs_tiles
@pytest.mark.parametrize("num_rows", [8, 32, 600])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_live_are_theirs_or_0(num_rows, dtype):
    x, weights = make((64, 96), num_rows, dtype)
    weights = arrange(weights)
    whole = np.asarray(multiply(x, weights, 1))
    for num_live in (0, 1, 7, 16, 31, 32, 33, 599, 700):
        got = np.asarray(multiply(x, weights, 1, jnp.int32(num_live)))
        np.testing.assert_array_equal(got[:num_live], whole[:num_live])
        rest = got[num_live:]
        assert ((rest == 0) | (rest == whole[num_live:])).all()
        np.testing.assert_array_equal(got[-(-num_live // 32) * 32 :], 0)


def test_arranged_weights_are_the_same_weights():
    weights = jnp.arange(2 * 32 * 2 * 3 * 16, dtype=jnp.float32).reshape(2, 32, 2, 3, 16)
    arranged = arrange(weights)
    assert arranged.shape == weights.shape and arranged.dtype == jnp.float32
    assert arranged.columns.shape == (2, 3, 32, 32)
    flat = weights.reshape(2, 32, 96)
    for column in range(3):
        np.testing.assert_array_equal(
            arranged.columns[:, column], flat[:, :, 32 * column : 32 * column + 32]
        )


@needs_tiles
def test_outputs_of_several_axes():
    weights = jnp.arange(2 * 32 * 2 * 3 * 16, dtype=jnp.float32).reshape(2, 32, 2, 3, 16)
    got = multiply(jnp.eye(32), arrange(weights), 1)
    assert got.shape == (32, 2, 3, 16)
    np.testing.assert_array_equal(got, weights[1])  # these numbers have fewer than 16 bits


@needs_tiles
def test_weights_are_read_where_they_lie():
    """In a scan over layers: no copy of a layer's weights."""
    weights = jax.eval_shape(arrange, jax.ShapeDtypeStruct((20, 512, 512), jnp.float32))

    def run(x, weights):
        def layer(x, index):
            return stacked_product(x, weights, index) * 0.01, None

        return jax.lax.scan(layer, x, jnp.arange(20))[0]

    compiled = jax.jit(run).lower(jax.ShapeDtypeStruct((8, 512), jnp.float32), weights).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 512 * 512 * 4 / 4


@needs_tiles
@pytest.mark.parametrize(("layer", "read"), [(-3, 0), (7, 2)])
def test_a_layer_outside_is_the_nearest(layer, read):
    x, weights = make((64, 96), 8, "float32")
    weights = arrange(jnp.nan_to_num(weights).at[0].set(1.0).at[2].set(2.0))
    np.testing.assert_array_equal(multiply(x, weights, layer), multiply(x, weights, read))


@needs_tiles
def test_under_vmap():
    x, weights = make((64, 96), 8, "float32")
    weights = arrange(weights)
    both = jax.vmap(lambda x: stacked_product(x, weights, 1))(jnp.stack([x, 2 * x]))
    np.testing.assert_array_equal(both[0], multiply(x, weights, 1))
    np.testing.assert_array_equal(both[1], multiply(2 * x, weights, 1))


@needs_tiles
def test_what_does_not_fit_is_refused():
    x, weights = make((64, 96), 8, "float32")
    weights = arrange(weights)
    with pytest.raises(TypeError, match=r"^x must be float32 like the weights, got bfloat16$"):
        stacked_product(x.astype(jnp.bfloat16), weights, 0)
    for wrong in (x[:, :60], x[0]):
        with pytest.raises(ValueError, match=r"^x must be \[T, 64\]"):
            stacked_product(wrong, weights, 0)


def test_what_is_arranged(monkeypatch):
    monkeypatch.setattr(llvm_tiles, "has_tiles", lambda: True)
    for dtype in DTYPES:
        assert arranges((2, 64, 96), dtype) and arranges((2, 64, 3, 32), dtype)
        assert not arranges((2, 48, 96), dtype) and not arranges((2, 64, 80), dtype)
        assert not arranges((2, 0, 96), dtype) and not arranges((2, 64, 0), dtype)
        assert has_head((96, 64), dtype)
        assert not has_head((96, 48), dtype) and not has_head((90, 64), dtype)
    assert not arranges((2, 64, 96), "float16") and not has_head((96, 64), "float16")
    weights = arrange(jnp.zeros((2, 64, 96)))
    assert all(has_kernel(num_rows, weights) for num_rows in (1, 12, 2000))
    with monkeypatch.context() as patch:
        patch.setattr(products.llvm, "missing", lambda: "anything")
        assert not arranges((2, 64, 96), "float32") and not has_head((96, 64), "float32")
    monkeypatch.setattr(llvm_tiles, "has_tiles", lambda: False)
    assert not arranges((2, 64, 96), "float32") and not has_head((96, 64), "float32")


@pytest.mark.parametrize("hidden", ["amx-tile", "amx-bf16", "avx512bf16"])
def test_a_machine_that_hides_a_part_of_it_has_none(hidden, monkeypatch):
    """Kernels round to bfloat16 by AVX512-BF16: LLVM ends the process where it may not use that."""
    features = dict.fromkeys(("amx-tile", "amx-bf16", "avx512bf16"), True) | {hidden: False}
    monkeypatch.setattr(llvm_tiles.binding, "get_host_cpu_features", lambda: features)
    assert not llvm_tiles.has_tiles.__wrapped__()


def test_no_rows_and_other_devices():
    weights, table = arrange(jnp.zeros((2, 64, 3, 32))), Table(jnp.zeros((96, 64)))
    assert stacked_product(jnp.zeros((0, 64)), weights, 0).shape == (0, 3, 32)
    assert head_product(jnp.zeros((0, 64)), table).shape == (0, 96)
    gpu = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        with pytest.raises(ValueError, match=r"^weights must be as loaded for gpu"):
            stacked_product(jnp.zeros((8, 64)), weights, 0)
        with pytest.raises(ValueError, match=r"^the table must be as loaded for gpu"):
            head_product(jnp.zeros((8, 64)), table)


@needs_tiles
@pytest.mark.parametrize("sizes", [(32, 32), (96, 576), (4096, 64)])
@pytest.mark.parametrize("num_rows", [1, 8, 16, 17, 32, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_the_head(sizes, num_rows, dtype):
    x, table = make_table(*sizes, num_rows, dtype)
    check(head(x, table), x, table.rows.T)


@needs_tiles
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_head_does_not_depend_on_the_others(dtype):
    x, table = make_table(1024, 96, 32, dtype)
    whole = np.asarray(head(x, table))
    for num_rows in (1, 8, 20):
        np.testing.assert_array_equal(head(x[:num_rows], table), whole[:num_rows])
    poisoned = np.asarray(head(x.at[5].set(jnp.nan), table))
    np.testing.assert_array_equal(np.delete(poisoned, 5, 0), np.delete(whole, 5, 0))
    assert np.isnan(poisoned[5]).all()


@needs_tiles
def test_a_head_refuses_what_does_not_fit():
    x, table = make_table(64, 96, 8, "float32")
    with pytest.raises(TypeError, match=r"^x must be float32 like the table, got bfloat16$"):
        head_product(x.astype(jnp.bfloat16), table)
    for wrong in (x[:, :60], x[0]):
        with pytest.raises(ValueError, match=r"^x must be \[R, 96\]"):
            head_product(wrong, table)
