"""Lengths of requests as the PagedAttention paper had them (Kwon et al., SOSP 2023, figure 11), and
what it measured over them. Needs NumPy alone.

The histograms were read from the vector graphics of arXiv 2309.06180v1: samples in 128 equal bins
between the shortest and the longest length. A bin's samples are spread evenly over its whole
numbers; the means are then the ones that the figure prints. Input and output are drawn
independently: in the ShareGPT lengths that the authors published with their experiments
(github.com/sosp-ae-39/sosp-ae-astra) their correlation is 0.04.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64


class Histogram(NamedTuple):
    """Lengths in tokens.

    Attributes:
        shortest, longest: the outer edges of the bins.
        printed_mean: the mean that the figure prints.
        counts: samples in each of the equal bins.
    """

    shortest: int
    longest: int
    printed_mean: float
    counts: tuple[int, ...]

    def probabilities(self) -> Float64[np.ndarray, " n"]:
        """The probability of each length from `shortest` to `longest`."""
        lengths = np.arange(self.shortest, self.longest + 1)
        width = (self.longest - self.shortest) / len(self.counts)
        bins = np.minimum((lengths - self.shortest) / width, len(self.counts) - 1).astype(np.int64)
        counts = np.array(self.counts, np.float64)
        in_bin = np.bincount(bins, minlength=len(counts))
        return (counts / in_bin / counts.sum())[bins]

    def draw(self, rng: np.random.Generator, n: int) -> Int64[np.ndarray, " n"]:
        """n lengths in random order, one from each n-th of the distribution: few are drawn, and how
        many long ones are among them decides on averages over memory."""
        places = (rng.permutation(n) + rng.random(n)) / n
        below = np.searchsorted(self.probabilities().cumsum(), places, side="right")
        return np.minimum(self.shortest + below, self.longest)


# fmt: off
# Input (prompt) and output lengths of each data set.
FIGURE_11: dict[str, tuple[Histogram, Histogram]] = {
    "sharegpt": (
      Histogram(1, 2028, 161.31, (
        21947, 16256, 7506, 4716, 3185, 2536, 1753, 1493, 1185, 1008, 922, 830, 609, 683,
        659, 521, 518, 424, 412, 414, 445, 397, 432, 432, 364, 369, 352, 347, 303, 260, 233,
        254, 280, 263, 228, 198, 178, 249, 181, 171, 190, 167, 156, 180, 168, 145, 171, 142,
        133, 119, 154, 149, 167, 141, 107, 76, 116, 111, 126, 95, 94, 104, 124, 121, 122,
        109, 119, 129, 127, 95, 124, 112, 99, 89, 80, 63, 69, 64, 70, 52, 64, 69, 54, 53,
        69, 60, 46, 39, 49, 45, 38, 45, 34, 46, 44, 41, 32, 34, 22, 41, 33, 29, 35, 39, 24,
        18, 36, 33, 19, 20, 23, 15, 25, 17, 22, 21, 17, 11, 20, 10, 8, 10, 8, 4, 12, 3, 1, 5,
      )),
      Histogram(1, 2009, 337.99, (
        3152, 2786, 2489, 1960, 2268, 2441, 2304, 2378, 2179, 2000, 1983, 2177, 2114, 2265,
        2269, 2289, 2269, 2335, 2173, 2030, 1987, 1963, 1740, 1665, 1636, 1341, 1248, 1188,
        1030, 980, 1031, 890, 850, 870, 730, 657, 681, 622, 570, 598, 559, 481, 472, 447,
        413, 387, 427, 410, 1016, 595, 492, 401, 433, 314, 262, 258, 184, 194, 193, 211,
        193, 184, 166, 158, 174, 149, 133, 125, 123, 105, 117, 147, 128, 102, 91, 86, 97,
        84, 93, 84, 77, 62, 44, 41, 46, 45, 27, 35, 35, 27, 34, 34, 41, 35, 31, 18, 28, 30,
        12, 19, 15, 15, 12, 13, 12, 9, 12, 8, 11, 9, 3, 5, 5, 9, 6, 8, 8, 4, 8, 0, 4, 3, 2,
        1, 0, 0, 1, 1,
      )),
    ),
    "alpaca": (
      Histogram(6, 508, 19.31, (
        2883, 14294, 13721, 7973, 4754, 2703, 1641, 1057, 667, 479, 337, 271, 130, 176, 149,
        125, 90, 72, 68, 65, 44, 41, 36, 35, 29, 12, 21, 20, 11, 16, 8, 10, 7, 7, 9, 5, 1,
        1, 2, 3, 2, 1, 2, 0, 2, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 4, 2, 0, 2, 0, 1,
        0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        0, 0, 0, 0, 0, 0, 1,
      )),
      Histogram(1, 1470, 58.45, (
        11390, 8196, 4453, 3100, 3441, 3351, 3696, 3005, 2795, 1972, 1679, 1074, 823, 537,
        478, 287, 255, 190, 209, 156, 150, 109, 102, 87, 60, 61, 37, 56, 26, 25, 17, 23, 21,
        20, 14, 11, 10, 13, 6, 4, 2, 5, 3, 6, 6, 4, 2, 6, 4, 5, 1, 2, 3, 0, 2, 1, 1, 3, 1,
        0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1,
      )),
    ),
}
# fmt: on

# Percent of blocks saved by sharing: figure 15 (Alpaca), and the ranges in the text (ShareGPT),
# whose ends are taken to be n = 2 and n = 6.
FIGURE_15 = {
    ("alpaca", "parallel"): {2: 6.09, 4: 8.53, 6: 9.79},
    ("alpaca", "beam"): {2: 37.56, 4: 53.13, 6: 55.16},
    ("sharegpt", "parallel"): {2: 16.2, 6: 30.5},
    ("sharegpt", "beam"): {2: 44.3, 6: 66.3},
}
# Table 1: token slots that OPT-13B leaves in an A100 with 40 GB.
TOKEN_SLOTS = 15_700
MAX_MODEL_LEN = 2048


def draw_lengths(
    data_set: str, rng: np.random.Generator, n: int
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """Prompt and output lengths of n requests.

    As in the authors' experiments, requests of MAX_MODEL_LEN tokens or more are left out, and drawn
    anew.
    """
    prompts, outputs = (histogram.draw(rng, n) for histogram in FIGURE_11[data_set])
    while (long := np.flatnonzero(prompts + outputs >= MAX_MODEL_LEN)).size:
        for lengths, histogram in zip((prompts, outputs), FIGURE_11[data_set], strict=True):
            lengths[long] = histogram.draw(rng, long.size)
    return prompts, outputs
