"""Whether a request finds room: what it will take, and what the running ones have still to take."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32

from jpaged.memory import BlockManager
from jpaged.scheduling.request import Request


def blocks_of_group(manager: BlockManager, num_shared: int, lengths: list[int]) -> int:
    """Blocks of sequences of these lengths that share their first num_shared tokens: the full
    blocks of what is shared once, the others for each."""
    shared = num_shared // manager.block_size if len(lengths) > 1 else 0
    return shared + sum(manager.blocks_for(length) - shared for length in lengths)


def tokens_to_compute(request: Request) -> int:
    """Tokens to compute until a request that holds no memory is where it was."""
    lengths = [s.num_tokens for s in request.unfinished]
    if len(lengths) == 1:
        return lengths[0]
    return request.fork_point + sum(length - request.fork_point for length in lengths)


def _goals(request: Request) -> list[int]:
    """Tokens that each row of a request holds once it has sampled: its context and, unless that
    will be the last, the token sampled next."""
    most = request.max_total_tokens - 1
    goals = [min(s.num_tokens + 1, most) for s in request.unfinished]
    # Beams that are still to come.
    return goals + [goals[0]] * (request.num_rows - len(goals))


def _blocks_to_take(
    manager: BlockManager, request: Request, prefix: Int32[np.ndarray, " m"]
) -> int:
    """Free blocks that a waiting request takes until it has sampled."""
    if request.swapped is not None:
        if not request.is_forked:
            whole = blocks_of_group(manager, request.fork_point, _goals(request))
            return max(request.swapped.num_blocks, whole)
        most = request.max_total_tokens - 1
        grown = sum(
            manager.blocks_for(min(s.num_tokens + 1, most))
            - manager.blocks_for(s.num_computed_tokens)
            for s in request.unfinished
        )
        copied = request.num_rows - 1  # at most: last blocks that are shared until written to
        # It never takes more than all of it may, which is what `Scheduler.check_fits` asked for.
        limit = blocks_of_group(manager, request.fork_point, [most] * request.num_rows)
        return min(request.swapped.num_blocks + grown + copied, limit)
    needed = blocks_of_group(manager, request.fork_point, _goals(request))
    # Those of its cached blocks that others hold anyway are not taken from the free ones.
    return needed - int(np.count_nonzero(manager.pool.ref_counts[prefix]))


def fits(
    manager: BlockManager,
    request: Request,
    prefix: Int32[np.ndarray, " m"],
    *,
    running: list[Request],
    budget: int,
    max_num_batched_tokens: int,
    watermark_blocks: int,
    max_held: Int32[np.ndarray, " slots"],
) -> bool:
    """Whether a waiting request finds room until it has sampled a token, beside what the running
    ones take meanwhile.

    prefix            blocks of the cache that it would share
    budget            tokens left in this step
    watermark_blocks  blocks to leave free, unless nothing runs
    max_held          for each row in use, the most tokens that it will ever hold
    """
    needed = _blocks_to_take(manager, request, prefix)
    if not running:  # the whole pool is free
        return needed <= manager.num_free_blocks
    needed += watermark_blocks
    if needed > manager.num_free_blocks:
        return False
    # Steps until its last chunk: the others decode meanwhile, one token each at most.
    missing = 0
    if request.swapped is None:
        missing = tokens_to_compute(request) - len(prefix) * manager.block_size
    a_step = max(max_num_batched_tokens - len(np.flatnonzero(manager.num_tokens)), 1)
    steps = -(-max(missing - budget, 0) // a_step)
    used = np.flatnonzero(manager.num_tokens)
    held = manager.num_tokens[used]
    ahead = np.minimum(held + steps, max_held[used])
    needed += int((manager.blocks_for(ahead) - manager.blocks_for(held)).sum())
    needed += manager.num_sharers
    for other in running:
        if not other.is_forked:
            whole = blocks_of_group(manager, other.fork_point, _goals(other))
            needed += max(whole - manager.num_blocks_of(other.leader.slot), 0)
    return needed <= manager.num_free_blocks
