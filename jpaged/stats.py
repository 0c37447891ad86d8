"""What an engine counts about itself."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot of `Engine.stats()`. Counts run from the engine's start.

    Attributes:
        num_blocks: blocks in the KV pool: blocks_used + blocks_cached + blocks_free.
        blocks_used: blocks that sequences hold now, each counted once; those of finished requests
            that were kept included.
        blocks_shared: of these, held by more than one sequence.
        blocks_cached: blocks that no sequence holds and whose contents can be found again by their
            tokens; taken when blocks_free is 0.
        blocks_free: blocks that are neither used nor cached.
        slots_used_share: share of the allocated token slots that held a token, averaged over
            steps (1.0 before the first). The slots of a shared block count once.
        preemptions_recompute: how often a request lost its blocks, to be computed again.
        preemptions_swap: how often a request's blocks were saved to host memory instead.
        swapped_out_bytes: bytes of keys, values and token ids that were saved there.
        copy_on_write_blocks: blocks copied because they were shared and about to be written.
        prefix_query_tokens: tokens that were looked for in the cache: of prompts, and of preempted
            requests that came back to be computed again.
        prefix_cached_tokens: tokens among these whose blocks were found, so that they were not
            computed.
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
    prefix_query_tokens: int
    prefix_cached_tokens: int
    prompt_tokens: int
    generated_tokens: int
    steps: int
    num_buckets: int
    warmup_seconds: float
    compilations_after_warmup: int
    padded_tokens: int

    @property
    def internal_waste(self) -> float:
        """Share of the allocated token slots that held no token, averaged over steps: what the last
        blocks of sequences have to spare. Nothing else is wasted: all blocks are of one size."""
        return 1.0 - self.slots_used_share

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the tokens that were looked for in the cache that were found; 0.0 before any
        was looked for."""
        looked_for = self.prefix_query_tokens
        return self.prefix_cached_tokens / looked_for if looked_for else 0.0
