"""The Triton kernels: every feature, head dim and block size interpreted against the reference, and
with several plans. What they take of a GPU that is not here: test_compile_cover.py."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_kernels
from pallas_kernels import triton
from pallas_kernels.devices import Target, tracing_target
from pallas_kernels.plan import make_plan
from pallas_kernels.triton_tiles import tile_configs

BUCKET = {
    "num_tokens": 40,
    "num_sequences": 8,
    "max_blocks": 10,
    "block_size": 16,
    "num_heads": 6,
    "num_kv_heads": 2,
}
# Decode rows of one and of several query tokens, tiles of more, on and around block edges; rows
# without a context or a query, and padding.
ROWS = [(1, 33), (0, 0), (17, 17), (1, 1), (0, 12), (5, 64), (1, 160), (3, 111)]
RNG = np.random.default_rng(0)
FEATURES = {
    "static_window": 19,
    "window": np.int32(50),
    "soft_cap": 1.5,
    "alibi_slopes": RNG.uniform(0, 0.2, 6).astype(np.float32),
    "sinks": RNG.standard_normal(6, dtype=np.float32),
}


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_alone(name, bucket_type, make_batch, attend, assert_close):
    bucket = bucket_type(**BUCKET)
    batch = make_batch(bucket, ROWS, seed=1)
    keywords = {name: FEATURES[name]}
    expected = attend(*batch.arguments, backend="reference", **keywords)
    plain = attend(*batch.arguments, backend="reference")
    assert not np.allclose(expected[1], plain[1])  # the feature is seen
    got = attend(*batch.arguments, backend="triton", **keywords)
    assert_close(got, expected, bucket.dtype)


def test_the_largest_window_hides_nothing(bucket_type, make_batch, attend):
    batch = make_batch(bucket_type(**BUCKET), ROWS, seed=1)
    batch.context_lens[2] = 5  # less than its 17 query tokens: the first ones see no key
    expected = attend(*batch.arguments, backend="triton")
    got = attend(*batch.arguments, backend="triton", window=np.int32(2**31 - 1))
    for result, wanted in zip(got, expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "num_heads", "dtype"),
    [
        (64, 8, 2, "float16"),
        (80, 32, 8, "bfloat16"),
        (96, 64, 16, "bfloat16"),
        (128, 128, 6, "float32"),
        (256, 16, 2, "bfloat16"),
        (64, 48, 140, "bfloat16"),  # a group larger than a tile
    ],
)
def test_shapes(
    head_dim, block_size, num_heads, dtype, bucket_type, make_batch, attend, assert_close
):
    shape = {"head_dim": head_dim, "block_size": block_size, "num_heads": num_heads}
    max_blocks = -(-160 // block_size)
    bucket = bucket_type(**BUCKET | shape | {"dtype": dtype, "max_blocks": max_blocks})
    batch = make_batch(bucket, ROWS, seed=2)
    batch.q[:] = batch.q * head_dim**-0.5  # scores of usual size under the fixture's scale
    expected = attend(*batch.arguments, backend="reference")
    got = attend(*batch.arguments, backend="triton")
    assert_close(got, expected, dtype)


def plan_for(batch, num_cores, window=None):
    return make_plan(
        batch.query_starts,
        batch.context_lens,
        num_tokens=batch.q.shape[0],
        num_heads=batch.q.shape[1],
        num_kv_heads=batch.kv_pool.shape[3],
        dtype=batch.q.dtype,
        num_cores=num_cores,
        window=window,
    )


def test_plans_give_the_same_result(bucket_type, make_batch, assert_close):
    """Few parts, many, those of what the window shows, and the plan made in the call."""
    shapes = {"max_blocks": 40, "num_blocks": 50, "num_tokens": 16, "num_sequences": 4}
    bucket = bucket_type(**BUCKET | shapes)
    batch = make_batch(bucket, [(1, 600), (2, 333), (9, 70), (1, 5)], seed=3)

    @partial(jax.jit, static_argnames="backend")
    def attend(plan, *arguments, backend):
        return pallas_kernels.paged_attention(
            *arguments, scale=0.4, return_lse=True, plan=plan, window=150, backend=backend
        )

    expected = attend(None, *batch.arguments, backend="reference")
    plans = [plan_for(batch, num_cores) for num_cores in (1, 132)]
    assert [plan.items[5].max() for plan in plans] == [2, 5]
    for plan in [None, *plans, plan_for(batch, 1, window=150)]:
        got = attend(plan, *batch.arguments, backend="triton")
        assert_close(got, expected, bucket.dtype)
    other = make_batch(bucket_type(**BUCKET), ROWS, seed=1)
    with pytest.raises(ValueError, match="plan must be made for 16 tokens of 4 sequences"):
        attend(plan_for(other, 1), *batch.arguments, backend="triton")


def abstract_device(kind):
    device = AbstractDevice(device_kind=kind, platform="gpu", num_cores=132)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def num_kernels(function, *arguments):
    equations = jax.make_jaxpr(function)(*arguments).eqns
    return sum(equation.primitive.name == "pallas_call" for equation in equations)


def test_triton_is_for_nvidia_gpus_and_asked_for_by_name(bucket_type, make_batch):
    batch = make_batch(bucket_type(**BUCKET), ROWS, seed=1)

    def attend(*arguments, backend="triton"):
        return pallas_kernels.paged_attention(*arguments, scale=1.0, backend=backend)

    with abstract_device("NVIDIA H200"):
        assert tracing_target() == Target("gpu", "NVIDIA H200", 132)
        assert num_kernels(attend, *batch.arguments) == 3
    message = "'triton' does not support devices other than NVIDIA GPUs"
    with abstract_device("AMD MI300X"), pytest.raises(NotImplementedError, match=message):
        attend(*batch.arguments)
    large = make_batch(bucket_type(**BUCKET | {"head_dim": 300}), ROWS, seed=1)
    with pytest.raises(NotImplementedError, match="'triton' does not support head dims above 256"):
        attend(*large.arguments)


def test_tiles_pack_query_tokens_while_they_fit():
    features = {"window": False, "soft_cap": False, "alibi": False, "sinks": False}
    tokens = {}
    for group in (1, 3, 4, 8, 16, 70):
        tiles = tile_configs(group, 128, 16, jnp.bfloat16, is_hopper=True, **features)
        tokens[group] = tuple(tile.tokens for tile in tiles)
    assert tokens == {1: (8, 64), 3: (5, 21), 4: (4, 16), 8: (2, 8), 16: (1, 4), 70: (1, 1)}


def test_cases_of_the_resource_table_can_be_traced():
    names = set()
    with abstract_device("NVIDIA H200"):
        for name, fn, arguments, *_ in triton.kernel_cases():
            assert name == "merge_states" or num_kernels(fn, *arguments) >= 1
            names.add(name)
    assert {"write_kv", "copy_blocks", "paged_attention, sinks"} < names
