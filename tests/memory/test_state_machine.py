"""Any order of operations on a tiny block manager, against a model that copies everything."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jpaged.memory import BlockManager, NoFreeBlocksError, Swapped
from jpaged.memory.prefix_cache import hash_block

NUM_BLOCKS, BLOCK_SIZE, ROWS, COLUMNS, SWAP_BLOCKS = 10, 3, 6, 4, 6
EMPTY = -1  # in memory that holds nothing

picks = st.integers(0, 99)
ends_step = st.booleans()
bits = st.integers(0, 2**13 - 1)


@dataclasses.dataclass(eq=False)
class ModelSequence:
    """A sequence by itself. A token's value, which stands for its keys and values, is unique to
    the salt and all tokens up to it."""

    salt: str | None
    tokens: list[int] = dataclasses.field(default_factory=list)
    values: list[int] = dataclasses.field(default_factory=list)
    written: int = 0  # tokens whose values are in memory, or will be before they are read

    def copy(self) -> ModelSequence:
        return ModelSequence(self.salt, [*self.tokens], [*self.values], self.written)


class ManagerAgainstCopies(RuleBasedStateMachine):
    """Memory is simulated: arrays of values, moved and written in the engine's order at the end of
    each step. What a sequence reads through its table must be the model's own copy."""

    events: ClassVar[Counter[str]] = Counter()

    @initialize(collide=st.booleans(), publishes=st.booleans())
    def start(self, collide, publishes):
        self.publishes = publishes  # everything after each step, as the scheduler does
        self.manager = BlockManager(
            NUM_BLOCKS,
            BLOCK_SIZE,
            ROWS,
            COLUMNS,
            num_swap_blocks=SWAP_BLOCKS,
            enable_prefix_caching=True,
            hash_block=(lambda *_: 7) if collide else hash_block,
        )
        self.device = np.full((NUM_BLOCKS, BLOCK_SIZE), EMPTY)
        self.host = np.full((SWAP_BLOCKS, BLOCK_SIZE), EMPTY)
        self.sequences: dict[int, ModelSequence] = {}
        self.swapped: dict[Swapped, list[ModelSequence]] = {}
        self.swap_outs: list[Swapped] = []  # of this step
        self.swap_ins: list[Swapped] = []
        self.numbers: dict[tuple, int] = {}  # what each value stands for
        self.before: dict[int, int | str | None] = {}  # the value before each, or the salt
        self.past: list[tuple[str | None, list[int]]] = []
        self.asked: dict[str | None, tuple[list[int], list]] = {}  # tokens, chain of the last match
        self.cached: dict[int, int] = {}  # the value of the last token of each published block
        self.line: list[int] = []  # cached blocks, the next to be emptied first

    # The model's own arithmetic.

    def extend(self, sequence: ModelSequence, tokens: list[int]) -> None:
        for token in tokens:
            before = sequence.values[-1] if sequence.values else sequence.salt
            number = self.numbers.setdefault((before, token), len(self.numbers))
            self.before[number] = before
            sequence.values.append(number)
            sequence.tokens.append(token)

    def table(self, slot: int) -> list[int]:
        return self.manager.block_table(slot).tolist()

    def owners(self) -> Counter[int]:
        return Counter(block for slot in self.sequences for block in self.table(slot))

    def num_free(self) -> int:
        return NUM_BLOCKS - len(self.owners())

    def slot(self, pick: int) -> int:
        return sorted(self.sequences)[pick % len(self.sequences)]

    def needed(self, slots: list[int], n: int) -> int:
        """Blocks that appending n tokens to these, one after another, takes."""
        owners, needed = self.owners(), 0
        for slot in slots:
            held = len(self.sequences[slot].tokens)
            needed += -(-(held + n) // BLOCK_SIZE) - -(-held // BLOCK_SIZE)
            if n and held % BLOCK_SIZE and owners[last := self.table(slot)[-1]] > 1:
                owners[last] -= 1
                needed += 1
        return needed

    def state(self) -> tuple:
        m = self.manager
        return (
            {slot: self.table(slot) for slot in self.sequences},
            m.num_tokens.tolist(),
            m.pool.ref_counts.tolist(),
            m.pool.cached,
            m.num_free_slots,
            m.num_free_swap_blocks,
            m.copy_on_write_blocks,
            (m.prefix_query_tokens, m.prefix_hit_tokens),
        )

    def refused(self, error, operation, *args) -> None:
        before = self.state()
        with pytest.raises(error):
            operation(*args)
        assert self.state() == before
        self.events[f"refused: {operation.__name__}"] += 1

    # A step's end: what the engine does, in its order.

    def end_step(self) -> None:
        self.check_cache(self.owners())
        sources, destinations = self.manager.take_copies()
        for swapped in self.swap_outs:
            self.host[swapped.host_blocks] = self.device[swapped.device_blocks]
        assert len(set(destinations.tolist())) == len(destinations)
        self.device[destinations] = self.device[sources]
        self.events["copies"] += len(sources)
        for swapped in self.swap_ins:
            self.device[swapped.device_blocks] = self.host[swapped.host_blocks]
            self.events["sent for again"] += len(swapped.moves) > swapped.num_blocks
        self.swap_outs, self.swap_ins = [], []
        owners, written = self.owners(), set()
        for slot, sequence in self.sequences.items():
            for i in range(sequence.written, len(sequence.tokens)):
                block, offset = self.table(slot)[i // BLOCK_SIZE], i % BLOCK_SIZE
                assert owners[block] == 1
                assert block not in self.cached
                assert (block, offset) not in written
                written.add((block, offset))
                self.device[block, offset] = sequence.values[i]
            sequence.written = len(sequence.tokens)
        self.read_everything()
        # Nobody may rely on what a block held before it was taken.
        empty = set(range(NUM_BLOCKS)) - owners.keys() - set(self.manager.pool.cached)
        self.device[sorted(empty)] = EMPTY
        if self.publishes:
            for slot, sequence in self.sequences.items():
                self.publish_computed(slot, sequence.written)
            self.check_cache(self.owners())

    def publish_computed(self, slot: int, num_computed: int) -> None:
        sequence, before = self.sequences[slot], self.table(slot)
        tokens = np.array(sequence.tokens, np.int32)
        self.manager.publish(slot, tokens, num_computed, sequence.salt)
        self.events["replaced by what was cached"] += before != self.table(slot)
        for column in range(num_computed // BLOCK_SIZE):
            value = sequence.values[(column + 1) * BLOCK_SIZE - 1]
            assert self.cached.setdefault(self.table(slot)[column], value) == value

    def read_everything(self) -> None:
        for slot, sequence in self.sequences.items():
            held = self.device[self.manager.block_table(slot)].ravel()
            assert held[: len(sequence.values)].tolist() == sequence.values
        for block, value in self.cached.items():
            assert self.device[block, -1] == value
        for swapped, sequences in self.swapped.items():
            for table, sequence in zip(swapped.tables, sequences):
                held = self.host[swapped.host_blocks[table]].ravel()
                assert held[: len(sequence.values)].tolist() == sequence.values

    def computed(self, slots: list[int]) -> bool:
        return all(self.sequences[s].written == len(self.sequences[s].tokens) for s in slots)

    # The operations.

    @rule(
        salt=st.sampled_from([None, "a"]),
        n=st.integers(1, 9),
        bits=bits,
        again=picks,
        end=ends_step,
    )
    def match_and_allocate(self, salt, n, bits, again, end):
        tokens = [bits >> i & 1 for i in range(n)]
        if self.past and again % 4:  # mostly tokens that were seen before, under a salt of choice
            salt_then, seen = self.past[again % len(self.past)]
            salt = salt_then if again % 3 else salt
            tokens = [*seen, *tokens][:n]
        manager = self.manager
        asked, chain = self.asked.get(salt, ([], []))
        if asked[:n] != tokens[: len(asked)]:
            chain = []  # these are not the same tokens and perhaps more
        self.asked[salt] = tokens, chain
        self.events["asked for again"] += bool(chain)
        blocks = manager.match_prefix(np.array(tokens, np.int32), salt, chain)
        new = ModelSequence(salt)
        self.extend(new, tokens)
        longest = 0
        known = set(self.cached.values())
        while (end_of := (longest + 1) * BLOCK_SIZE) < n and new.values[end_of - 1] in known:
            longest += 1
        assert len(blocks) == longest
        taken = [self.cached[block] for block in blocks.tolist()]
        assert taken == new.values[BLOCK_SIZE - 1 :: BLOCK_SIZE][:longest]
        owners = self.owners()
        needed = -(-n // BLOCK_SIZE) - sum(block in owners for block in blocks.tolist())
        assert manager.blocks_needed_new(n, blocks) == needed
        if n > COLUMNS * BLOCK_SIZE:
            self.refused(ValueError, manager.allocate, n, blocks)
        elif needed > self.num_free() or len(self.sequences) == ROWS:
            self.refused(NoFreeBlocksError, manager.allocate, n, blocks)
        else:
            slot = manager.allocate(n, blocks)
            assert slot not in self.sequences
            assert self.table(slot)[: len(blocks)] == blocks.tolist()
            new.written = len(blocks) * BLOCK_SIZE
            self.sequences[slot] = new
            self.past.append((salt, tokens))
            self.events["hit blocks"] += len(blocks)
            self.events["hit blocks in use"] += sum(block in owners for block in blocks.tolist())
        if end:
            self.end_step()

    @precondition(lambda self: self.sequences)
    @rule(pick=picks, n=st.integers(0, 4), bits=bits, end=ends_step)
    def append(self, pick, n, bits, end):
        slot = self.slot(pick)
        needed = self.needed([slot], n)
        assert self.manager.blocks_needed(slot, n) == needed
        if len(self.sequences[slot].tokens) + n > COLUMNS * BLOCK_SIZE:
            self.refused(ValueError, self.manager.append, slot, n)
        elif needed > self.num_free():
            self.refused(NoFreeBlocksError, self.manager.append, slot, n)
        else:
            free = self.manager.num_free_blocks
            self.manager.append(slot, n)
            assert self.manager.num_free_blocks == free - needed
            self.extend(self.sequences[slot], [bits >> i & 1 for i in range(n)])
        if end:
            self.end_step()

    @precondition(lambda self: self.sequences)
    @rule(mask=st.integers(0, 2**ROWS - 1), pick=picks, bits=bits, end=ends_step)
    def append_one(self, mask, pick, bits, end):
        slots = [slot for slot in sorted(self.sequences) if mask >> slot & 1]
        self.append_one_each(slots[pick % ROWS :] + slots[: pick % ROWS], bits)
        if end:
            self.end_step()

    def append_one_each(self, slots: list[int], bits: int) -> None:
        array = np.array(slots, np.int32)
        needed = self.needed(slots, 1)
        assert self.manager.blocks_needed_one(array) == needed
        if any(len(self.sequences[s].tokens) == COLUMNS * BLOCK_SIZE for s in slots):
            self.refused(ValueError, self.manager.append_one, array)
        elif needed > self.num_free():
            self.refused(NoFreeBlocksError, self.manager.append_one, array)
        else:
            free = self.manager.num_free_blocks
            self.manager.append_one(array)
            assert self.manager.num_free_blocks == free - needed
            for i, slot in enumerate(slots):
                self.extend(self.sequences[slot], [bits >> i & 1])

    @precondition(lambda self: self.sequences)
    @rule(mask=st.integers(1, 2**ROWS - 1), n=st.integers(0, 5), fewer=picks, bits=bits)
    def append_ahead_and_trim(self, mask, n, fewer, bits):
        """Room for several decode steps, of which fewer run: those that ran are written, then the
        rest is given back."""
        slots = [slot for slot in sorted(self.sequences) if mask >> slot & 1]
        self.append_one_each(slots, bits)
        array = np.array(slots, np.int32)
        if not set(slots).isdisjoint(self.manager._sharers):  # the append was refused
            self.refused(ValueError, self.manager.append_ahead, array, 1)
            return
        needed = self.needed(slots, n)
        assert self.manager.blocks_needed_ahead(array, n) == needed
        most = max((len(self.sequences[s].tokens) for s in slots), default=0)
        if slots and most + n > COLUMNS * BLOCK_SIZE:
            self.refused(ValueError, self.manager.append_ahead, array, n)
        elif needed > self.num_free():
            self.refused(NoFreeBlocksError, self.manager.append_ahead, array, n)
        else:
            free = self.manager.num_free_blocks
            self.manager.append_ahead(array, n)
            assert self.manager.num_free_blocks == free - needed
            surplus = fewer % (n + 1)
            tables = [self.table(slot) for slot in slots]
            for i, slot in enumerate(slots):
                self.extend(self.sequences[slot], [(bits >> i + j) & 1 for j in range(n - surplus)])
                self.manager.trim(slot, surplus)
            kept = [table[: len(self.table(s))] for table, s in zip(tables, slots)]
            assert kept == [self.table(slot) for slot in slots]
            self.events["trimmed blocks"] += self.manager.num_free_blocks - (free - needed)
        self.end_step()

    @precondition(lambda self: self.sequences)
    @rule(pick=picks, n=st.integers(0, 3), end=ends_step)
    def fork(self, pick, n, end):
        slot = self.slot(pick)
        if not self.computed([slot]):
            self.end_step()
        if n > ROWS - len(self.sequences):
            self.refused(NoFreeBlocksError, self.manager.fork, slot, n)
        else:
            forks = self.manager.fork(slot, n)
            assert len(forks) == n
            for fork in forks:
                assert self.table(fork) == self.table(slot)
                self.sequences[fork] = self.sequences[slot].copy()
        if end:
            self.end_step()

    @precondition(lambda self: self.sequences)
    @rule(pick=picks, end=ends_step)
    def free(self, pick, end):
        slot = self.slot(pick)
        table, line = self.table(slot), self.manager.pool.cached
        self.manager.free(slot)
        left = self.manager.pool.cached[len(line) :]
        assert left == [block for block in reversed(table) if block in left]  # tails before heads
        del self.sequences[slot]
        if end:
            self.end_step()

    @precondition(lambda self: self.sequences)
    @rule(pick=picks, less=st.integers(0, 2), end=ends_step)
    def publish(self, pick, less, end):
        slot = self.slot(pick)
        self.publish_computed(slot, max(0, self.sequences[slot].written - less))
        if end:
            self.end_step()

    @precondition(lambda self: self.sequences)
    @rule(mask=st.integers(1, 2**ROWS - 1), pick=picks, end=ends_step)
    def swap_out(self, mask, pick, end):
        slots = [slot for slot in sorted(self.sequences) if mask >> slot & 1][: pick % 4]
        if pick % 2 or not slots:  # a request: a sequence and its forks
            blocks = set(self.table(self.slot(pick)))
            slots = [slot for slot in sorted(self.sequences) if blocks & set(self.table(slot))]
        if not self.computed(slots):
            self.end_step()
        if not self.manager.can_swap_out(slots):
            self.refused((ValueError, NoFreeBlocksError), self.manager.swap_out, slots)
            self.end_step()
        blocks = {block for slot in slots for block in self.table(slot)}
        fits = len(blocks) <= SWAP_BLOCKS - sum(s.num_blocks for s in self.swapped)
        # What this step gave back it may still be reading.
        fits_now = len(blocks) <= self.manager.num_free_swap_blocks
        assert self.manager.can_swap_out(slots) == fits_now <= fits
        if not fits_now:
            self.refused(NoFreeBlocksError, self.manager.swap_out, slots)
        else:
            swapped = self.manager.swap_out(slots)
            assert swapped.num_blocks == len(blocks)
            assert set(swapped.device_blocks.tolist()) == blocks
            self.swapped[swapped] = [self.sequences.pop(slot) for slot in slots]
            self.swap_outs.append(swapped)
            self.events["swapped out blocks"] += len(blocks)
        if end:
            self.end_step()

    @precondition(lambda self: self.swapped)
    @rule(pick=picks, bits=bits, end=ends_step)
    def swap_in(self, pick, bits, end):
        swapped = [*self.swapped][pick % len(self.swapped)]
        if swapped in self.swap_outs:
            self.refused(ValueError, self.manager.swap_in, swapped)
            self.end_step()
        sequences = self.swapped[swapped]
        rows = ROWS - len(self.sequences)
        if swapped.num_blocks > self.num_free() or len(sequences) > rows:
            self.refused(NoFreeBlocksError, self.manager.swap_in, swapped)
        else:
            num_used = self.manager.num_used_blocks
            slots = self.manager.swap_in(swapped)
            assert self.manager.num_used_blocks == num_used + swapped.num_blocks
            del self.swapped[swapped]
            self.sequences.update(zip(slots, sequences, strict=True))
            self.swap_ins.append(swapped)
            self.events["swapped in"] += 1
            if pick % 4:  # they go on in the same step
                self.append_one_each(sorted(slots, reverse=bool(pick % 2)), bits)
            elif bits % 2:  # aborted in the same step
                self.manager.free(slots[0])
                del self.sequences[slots[0]]
        if end:
            self.end_step()

    @precondition(lambda self: self.swapped)
    @rule(pick=picks, end=ends_step)
    def drop_swapped(self, pick, end):
        swapped = [*self.swapped][pick % len(self.swapped)]
        self.manager.drop_swapped(swapped)
        del self.swapped[swapped]
        self.refused(ValueError, self.manager.drop_swapped, swapped)
        if end:
            self.end_step()

    @precondition(lambda self: self.swapped)
    @rule(pick=picks, end=ends_step)
    def drop_one_swapped(self, pick, end):
        swapped = [*self.swapped][pick % len(self.swapped)]
        sequences = self.swapped[swapped]
        if len(sequences) == 1:
            self.refused(ValueError, self.manager.drop_one_swapped, swapped, 0)
        else:
            self.refused(ValueError, self.manager.drop_one_swapped, swapped, len(sequences))
            self.manager.drop_one_swapped(swapped, pick % len(sequences))
            del sequences[pick % len(sequences)]
            self.events["one of several dropped"] += 1
        if end:
            self.end_step()

    @invariant()
    def agrees(self):
        if not hasattr(self, "manager"):
            return
        self.events["steps"] += 1
        manager = self.manager
        manager.check_integrity()
        owners = self.owners()
        assert manager.num_used_blocks == len(owners)
        assert manager.num_shared_blocks == sum(count > 1 for count in owners.values())
        assert manager.num_table_blocks == sum(owners.values())
        assert manager.num_free_slots == ROWS - len(self.sequences)
        used = {}
        for slot, sequence in self.sequences.items():
            assert manager.num_tokens[slot] == len(sequence.tokens)
            assert manager.num_blocks_of(slot) == -(-len(sequence.tokens) // BLOCK_SIZE)
            for column, block in enumerate(self.table(slot)):
                used[block] = min(BLOCK_SIZE, len(sequence.tokens) - column * BLOCK_SIZE)
        assert manager.num_used_token_slots == sum(used.values())
        self.check_cache(owners)

    def check_cache(self, owners: Counter[int]) -> None:
        """Blocks lose their contents least recently used first, and what follows them with them."""
        line, cached = self.line, self.manager.pool.cached
        lost = [b for b in self.cached if self.manager._cache.entry(b) is None]
        self.events["evicted"] += len(lost)
        values = {block: self.cached.pop(block) for block in lost}
        assert set(cached) == {b for b in self.cached if b not in owners}
        stay = [block for block in line if block in cached]
        new = [block for block in cached if block not in line]
        assert cached == stay + new
        if lost:
            alone = [b for b in lost if not self.past_values(values[b]) & set(values.values())]
            self.events["evicted with another"] += len(lost) - len(alone)
            assert all(line.index(b) < line.index(other) for b in alone for other in stay)
        self.line = cached

    def past_values(self, value: int) -> set[int]:
        """The values of the tokens before one."""
        past = set()
        while isinstance(value := self.before[value], int):
            past.add(value)
        return past

    def teardown(self):
        """Whatever happened, everything comes back."""
        if not hasattr(self, "manager"):
            return
        for slot in [*self.sequences]:
            self.manager.free(slot)
        for swapped in [*self.swapped]:
            self.manager.drop_swapped(swapped)
        self.manager.take_copies()
        self.manager.check_integrity()
        assert self.manager.num_free_blocks == NUM_BLOCKS
        assert self.manager.num_free_slots == ROWS
        assert self.manager.num_free_swap_blocks == SWAP_BLOCKS


def run(examples: int, steps: int) -> Counter[str]:
    class Machine(ManagerAgainstCopies):
        events: ClassVar[Counter[str]] = Counter()

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
        ),
    )
    return Machine.events


# All of these must have been tried.
KINDS = [
    "copies",
    "hit blocks",
    "hit blocks in use",
    "asked for again",
    "replaced by what was cached",
    "evicted",
    "evicted with another",
    "swapped out blocks",
    "swapped in",
    "one of several dropped",
    "refused: allocate",
    "refused: append",
    "refused: append_one",
    "refused: append_ahead",
    "trimmed blocks",
    "refused: fork",
    "refused: swap_out",
    "refused: swap_in",
]


def test_any_order_of_operations():
    assert run(examples=60, steps=50)["steps"] > 1000


@pytest.mark.slow
def test_any_order_of_operations_20000_steps():
    events = run(examples=300, steps=100)
    assert events["steps"] >= 20_000
    assert not [kind for kind in KINDS if events[kind] < 50], events
    assert events["sent for again"]
