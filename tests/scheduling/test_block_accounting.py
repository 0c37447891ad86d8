"""How much of the allocated memory holds tokens, over lengths as people's chats have them.

Kwon et al. (SOSP 2023), figure 2: 96.3 % of the KV memory of vLLM holds token states, in a run over
ShareGPT with OPT-13B on an A100 with 40 GB (table 1: 15.7K token slots).
"""

from __future__ import annotations

import numpy as np
import pytest

from jpaged.scheduling import Scheduler

# Histograms of figure 11 of that paper (ShareGPT), read from its vector graphics: samples in 128
# equal bins between the shortest and the longest length. The paper prints means of 161.31 input and
# 337.99 output tokens.
INPUT_RANGE, OUTPUT_RANGE = (1, 2028), (1, 2009)
# fmt: off
INPUT_COUNTS = [
    21947, 16256, 7506, 4716, 3185, 2536, 1753, 1493, 1185, 1008, 922, 830, 609, 683, 659, 521,
    518, 424, 412, 414, 445, 397, 432, 432, 364, 369, 352, 347, 303, 260, 233, 254, 280, 263,
    228, 198, 178, 249, 181, 171, 190, 167, 156, 180, 168, 145, 171, 142, 133, 119, 154, 149,
    167, 141, 107, 76, 116, 111, 126, 95, 94, 104, 124, 121, 122, 109, 119, 129, 127, 95, 124,
    112, 99, 89, 80, 63, 69, 64, 70, 52, 64, 69, 54, 53, 69, 60, 46, 39, 49, 45, 38, 45, 34, 46,
    44, 41, 32, 34, 22, 41, 33, 29, 35, 39, 24, 18, 36, 33, 19, 20, 23, 15, 25, 17, 22, 21, 17,
    11, 20, 10, 8, 10, 8, 4, 12, 3, 1, 5,
]
OUTPUT_COUNTS = [
    3152, 2786, 2489, 1960, 2268, 2441, 2304, 2378, 2179, 2000, 1983, 2177, 2114, 2265, 2269,
    2289, 2269, 2335, 2173, 2030, 1987, 1963, 1740, 1665, 1636, 1341, 1248, 1188, 1030, 980,
    1031, 890, 850, 870, 730, 657, 681, 622, 570, 598, 559, 481, 472, 447, 413, 387, 427, 410,
    1016, 595, 492, 401, 433, 314, 262, 258, 184, 194, 193, 211, 193, 184, 166, 158, 174, 149,
    133, 125, 123, 105, 117, 147, 128, 102, 91, 86, 97, 84, 93, 84, 77, 62, 44, 41, 46, 45, 27,
    35, 35, 27, 34, 34, 41, 35, 31, 18, 28, 30, 12, 19, 15, 15, 12, 13, 12, 9, 12, 8, 11, 9, 3,
    5, 5, 9, 6, 8, 8, 4, 8, 0, 4, 3, 2, 1, 0, 0, 1, 1,
]
# fmt: on


def draw_lengths(rng, counts, limits, n):
    """Draw bins by their counts, then lengths evenly within the bins."""
    edges = np.linspace(*limits, len(counts) + 1)
    bins = rng.choice(len(counts), size=n, p=np.array(counts) / sum(counts))
    return np.rint(rng.uniform(edges[bins], edges[bins + 1])).astype(int)


def sharegpt_lengths(seed: int, n: int) -> np.ndarray:
    """[n', 2] prompt and output lengths, filtered as the benchmark of vLLM 0.1.7 does."""
    rng = np.random.default_rng(seed)
    prompts = draw_lengths(rng, INPUT_COUNTS, INPUT_RANGE, n)
    outputs = draw_lengths(rng, OUTPUT_COUNTS, OUTPUT_RANGE, n)
    kept = (prompts >= 4) & (outputs >= 4) & (prompts <= 1024) & (prompts + outputs <= 2048)
    return np.stack([prompts, outputs], axis=1)[kept]


def test_the_typed_numbers_are_the_papers():
    rng = np.random.default_rng(0)
    for counts, limits, mean in (
        (INPUT_COUNTS, INPUT_RANGE, 161.31),
        (OUTPUT_COUNTS, OUTPUT_RANGE, 337.99),
    ):
        assert len(counts) == 128
        assert draw_lengths(rng, counts, limits, 200_000).mean() == pytest.approx(mean, rel=0.01)


def test_allocated_slots_hold_tokens(make_request):
    """A saturated queue, 15.7K slots in blocks of 16, 2,560 tokens a step as in the paper."""
    block_size, num_blocks = 16, 15_700 // 16
    scheduler = Scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=256,
        max_num_batched_tokens=2560,
        max_model_len=2048,
    )
    manager = scheduler.block_manager
    for number, (prompt, output) in enumerate(sharegpt_lengths(0, 1200).tolist()):
        scheduler.add(make_request(number, prompt, output))
    of_allocated, of_pool = [], []
    while scheduler.waiting:  # until the queue runs dry
        plan = scheduler.schedule()
        held = manager.num_tokens[manager.num_tokens > 0]
        blocks = -(-held // block_size)
        assert blocks.sum() == manager.num_used_blocks
        assert (blocks * block_size - held).max() <= block_size - 1
        of_allocated.append(held.sum() / (manager.num_used_blocks * block_size))
        of_pool.append(held.sum() / (num_blocks * block_size))
        scheduler.update(plan, np.zeros(plan.num_sampled, np.int32))
    assert np.mean(of_allocated) >= 0.96
    assert np.mean(of_pool) == pytest.approx(0.963, abs=0.01)  # the paper's figure 2
    assert np.mean(of_allocated) == pytest.approx(scheduler.slots_used_share)
