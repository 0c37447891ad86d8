import jax
import numpy as np

from jpaged.runner.batch import (
    PARAMETERS,
    buffer_size,
    build_batch,
    pack_parameters,
    parameter,
    unpack,
)
from jpaged.runner.buckets import Bucket

BUCKET = Bucket(tokens=16, sequences=8, blocks=16)


def parameters(**given):
    values = dict.fromkeys(PARAMETERS, 0) | given
    return pack_parameters(values)


def test_what_the_host_packs_the_device_unpacks():
    tables = np.arange(6 * 20, dtype=np.int32).reshape(6, 20)
    rows = np.stack([parameters(temperature=0.1 * slot, top_k=slot) for slot in range(6)])
    buffer = build_batch(
        BUCKET,
        token_ids=np.array([7, 1, 2, 3], np.int32),
        lengths=np.array([1, 3], np.int32),
        context_lens=np.array([5, 3], np.int32),
        slots=np.array([4, 1], np.int32),
        num_sampled=1,
        tables=tables,
        parameters=rows,
    )
    assert buffer.shape == (buffer_size(BUCKET),) and buffer.dtype == np.int32
    batch = jax.jit(unpack, static_argnums=1)(buffer, BUCKET)
    assert int(batch.num_sampled) == 1 and int(batch.num_steps) == 1
    assert batch.token_ids.tolist() == [7, 1, 2, 3] + [0] * 12
    assert batch.query_starts.tolist() == [0, 1, 4, 4, 4, 4, 4, 4, 4]
    assert batch.context_lens.tolist() == [5, 3] + [0] * 6
    assert batch.slots.tolist() == [4, 1] + [0] * 6
    np.testing.assert_array_equal(batch.block_tables[:2], tables[[4, 1], :16])
    np.testing.assert_array_equal(batch.block_tables[2:], 0)
    np.testing.assert_array_equal(parameter(batch.parameters, "top_k")[:2], [4, 1])
    np.testing.assert_array_equal(
        parameter(batch.parameters, "temperature")[:2], np.float32([0.1 * 4, 0.1 * 1])
    )


def test_tables_narrower_than_the_bucket_are_padded():
    tables = np.full((2, 3), 9, np.int32)
    buffer = build_batch(
        BUCKET,
        token_ids=np.array([7], np.int32),
        lengths=np.array([1], np.int32),
        context_lens=np.array([1], np.int32),
        slots=np.array([0], np.int32),
        num_sampled=1,
        tables=tables,
        parameters=np.stack([parameters(), parameters()]),
    )
    batch = unpack(buffer, BUCKET)
    assert batch.block_tables[0].tolist() == [9, 9, 9] + [0] * 13


def test_all_64_bits_of_a_seed_travel():
    row = parameters(seed_high=0xFFFFFFFF, seed_low=0x1_8000_0001)
    words = row.view(np.uint32)
    names = list(PARAMETERS)
    assert words[names.index("seed_high")] == 0xFFFFFFFF
    assert words[names.index("seed_low")] == 0x80000001


def test_each_step_gets_a_buffer_of_its_own():
    # The device may still read the buffer of the step before (BUILD_NOTES.md).
    arguments = {
        "token_ids": np.array([7], np.int32),
        "lengths": np.array([1], np.int32),
        "context_lens": np.array([1], np.int32),
        "slots": np.array([0], np.int32),
        "num_sampled": 1,
        "tables": np.zeros((1, 16), np.int32),
        "parameters": parameters()[None],
    }
    first, second = build_batch(BUCKET, **arguments), build_batch(BUCKET, **arguments)
    assert not np.shares_memory(first, second)
