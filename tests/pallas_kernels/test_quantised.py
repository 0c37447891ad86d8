"""Products with quantised weights, with and without a matrix unit, and heads of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import llvm_matmul, llvm_quantised, llvm_tiles, products
from pallas_kernels.products import Table, arrange, has_kernel, head_product, stacked_product
from pallas_kernels.quantised import COLUMNS, GROUP, Quantised, group_bytes, pack, unpack

DTYPES = ["float32", "bfloat16"]
BITS = [4, 8]
# One group and unit of work; odd numbers of both; as many groups as the stack has room for, one
# more.
SHAPES = [(32, 32), (576, 96), (2048, 32), (2080, 64)]

needs_tiles = pytest.mark.skipif(
    not llvm_tiles.has_tiles(),
    reason="needs a CPU with AMX, which only some machines of any leg have",
)
machines = pytest.mark.parametrize(
    "matrix_unit", [pytest.param(True, marks=needs_tiles), False], indirect=True
)
multiply = jax.jit(stacked_product)


@pytest.fixture
def matrix_unit(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(llvm_tiles, "has_tiles", lambda: False)
    jax.clear_caches()  # what was traced for the other kind of machine
    yield request.param
    jax.clear_caches()


def make(shape, bits, dtype, outputs=None, seed=0):
    """Weights of three layers, of which 0 and 2 are NaN."""
    rng = np.random.default_rng(seed)
    depth, width = shape
    groups = []
    for layer in range(3):
        size = (width, depth // GROUP)
        scales = rng.uniform(-0.02, 0.02, size).astype(np.float16)
        offsets = rng.normal(-0.1, 0.1, size).astype(np.float16)
        if layer != 1:
            scales[:] = np.nan
        numbers = rng.integers(0, 2**bits, (width, depth), np.uint8)
        groups.append(pack(numbers, scales, offsets if bits == 4 else None))
    return Quantised(jnp.asarray(np.stack(groups)), outputs or (width,), bits, dtype)


def rows(num_rows, depth, dtype, seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((num_rows, depth)), dtype)


def dense(weights):
    """The same weights as an array of their dtype."""
    return jnp.stack([jnp.asarray(unpack(weights, i), weights.dtype) for i in range(3)])


def check(got, x, matrix, norm):
    """Against float64."""
    wide, matrix = np.asarray(x, np.float64), np.asarray(matrix, np.float64)
    assert got.dtype == jnp.float32 and got.shape == (len(wide), matrix.shape[1])
    assert np.linalg.norm(got - wide @ matrix) <= norm * np.linalg.norm(wide @ matrix)


@pytest.mark.parametrize("bits", BITS)
def test_packing_keeps_every_number(bits):
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 2**bits, (96, 64), np.uint8)
    scales = rng.uniform(0.5, 2, (96, 2)).astype(np.float16)
    offsets = rng.uniform(-9, 9, (96, 2)).astype(np.float16) if bits == 4 else None
    weights = Quantised(jnp.asarray(pack(numbers, scales, offsets))[None], (3, 32), bits, "float32")
    assert weights.shape == (1, 64, 3, 32) and weights.groups.shape[-1] == group_bytes(bits)
    expected = (numbers if bits == 4 else numbers.view(np.int8)).astype(np.float32)
    expected = expected.reshape(96, 2, GROUP) * scales[..., None].astype(np.float32)
    if bits == 4:
        expected = expected + offsets[..., None].astype(np.float32)
    np.testing.assert_array_equal(unpack(weights, 0), expected.reshape(96, 64).T.reshape(64, 3, 32))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_dequantised_to_the_bit(shape, bits, dtype):
    weights = make(shape, bits, dtype)
    got = jax.jit(llvm_quantised.dequantise)(weights, jnp.int32(1))
    np.testing.assert_array_equal(got, dense(weights)[1])


@pytest.mark.parametrize("bits", BITS)
def test_halves_are_rounded_to_even(bits):
    """Weights half-way between two of bfloat16: 1 + 2^-8 down, 1 + 3 2^-8 up."""
    numbers = np.zeros((COLUMNS, GROUP), np.uint8)
    numbers[:, 1::2] = 1
    scale = np.full((COLUMNS, 1), 2.0**-8, np.float16)
    if bits == 4:
        numbers[:, 1::4] = 3
        weights = pack(numbers, scale, np.ones_like(scale))
        expected = np.where(numbers == 3, 1 + 2.0**-6, 1.0)
    else:  # a scale of more digits than bfloat16
        scale = np.full((COLUMNS, 1), 1 + 2.0**-8 + 2.0**-9, np.float16)
        weights = pack(numbers, scale)
        expected = np.where(numbers == 1, 1 + 2.0**-7, 0.0)
    weights = Quantised(jnp.asarray(weights)[None], (COLUMNS,), bits, "bfloat16")
    got = llvm_quantised.dequantise(weights, 0)
    np.testing.assert_array_equal(got.astype(jnp.float32), expected.T)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "bfloat16 widened"])
def test_without_a_matrix_unit_it_is_the_product_with_the_weights(shape, bits, kind, monkeypatch):
    """To the bit, as many rows as the stack holds sums of, fewer, and several panels of them."""
    if kind == "bfloat16 widened":
        monkeypatch.setattr(llvm_matmul, "multiplies_pairs", lambda: False)
    weights = make(shape, bits, kind.split()[0])
    whole = dense(weights)
    for num_rows in (8, 64, 72, 136):
        x = rows(num_rows, shape[0], weights.dtype)
        got = jax.jit(lambda *a: llvm_matmul.multiply(*a, 1, num_rows))(x, weights)  # noqa: B023
        expected = jax.jit(lambda *a: llvm_matmul.multiply(*a, 1, num_rows))(x, whole)  # noqa: B023
        np.testing.assert_array_equal(got, expected)
        check(got, x, whole[1], 1e-6)


@needs_tiles
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", BITS)
def test_with_one_bfloat16_is_the_product_with_the_weights(shape, bits):
    """To the bit, so that a row does not depend on the others either."""
    weights = make(shape, bits, "bfloat16")
    arranged = arrange(dense(weights))
    for num_rows in (1, 8, 16, 17, 32, 33, 100):
        x = rows(num_rows, shape[0], "bfloat16")
        np.testing.assert_array_equal(multiply(x, weights, 1), multiply(x, arranged, 1))


@machines
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_the_product(shape, bits, dtype, matrix_unit):
    weights = make(shape, bits, dtype)
    exact = unpack(weights, 1)  # in float32: one rounding of scale * number + offset
    for num_rows in (1, 4, 5, 8, 16, 17, 40):
        x = rows(num_rows, shape[0], dtype)
        got = multiply(x, weights, jnp.int32(1))
        # As the products with dequantised weights are held to (float32 with a matrix unit: seen
        # 2e-7), in order and by vectors of float32.
        norm = 4e-7 if matrix_unit and dtype == "float32" else 1e-6
        check(got, x, exact if dtype == "float32" else dense(weights)[1], norm)


@needs_tiles
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(576, 96), (2080, 64)])
def test_scaled_results_are_nearer_than_those_of_the_weights(shape, bits):
    """Also of rows with a large mean, and with numbers far larger than the others."""
    weights = make(shape, bits, "float32")
    arranged = arrange(dense(weights))
    exact = np.asarray(unpack(weights, 1), np.float64)
    for mean, outlier in ((0.0, 1.0), (1.0, 1.0), (0.0, 1e4)):
        x = (rows(64, shape[0], "float32") + mean).at[:, 5].multiply(outlier)
        wide = np.asarray(x, np.float64) @ exact
        errors = [np.linalg.norm(multiply(x, w, 1) - wide) for w in (weights, arranged)]
        assert errors[0] <= errors[1]


@machines
def test_what_large_numbers_are_multiplied_by_zero_with_leaves_the_rest_exact(matrix_unit):
    """Numbers of 8 with offsets of -8 scales are zero (Q4_0): they must not come in and go out."""
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 16, (96, 576), np.uint8)
    numbers[:, 5] = 8
    scales = np.full((96, 18), 0.01, np.float16)
    groups = jnp.asarray(pack(numbers, scales, scales * np.float16(-8)))[None]
    weights = Quantised(groups, (96,), 4, "float32")
    x = rows(8, 576, "float32").at[:, 5].set(1e6)
    check(multiply(x, weights, 0), x, unpack(weights, 0), 4e-7 if matrix_unit else 1e-6)


@machines
@pytest.mark.parametrize("bits", BITS)
def test_a_row_does_not_depend_on_the_others(bits, matrix_unit):
    """To the bit, in any number of rows, with NaN beside it, on any thread."""
    weights = make((640, 96), bits, "float32")
    x = rows(600, 640, "float32")
    whole = np.asarray(multiply(x, weights, 1))
    for num_rows in (1, 4, 8, 16, 24, 100):
        for start in range(0, 600, 90):
            part = multiply(x[start : start + num_rows], weights, 1)
            np.testing.assert_array_equal(part, whole[start : start + num_rows])
    poisoned = np.asarray(multiply(x.at[3::5].set(jnp.nan), weights, 1))
    keep = [i for i in range(600) if i % 5 != 3]
    np.testing.assert_array_equal(poisoned[keep], whole[keep])
    assert np.isnan(poisoned[3::5]).all()


@machines
@pytest.mark.parametrize("num_rows", [4, 8, 32, 600])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_live_are_theirs_or_0(num_rows, dtype, matrix_unit):
    x, weights = rows(num_rows, 64, dtype), make((64, 96), 4, dtype)
    whole = np.asarray(multiply(x, weights, 1))
    for num_live in (0, 1, 7, 16, 31, 32, 33, 599, 700):
        got = np.asarray(multiply(x, weights, 1, jnp.int32(num_live)))
        np.testing.assert_array_equal(got[:num_live], whole[:num_live])
        rest = got[num_live:]
        assert ((rest == 0) | (rest == whole[num_live:])).all()


@needs_tiles
def test_several_panels_of_rows():
    """Few rows of so deep a matrix fill the cache: it is read for some of them at a time."""
    weights, x = make((5504, 64), 4, "float32"), rows(300, 5504, "float32")
    whole = np.asarray(multiply(x, weights, 1))
    check(whole, x, unpack(weights, 1), 1e-6)
    for num_live in (1, 130):
        got = multiply(x, weights, 1, jnp.int32(num_live))
        np.testing.assert_array_equal(got[:num_live], whole[:num_live])


@machines
def test_outputs_of_several_axes(matrix_unit):
    weights = make((32, 96), 4, "float32", outputs=(2, 3, 16))
    got = multiply(jnp.eye(32), weights, 1)
    assert got.shape == (32, 2, 3, 16)
    np.testing.assert_allclose(got, unpack(weights, 1), rtol=0, atol=2e-7)


@machines
@pytest.mark.parametrize(("layer", "read"), [(-3, 0), (7, 2)])
def test_a_layer_outside_is_the_nearest(layer, read, matrix_unit):
    one = make((64, 96), 4, "float32").groups[1]
    groups = jnp.stack([one, one + 1, one.at[..., :64].set(7)])
    weights = Quantised(groups, (96,), 4, "float32")
    x = rows(8, 64, "float32")
    np.testing.assert_array_equal(multiply(x, weights, layer), multiply(x, weights, read))


@machines
def test_where_python_ints_are_of_64_bits(matrix_unit):
    x, weights = rows(8, 64, "float32"), make((64, 96), 4, "float32")
    expected = stacked_product(x, weights, 1, 5)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(stacked_product(x, weights, 1, 5), expected)


@machines
def test_is_the_head(matrix_unit):
    """Of a table [V, E] beside which its transpose lies, quantised."""
    layers = make((64, 96), 8, "float32")
    quantised = dataclasses.replace(layers, groups=layers.groups[1:2])
    table = Table(None, quantised)
    assert table.shape == (96, 64) and table.dtype == jnp.float32
    x = rows(40, 64, "float32")
    got = jax.jit(head_product)(x, table)
    check(got, x, unpack(layers, 1), 1e-6)
    np.testing.assert_array_equal(jax.jit(head_product)(x[:3], table), got[:3])
    assert head_product(x[:0], table).shape == (0, 96)


def test_what_does_not_fit_is_refused():
    x, weights = rows(8, 64, "float32"), make((64, 96), 4, "float32")
    assert all(has_kernel(num_rows, weights) for num_rows in (1, 12, 2000))
    with pytest.raises(TypeError, match=r"^x must be float32 like the weights, got bfloat16$"):
        stacked_product(x.astype(jnp.bfloat16), weights, 0)
    with pytest.raises(ValueError, match=r"^x must be \[T, 64\]"):
        stacked_product(x[:, :32], weights, 0)
    wrong = [
        dataclasses.replace(weights, bits=8),
        dataclasses.replace(weights, outputs=(64,)),
        dataclasses.replace(weights, groups=weights.groups.astype(jnp.int8)),
    ]
    for other in wrong:
        with pytest.raises(ValueError, match=r"^groups of weights \(3, 64, \d+\) of \d bits must"):
            stacked_product(x, other, 0)
    gpu = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    with (
        jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)),
        pytest.raises(ValueError, match=r"^weights must be as loaded for gpu"),
    ):
        stacked_product(jnp.zeros((8, 64)), weights, 0)


def test_who_reads_them(monkeypatch):
    assert products.reads_quantised(64, 96)
    assert not products.reads_quantised(48, 96) and not products.reads_quantised(64, 80)
    monkeypatch.setattr(products.llvm, "missing", lambda: "anything")
    assert not products.reads_quantised(64, 96)
