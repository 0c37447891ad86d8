"""Automatic prefix caching: blocks found by their contents, kept while nobody needs the room."""

import itertools

import numpy as np
import pytest

from jpaged.memory import BlockManager, NoFreeBlocksError
from jpaged.memory.prefix_cache import PrefixCache, hash_block


def constant_hash(parent_hash, tokens, salt):
    return 7


def make_manager(num_blocks=8, block_size=4, max_sequences=8, **kwargs):
    return BlockManager(
        num_blocks, block_size, max_sequences, 8, enable_prefix_caching=True, **kwargs
    )


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def tokens(n, start=0):
    return np.arange(start, start + n, dtype=np.int32)


def compute(manager, prompt, salt=None):
    """A sequence that is allocated, computed and published; its slot."""
    slot = manager.allocate(len(prompt), manager.match_prefix(prompt, salt))
    manager.publish(slot, prompt, len(prompt), salt)
    manager.check_integrity()
    return slot


def test_the_same_beginning_is_shared():
    manager = make_manager()
    first = compute(manager, tokens(10))
    blocks = manager.match_prefix(np.concatenate([tokens(8), tokens(5, 100)]))
    assert blocks.dtype == np.int32
    assert blocks.tolist() == manager.block_table(first)[:2].tolist()
    assert manager.blocks_needed_new(13, blocks) == 2  # both in use
    second = manager.allocate(13, blocks)
    assert manager.block_table(second)[:2].tolist() == blocks.tolist()
    assert manager.num_tokens[second] == 13
    assert (manager.num_used_blocks, manager.num_shared_blocks) == (5, 2)
    manager.check_integrity()


def test_only_full_blocks_enter_the_cache():
    """vllm 5188."""
    manager = make_manager()
    slot = manager.allocate(8)
    manager.publish(slot, tokens(8), 7)
    assert len(manager.match_prefix(tokens(20))) == 1
    manager.publish(slot, tokens(8), 8)
    assert len(manager.match_prefix(tokens(20))) == 2
    manager.append(slot, 3)
    manager.publish(slot, tokens(11), 11)
    assert len(manager.match_prefix(tokens(20))) == 2
    manager.free(slot)
    assert manager.num_cached_blocks == 2  # the third is empty again
    manager.check_integrity()


@pytest.mark.parametrize(
    ("num_tokens", "found"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)]
)
def test_one_token_is_left_to_compute(num_tokens, found):
    """neuralmagic/vllm 92: a prompt cached to its last token."""
    manager = make_manager()
    slot = compute(manager, tokens(12))
    prompt = tokens(num_tokens)
    assert len(manager.match_prefix(prompt)) == found
    with pytest.raises(ValueError, match=r"num_tokens must be >= 13, after 3 prefix_blocks, got"):
        manager.allocate(12, manager.block_table(slot))


def test_a_token_depends_on_all_before_it():
    manager = make_manager()
    compute(manager, ids(1, 1, 1, 1, 2, 2, 2, 2))
    assert len(manager.match_prefix(ids(2, 2, 2, 2, 9))) == 0
    assert len(manager.match_prefix(ids(3, 3, 3, 3, 2, 2, 2, 2, 9))) == 0
    assert len(manager.match_prefix(ids(1, 1, 1, 1, 2, 2, 2, 3, 9))) == 1


@pytest.mark.parametrize("hash_block", [hash_block, constant_hash])
def test_colliding_hashes_serve_nobody_elses_blocks(hash_block):
    """vllm 12621."""
    manager = make_manager(num_blocks=20, hash_block=hash_block)
    prompts = [
        ids(1, 2, 3, 4, 5, 6, 7, 8, 9),
        ids(1, 2, 3, 4, 1, 2, 3, 4, 9),
        ids(5, 6, 7, 8, 5, 6, 7, 8, 9),
    ]
    slots = [compute(manager, prompt) for prompt in prompts]
    salted = compute(manager, prompts[0], "a")
    for prompt, slot in zip(prompts, slots):
        expected = manager.block_table(slot)[:2].tolist()
        assert manager.match_prefix(prompt).tolist() == expected
    expected = manager.block_table(salted)[:2].tolist()
    assert manager.match_prefix(prompts[0], "a").tolist() == expected
    assert len(manager.match_prefix(ids(5, 6, 7, 8, 1, 2, 3, 4, 9))) == 1
    assert len(manager.match_prefix(ids(9, 9, 9, 9, 9))) == 0
    manager.check_integrity()


@pytest.mark.parametrize("hash_block", [hash_block, constant_hash])
def test_salts_share_nothing(hash_block):
    manager = make_manager(num_blocks=12, hash_block=hash_block)
    slots = [compute(manager, tokens(9), salt) for salt in (None, "", "a")]
    assert manager.num_shared_blocks == 0
    blocks = [manager.block_table(slot).tolist() for slot in slots]
    assert len(set(itertools.chain(*blocks))) == 9
    for salt, table in zip((None, "", "a"), blocks):
        assert manager.match_prefix(tokens(9), salt).tolist() == table[:2]
    assert len(manager.match_prefix(tokens(9), "b")) == 0
    with pytest.raises(ValueError, match="salt must be 'a' as before, got 'b'"):
        manager.publish(slots[2], tokens(9), 9, "b")


def test_what_is_cached_already_takes_the_place_of_what_was_computed_again():
    """Two of one prompt that started in one step: nobody found anything."""
    manager = make_manager()
    slots = [manager.allocate(10), manager.allocate(10)]
    kept = manager.block_table(slots[0]).tolist()
    for slot in slots:
        manager.publish(slot, tokens(10), 10)
    assert manager.block_table(slots[0]).tolist() == kept
    assert manager.block_table(slots[1])[:2].tolist() == kept[:2]
    assert manager.block_table(slots[1])[2] != kept[2]
    assert (manager.num_used_blocks, manager.num_cached_blocks) == (4, 0)
    manager.check_integrity()


def test_publishing_twice_changes_nothing():
    manager = make_manager()
    slot = compute(manager, tokens(9))
    before = manager.block_table(slot).tolist()
    manager.publish(slot, tokens(9), 9)
    manager.publish(slot, tokens(9), 5)  # nor does publishing less
    assert manager.block_table(slot).tolist() == before
    (fork,) = manager.fork(slot)
    manager.publish(fork, tokens(9), 9)
    manager.check_integrity()
    for each in (slot, fork):
        manager.free(each)
    assert manager.num_cached_blocks == 2
    manager.check_integrity()


def test_publishing_costs_what_is_new():
    hashed = []

    def counting_hash(parent_hash, tokens, salt):
        hashed.append(tokens)
        return hash_block(parent_hash, tokens, salt)

    manager = BlockManager(64, 4, 2, 64, enable_prefix_caching=True, hash_block=counting_hash)
    sequence = tokens(256)
    slot = manager.allocate(1)
    for n in range(1, 200):
        manager.publish(slot, sequence, n)
        manager.append(slot, 1)
    assert len(hashed) == 199 // 4
    prefix = manager.match_prefix(sequence[:100])
    hashed.clear()
    other = manager.allocate(101, prefix)
    manager.publish(other, sequence, 101)  # what was found is not looked up again
    assert len(hashed) == 1
    manager.free(slot)
    (fork,) = manager.fork(other)
    manager.publish(fork, sequence, 101)
    assert len(hashed) == 1


def test_who_asks_again_looks_up_what_is_new_or_gone():
    hashed = []

    def counting_hash(parent_hash, tokens, salt):
        hashed.append(tokens)
        return hash_block(parent_hash, tokens, salt)

    manager = BlockManager(64, 4, 8, 64, enable_prefix_caching=True, hash_block=counting_hash)
    first = compute(manager, tokens(101))
    chain = []

    def ask(n):
        hashed.clear()
        found = manager.match_prefix(tokens(n), None, chain)
        looked_up = len(hashed)
        assert found.tolist() == manager.match_prefix(tokens(n)).tolist()
        return len(found), looked_up

    assert ask(120) == (25, 26)
    assert ask(120) == (25, 1)  # whether there is one more by now
    second = manager.allocate(120, manager.match_prefix(tokens(120)))
    manager.publish(second, tokens(120), 120)
    assert ask(120) == (29, 4)
    assert ask(121) == (30, 1)
    assert ask(81) == (20, 0)
    assert ask(121) == (30, 10)
    for slot in (first, second):
        manager.free(slot)
    manager.allocate(256 - 15 * 4)  # takes the tail
    assert ask(121) == (15, 1)
    manager.reset_prefix_cache()
    assert ask(121) == (0, 1)


def test_a_block_that_holds_other_tokens_by_now_is_not_found_again():
    manager = make_manager(num_blocks=3)
    manager.free(compute(manager, tokens(9)))
    chain = []
    before = manager.match_prefix(tokens(9), None, chain)
    manager.free(compute(manager, tokens(9, 100)))
    assert set(before.tolist()) & set(manager.match_prefix(tokens(9, 100)).tolist())
    assert manager.match_prefix(tokens(9), None, chain).tolist() == []
    manager.free(compute(manager, tokens(9)))  # and comes back, elsewhere perhaps
    assert len(manager.match_prefix(tokens(9), None, chain)) == 2


def test_unused_blocks_are_free_and_stay_until_they_are_needed():
    manager = make_manager(num_blocks=4)
    manager.free(compute(manager, tokens(9)))
    assert (manager.num_free_blocks, manager.num_cached_blocks) == (4, 2)
    assert manager.num_used_blocks == 0
    manager.allocate(8)  # there are two empty blocks: nothing is evicted
    assert manager.num_cached_blocks == 2
    prefix = manager.match_prefix(tokens(9))
    assert len(prefix) == 2
    assert manager.blocks_needed_new(9, prefix) == 3  # those that nobody uses count as free
    with pytest.raises(NoFreeBlocksError, match="3 blocks do not fit in the 2 free ones"):
        manager.allocate(9, prefix)
    assert manager.num_cached_blocks == 2
    manager.check_integrity()
    slot = manager.allocate(5, prefix[:1])  # the one behind it makes room
    assert manager.num_cached_blocks == 0
    assert manager.num_free_blocks == 0
    assert manager.block_table(slot).tolist() == prefix.tolist()
    manager.check_integrity()


def test_least_recently_used_first_tails_before_heads():
    manager = make_manager(num_blocks=6)
    old, new = compute(manager, tokens(8)), compute(manager, tokens(8, 100))
    for slot in (old, new):
        manager.free(slot)
    manager.free(compute(manager, tokens(5)))  # the head of the old one is used once more

    def found():
        return len(manager.match_prefix(tokens(9))), len(manager.match_prefix(tokens(9, 100)))

    assert (found(), manager.num_cached_blocks) == ((2, 2), 4)
    for expected in ((2, 2), (2, 2), (1, 2), (1, 1), (1, 0), (0, 0)):
        manager.allocate(1)
        assert found() == expected
        manager.check_integrity()


def test_a_head_takes_its_tail_with_it():
    """A fork from before its sequence was published uses the tail alone, the head is another's."""
    manager = make_manager(num_blocks=6)
    early = compute(manager, tokens(4))
    slot = manager.allocate(8)
    (fork,) = manager.fork(slot)
    manager.publish(slot, tokens(8), 8)
    assert manager.block_table(slot)[0] == manager.block_table(early)[0]
    assert manager.block_table(fork)[0] != manager.block_table(early)[0]
    for each in (early, slot):
        manager.free(each)
    assert len(manager.match_prefix(tokens(9))) == 2
    for _ in range(4):
        manager.allocate(1)
    assert len(manager.match_prefix(tokens(9))) == 0
    manager.check_integrity()
    manager.publish(fork, tokens(8), 8)  # both are its own now
    assert manager.match_prefix(tokens(9)).tolist() == manager.block_table(fork).tolist()
    manager.check_integrity()


def test_a_match_that_is_no_longer_there_is_refused():
    manager = make_manager(num_blocks=3)
    manager.free(compute(manager, tokens(9)))
    prefix = manager.match_prefix(tokens(9))
    assert len(prefix) == 2
    stale = "prefix_blocks must be a chain of cached blocks"
    for wrong in (prefix[::-1], prefix[1:], ids(*prefix, 2)):
        with pytest.raises(ValueError, match=stale):
            manager.allocate(13, wrong)
    manager.free(manager.allocate(8))  # takes the tail
    with pytest.raises(ValueError, match=stale):
        manager.allocate(9, prefix)
    assert manager.num_used_blocks == 0
    manager.check_integrity()


def test_a_preempted_sequence_finds_its_own_blocks():
    manager = make_manager(num_blocks=4)
    slot = compute(manager, tokens(10))
    blocks = manager.block_table(slot).tolist()
    manager.free(slot)
    prefix = manager.match_prefix(tokens(10))
    assert prefix.tolist() == blocks[:2]
    slot = manager.allocate(10, prefix)
    assert manager.block_table(slot)[:2].tolist() == blocks[:2]
    manager.check_integrity()


def test_swapped_out_blocks_stay_in_the_cache_and_come_back_to_it():
    manager = make_manager(num_swap_blocks=4)
    slot = compute(manager, tokens(10))
    blocks = manager.block_table(slot).tolist()
    swapped = manager.swap_out([slot])
    manager.take_copies()
    assert manager.match_prefix(tokens(10)).tolist() == blocks[:2]
    (slot,) = manager.swap_in(swapped)
    manager.take_copies()
    assert not set(manager.block_table(slot).tolist()) & set(blocks[:2])
    manager.publish(slot, tokens(10), 10)  # both are cached: its copies are given back
    assert manager.block_table(slot)[:2].tolist() == blocks[:2]
    assert manager.num_used_blocks == 3
    manager.check_integrity()


def test_hits_are_counted():
    manager = make_manager()
    compute(manager, tokens(9))
    assert (manager.prefix_query_tokens, manager.prefix_hit_tokens) == (9, 0)
    prefix = manager.match_prefix(tokens(9))
    manager.match_prefix(tokens(9))  # looking does not count
    manager.allocate(9, prefix)
    assert (manager.prefix_query_tokens, manager.prefix_hit_tokens) == (18, 8)
    manager.allocate(5, prefix[:1], num_query_tokens=30)  # a first chunk
    assert (manager.prefix_query_tokens, manager.prefix_hit_tokens) == (48, 12)
    manager.allocate(9, prefix, num_query_tokens=0)  # another one of the same look-up
    assert (manager.prefix_query_tokens, manager.prefix_hit_tokens) == (48, 12)


def test_off_unless_asked_for():
    manager = BlockManager(8, 4, 4, 8)
    slot = manager.allocate(8)
    manager.publish(slot, tokens(8), 8)
    assert len(manager.match_prefix(tokens(9))) == 0
    with pytest.raises(ValueError, match="prefix_blocks"):
        manager.allocate(9, manager.block_table(slot))
    manager.free(slot)
    assert (manager.num_cached_blocks, manager.prefix_query_tokens) == (0, 0)
    manager.check_integrity()


def test_bad_arguments_are_refused():
    manager = make_manager()
    slot = manager.allocate(6)
    for given, num_computed, most in ((8, 7, 6), (5, 6, 5), (8, -1, 6)):
        with pytest.raises(ValueError, match=rf"in \[0, {most}\], got {num_computed}"):
            manager.publish(slot, tokens(given), num_computed)
    with pytest.raises(ValueError, match="holds a sequence"):
        manager.publish(slot + 1, tokens(6), 6)
    (fork,) = manager.fork(slot)
    manager.publish(slot, tokens(6), 6)
    with pytest.raises(ValueError, match="must hold the tokens and salt that it was cached with"):
        manager.publish(fork, tokens(6, 1), 6)
    manager.check_integrity()


@pytest.mark.parametrize("damage", ["not full", "not kept", "kept", "moved", "orphan", "twice"])
def test_integrity_check_sees_damage(damage):
    manager = make_manager()
    slot = compute(manager, tokens(8))
    cache, table = manager._cache, manager.block_table(slot).tolist()
    if damage == "not full":
        manager._published[slot] = None
        manager.num_tokens[slot] = 7
    elif damage == "not kept":
        manager.pool.kept[table[0]] = False
    elif damage == "kept":
        manager.pool.kept[manager.allocate(1)] = True
        manager.pool.kept[:] = True
    elif damage == "moved":
        manager.tables[slot, :2] = table[::-1]
    elif damage == "orphan":
        del cache._by_block[table[0]]
    else:
        cache.entry(table[1]).parent = None
    with pytest.raises(AssertionError):
        manager.check_integrity()


def test_the_hash_covers_parent_tokens_and_salt():
    base = hash_block(1, b"abcd", None)
    assert hash_block(1, b"abcd", None) == base
    others = [
        hash_block(2, b"abcd", None),
        hash_block(1, b"abce", None),
        hash_block(1, b"abcd", ""),
    ]
    assert base not in others


def test_a_cache_of_blocks_alone():
    cache = PrefixCache(block_size=2)
    first, second = cache.split(ids(1, 2, 3, 4, 5))
    head = cache.find_or_add(None, first, None, 10)
    tail = cache.find_or_add(head, second, None, 11)
    other = cache.find_or_add(head, first, None, 12)
    assert cache.find_or_add(head, second, None, 13) is tail
    assert [entry.block for entry in cache.match(ids(1, 2, 3, 4), None)] == [10, 11]
    assert [entry.depth for entry in (head, tail, other)] == [1, 2, 2]
    assert (len(cache), cache.entry(11), cache.entry(13)) == (3, tail, None)
    cache.check_integrity()
    assert cache.remove(11) == [11]
    cache.check_integrity()
    assert sorted(cache.remove(10)) == [10, 12]
    assert (len(cache), cache._by_hash) == (0, {})
    cache.check_integrity()
