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


def _goals(request: Request, more: int) -> list[int]:
    """Tokens that each row of a request holds when it has computed its context and `more` tokens
    after that, but never the last one, whose keys are not needed."""
    most = request.max_total_tokens - 1
    goals = [min(s.num_tokens + more, most) for s in request.unfinished]
    # Beams that are still to come.
    return goals + [goals[0]] * (request.num_rows - len(goals))


def _blocks_to_take(
    manager: BlockManager, request: Request, prefix: Int32[np.ndarray, " m"], more: int
) -> int:
    """Free blocks that a waiting request takes until it has computed `more` tokens after its
    context."""
    if request.swapped is not None:
        if not request.is_forked:
            whole = blocks_of_group(manager, request.fork_point, _goals(request, more))
            return max(request.swapped.num_blocks, whole)
        most = request.max_total_tokens - 1
        grown = sum(
            manager.blocks_for(min(s.num_tokens + more, most))
            - manager.blocks_for(s.num_computed_tokens)
            for s in request.unfinished
        )
        copied = request.num_rows - 1  # at most: last blocks that are shared until written to
        # It never takes more than all of it may, which is what `Scheduler.check_fits` asked for.
        limit = blocks_of_group(manager, request.fork_point, [most] * request.num_rows)
        return min(request.swapped.num_blocks + grown + copied, limit)
    needed = blocks_of_group(manager, request.fork_point, _goals(request, more))
    # Those of its cached blocks that others hold anyway are not taken from the free ones.
    return needed - int(np.count_nonzero(manager.pool.ref_counts[prefix]))


def _behind(request: Request, computed: list[int], budget: int = 0) -> tuple[int, int]:
    """Tokens that a request has to compute after this step until all its sequences have sampled,
    and the steps that this takes if there is budget for everybody.

    computed  tokens in the pool of each unfinished sequence, or of the leader before they are
              forked
    budget    tokens that it may add to these in this step
    """
    begun = computed if request.is_forked else [request.fork_point] * len(request.unfinished)
    left = [s.num_tokens + s.num_pending - n for s, n in zip(request.unfinished, begun)]
    # Beams sample together: first all come up to their last token.
    catch_up = int(request.beams is not None and len(left) > 1 and max(left) > 1)
    if request.is_forked:
        tokens = max(sum(left) - budget, 0)
        return tokens, int(tokens > 0) + catch_up
    tokens = max(request.fork_point - computed[0] - budget, 0)
    return tokens + sum(left), int(tokens > 0) + 1 + catch_up


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
    """Whether a waiting request finds room until it has sampled a token, and so do the running ones
    that have not sampled yet, whatever else the running ones take meanwhile.

    prefix            blocks of the cache that it would share
    budget            tokens left in this step
    watermark_blocks  blocks to leave free, unless nothing runs
    max_held          for each row in use, the most tokens that it will ever hold
    """
    needed = _blocks_to_take(manager, request, prefix, 1)
    if not running:  # the whole pool is free
        return needed <= manager.num_free_blocks
    num_free = manager.num_free_blocks - watermark_blocks
    if needed > num_free:
        return False
    # Groups and beams: they may have rows, and tokens to compute, that are still to come.
    groups = [
        (other, [int(manager.num_tokens[s.slot]) for s in other.unfinished if s.slot >= 0])
        for other in running
        if len(other.sequences) > 1 or other.beams is not None
    ]
    computed = [len(prefix) * manager.block_size]
    if request.swapped is not None:
        computed = [s.num_computed_tokens for s in request.unfinished]
    tokens, own_steps = _behind(request, computed, budget)
    behind = [_behind(group, held) for group, held in groups]
    # Steps until all of these have sampled: each that leaves somebody behind has spent on them what
    # the decodes, one a row at most, leave of its budget.
    used = np.flatnonzero(manager.num_tokens)
    rows = len(used) + request.num_rows - 1 + sum(r.num_rows - len(held) for r, held in groups)
    tokens += sum(left for left, _ in behind)
    others_steps = max((steps for _, steps in behind), default=0)
    a_step = max(max_num_batched_tokens - rows, 1)
    steps = max(own_steps, others_steps) + max(-(-tokens // a_step) - 1, 0)
    # It may sample before the others have, and goes on.
    needed = _blocks_to_take(manager, request, prefix, 1 + (steps if others_steps else 0))
    # `BlockTables.blocks_needed` counts a copy too many for a group that has just been forked.
    needed += sum(not r.is_forked for r in (request, *(r for r, _ in groups)))
    ahead = manager.num_tokens + steps
    for group, held in groups:
        if not group.is_forked:
            ahead[group.leader.slot] = held[0]
            whole = blocks_of_group(manager, group.fork_point, _goals(group, steps - 1))
            needed += max(whole - manager.blocks_for(held[0]), 0)
            continue
        for s, n in zip(group.unfinished, held):
            ahead[s.slot] += max(s.num_tokens + s.num_pending - n - 1, 0)
        if steps:  # of beams that are still to come, what is not shared
            most = manager.blocks_for(min(held[0] + steps, group.max_total_tokens - 1))
            needed += (group.num_rows - len(held)) * (most - held[0] // manager.block_size)
    grown = manager.blocks_for(np.minimum(ahead, max_held)[used])
    needed += int((grown - manager.blocks_for(manager.num_tokens[used])).sum())
    return needed + manager.num_sharers <= num_free
