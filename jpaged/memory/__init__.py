"""The KV pool's book-keeping: which blocks are free and which sequence owns them. No jax."""

from jpaged.memory.block_manager import BlockManager
from jpaged.memory.block_pool import BlockPool, NoFreeBlocksError

__all__ = ["BlockManager", "BlockPool", "NoFreeBlocksError"]
