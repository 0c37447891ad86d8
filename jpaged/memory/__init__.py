"""The KV pool's book-keeping: which blocks are free, shared, cached or swapped out, and which
sequences own them. No jax."""

from jpaged.memory.block_manager import BlockManager
from jpaged.memory.block_pool import BlockPool, NoFreeBlocksError
from jpaged.memory.swap_space import Swapped

__all__ = ["BlockManager", "BlockPool", "NoFreeBlocksError", "Swapped"]
