import pytest

from jpaged.runner.buckets import (
    TABLE_GROUP,
    choose_bucket,
    decode_buckets,
    make_buckets,
    table_width,
)


@pytest.mark.parametrize("tokens", [1, 8, 9, 31, 64, 100, 2048, 8192])
@pytest.mark.parametrize("sequences", [1, 7, 256])
@pytest.mark.parametrize("blocks", [16, 512, 8192])
def test_every_step_within_the_limits_has_a_bucket(tokens, sequences, blocks):
    buckets = make_buckets(tokens, sequences, blocks)
    assert len(set(buckets)) == len(buckets) <= 60
    for count in {1, 2, tokens // 2 or 1, tokens}:
        for rows in {1, min(count, sequences)}:
            for width in {1, blocks}:
                bucket = choose_bucket(buckets, count, rows, width)
                assert bucket.tokens >= count and bucket.sequences >= rows
                assert bucket.blocks >= width
                # Padding is bounded: no bucket is more than half again what was asked for.
                assert bucket.tokens <= max(8, 1.5 * count + 8)


def test_no_bucket_for_a_step_beyond_the_limits():
    buckets = make_buckets(64, 8, 16)
    with pytest.raises(ValueError, match="65 tokens"):
        choose_bucket(buckets, 65, 1, 1)


def test_dimensions_are_multiples_of_eight():
    assert all(b.tokens % 8 == 0 and b.sequences % 8 == 0 for b in make_buckets(5, 3, 16))


@pytest.mark.parametrize("sequences", [1, 7, 100, 256])
@pytest.mark.parametrize("blocks", [16, 8192])
def test_decodes_find_their_bucket_among_the_decode_buckets(sequences, blocks):
    buckets = make_buckets(2048, sequences, blocks)
    chosen = {
        choose_bucket(buckets, count, count, width)
        for count in range(1, sequences + 1)
        for width in (1, blocks)
    }
    assert chosen <= set(decode_buckets(buckets))
    most = max(bucket.sequences for bucket in buckets)
    assert all(b.tokens <= max(8, 1.5 * most) for b in decode_buckets(buckets))


def test_default_settings_need_few_buckets():
    assert len(make_buckets(2048, 256, table_width(8192, 16))) <= 16


def test_table_width_is_a_multiple_of_the_group():
    assert table_width(8192, 16) == 512
    assert table_width(100, 16) == TABLE_GROUP
    assert table_width(17, 1) == 2 * TABLE_GROUP
