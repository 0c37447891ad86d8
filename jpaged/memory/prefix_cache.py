"""Automatic prefix caching: which blocks hold the keys and values of which tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Int32

HashBlock = Callable[[int, bytes, str | None], int]


def hash_block(parent_hash: int, tokens: bytes, salt: str | None) -> int:
    """The hash of a block's whole past: its parent's hash, its own tokens, the salt.

    Python hashes bytes and strings with SipHash under a key drawn when the process starts, so
    nobody outside can aim for collisions. They would cost time alone: contents are compared.
    """
    return hash((parent_hash, tokens, salt))


@dataclasses.dataclass(slots=True, eq=False)
class CachedBlock:
    """A full block that can be found by its contents.

    Attributes:
        block: the physical block.
        parent: what precedes it; None for the first block of a sequence.
        tokens: its token ids, as the bytes of an int32 array.
        salt: sequences of different salts share nothing.
        chain_hash: hash of parent's chain_hash, tokens and salt.
        depth: blocks of the sequence up to this one, itself included.
        children: cached blocks of which this one is the parent (a dict for its order).
    """

    block: int
    parent: CachedBlock | None
    tokens: bytes
    salt: str | None
    chain_hash: int
    depth: int
    children: dict[CachedBlock, None] = dataclasses.field(default_factory=dict)


class PrefixCache:
    """Finds full blocks by their contents and everything before these.

    Keys and values of a token depend on all tokens before it, so a block is identified by its
    parent's entry and its own tokens. The look-up goes by a chain of hashes, one a block; what it
    finds is compared, tokens, parent entry and salt, so that a collision never serves a stranger's
    block. No content is here twice, and no block under two contents. An entry's parent is always
    here too: `remove` takes all that follows with it.

    Knows nothing of who uses a block: `BlockPool` evicts, `BlockManager` joins the two.
    """

    def __init__(self, block_size: int, hash_block: HashBlock = hash_block) -> None:
        self.block_size = block_size
        self._hash_block = hash_block
        self._by_hash: dict[int, list[CachedBlock]] = {}
        self._by_block: dict[int, CachedBlock] = {}

    def __len__(self) -> int:
        return len(self._by_block)

    def entry(self, block: int) -> CachedBlock | None:
        """What a block is cached as."""
        return self._by_block.get(block)

    def split(self, token_ids: Int32[np.ndarray, " n"]) -> Iterator[bytes]:
        """The tokens of each full block, as entries hold them."""
        data = np.ascontiguousarray(token_ids, np.int32).tobytes()
        size = 4 * self.block_size
        return (data[i : i + size] for i in range(0, len(data) - size + 1, size))

    def match(
        self,
        token_ids: Int32[np.ndarray, " n"],
        salt: str | None,
        chain: list[CachedBlock] | None = None,
    ) -> list[CachedBlock]:
        """The longest chain of entries that holds a prefix of these tokens.

        chain: what this gave before for the same salt and tokens, or for the first or more of them.
            It is brought up to date and given back: what of it is still here is not looked up.
        """
        chain = [] if chain is None else chain
        del chain[len(token_ids) // self.block_size :]
        # The parents of an entry that is here are here too.
        while chain and self._by_block.get(chain[-1].block) is not chain[-1]:
            chain.pop()
        parent = chain[-1] if chain else None
        for tokens in self.split(token_ids[len(chain) * self.block_size :]):
            parent = self._find(parent, tokens, salt, self._hash_after(parent, tokens, salt))
            if parent is None:
                break
            chain.append(parent)
        return chain

    def find_or_add(
        self, parent: CachedBlock | None, tokens: bytes, salt: str | None, block: int
    ) -> CachedBlock:
        """The entry of these tokens after `parent`: the one that is here, else `block`'s, new.

        Raises:
            ValueError: `block` is here with other contents.
        """
        chain_hash = self._hash_after(parent, tokens, salt)
        found = self._find(parent, tokens, salt, chain_hash)
        if found is not None:
            return found
        if block in self._by_block:
            raise ValueError(f"block {block} must hold the tokens and salt that it was cached with")
        depth = 1 if parent is None else parent.depth + 1
        entry = CachedBlock(block, parent, tokens, salt, chain_hash, depth)
        self._by_hash.setdefault(chain_hash, []).append(entry)
        self._by_block[block] = entry
        if parent is not None:
            parent.children[entry] = None
        return entry

    def remove(self, block: int) -> list[int]:
        """Forget a block and all that can only be found through it; gives their block ids."""
        top = self._by_block[block]
        if top.parent is not None:
            del top.parent.children[top]
        removed = []
        pending = [top]
        while pending:
            entry = pending.pop()
            pending.extend(entry.children)
            bucket = self._by_hash[entry.chain_hash]
            bucket.remove(entry)
            if not bucket:
                del self._by_hash[entry.chain_hash]
            del self._by_block[entry.block]
            removed.append(entry.block)
        return removed

    def _hash_after(self, parent: CachedBlock | None, tokens: bytes, salt: str | None) -> int:
        return self._hash_block(0 if parent is None else parent.chain_hash, tokens, salt)

    def _find(
        self, parent: CachedBlock | None, tokens: bytes, salt: str | None, chain_hash: int
    ) -> CachedBlock | None:
        for entry in self._by_hash.get(chain_hash, ()):
            if entry.parent is parent and entry.tokens == tokens and entry.salt == salt:
                return entry
        return None

    def check_integrity(self) -> None:
        """Raise AssertionError unless both look-ups hold the same entries, no two the same contents
        and each one's parent is here."""
        entries = list(self._by_block.values())
        hashed = [entry for bucket in self._by_hash.values() for entry in bucket]
        if sorted(map(id, entries)) != sorted(map(id, hashed)):
            raise AssertionError("blocks by hash and blocks by id are not the same")
        contents = {(id(e.parent), e.tokens, e.salt) for e in entries}
        if len(contents) != len(entries):
            raise AssertionError("two blocks are cached with the same contents")
        for block, entry in self._by_block.items():
            above = entry.parent
            if (
                entry.block != block
                or entry not in self._by_hash[entry.chain_hash]
                or entry.chain_hash != self._hash_after(above, entry.tokens, entry.salt)
                or len(entry.tokens) != 4 * self.block_size
            ):
                raise AssertionError(f"block {block} is cached as {entry}")
            if above is None:
                linked = entry.depth == 1
            else:
                linked = (
                    self._by_block.get(above.block) is above
                    and entry in above.children
                    and entry.depth == above.depth + 1
                    and entry.salt == above.salt
                )
            if not linked:
                raise AssertionError(f"block {block} is cached without its parent")
