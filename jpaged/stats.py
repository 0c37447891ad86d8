"""What an engine counts about itself."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot of `Engine.stats()`. Counts run from the engine's start.

    Attributes:
        num_blocks: blocks in the KV pool.
        blocks_used: blocks that sequences hold now.
        blocks_shared: of these, held by more than one sequence (0 until sharing is built).
        blocks_cached: blocks kept for their contents alone (0 until prefix caching is built).
        blocks_free: blocks that nobody holds.
        slots_used_share: share of the allocated token slots that held a token, averaged over
            steps (1.0 before the first).
        preemptions_recompute: requests preempted, to be computed again.
        preemptions_swap, swapped_out_bytes: 0 until swapping is built.
        copy_on_write_blocks: 0 until sharing is built.
        prefix_cached_tokens: 0 until prefix caching is built.
        prompt_tokens: tokens of the prompts admitted, each counted once.
        generated_tokens: tokens generated.
        steps: steps executed.
        num_buckets: compiled shapes of the step.
        warmup_seconds: what `Engine.warmup` took.
        compilations_after_warmup: XLA compilations inside steps; 0 unless something is wrong.
        padded_tokens: token rows computed for nothing: bucket sizes less the steps' tokens.
    """

    num_blocks: int
    blocks_used: int
    blocks_shared: int
    blocks_cached: int
    blocks_free: int
    slots_used_share: float
    preemptions_recompute: int
    preemptions_swap: int
    swapped_out_bytes: int
    copy_on_write_blocks: int
    prefix_cached_tokens: int
    prompt_tokens: int
    generated_tokens: int
    steps: int
    num_buckets: int
    warmup_seconds: float
    compilations_after_warmup: int
    padded_tokens: int
