"""Initial weights of a pool's sources, before answers have taught it better ones.

Fitted by the pool's own learning (`_kernels.learn`, seven passes at decreasing rates, with and
without a table of the target's successors) to greedy answers of SmolLM2-135M-Instruct in bfloat16
to 112 Spec-Bench prompts, without answers that end in loops. Weights fitted to one half of the
prompts accepted as many tokens on the other half as weights fitted to that half, to within 1 %.
"""

import numpy as np

from ngram_pool._kernels import Float64Array

# Rows and columns as in `_kernels.py`. The columns are: text, harvested pair, harvested single,
# prewarmed pair, prewarmed single, skip; length, count, newest, in answer, in prompt; the silence
# of the first five; bias.
# fmt: off
_HUNDREDTHS = (
    # MATCH, last token not prewarmed: none; length 1, 2, 3-4, 5-8, 9 or more, unanimous.
    (100, 30, 30, 40, 30, -55, 0, 0, 0, 0, 0, 22, 22, 22, 15, 22, -878),
    (86, 30, 38, 26, 30, -22, -4, -5, -8, 18, 11, 16, 0, 47, 10, 0, -900),
    (91, 29, 29, 29, 30, 0, -7, 41, -6, -1, 8, 9, 40, 34, 2, -2, -902),
    (96, 34, 24, 35, 30, 1, -3, 10, -2, -3, 11, 4, 15, 29, -4, 1, -899),
    (95, 38, 27, 28, 30, -27, -7, 16, -3, 11, 6, 18, 32, 51, 16, 13, -887),
    (104, 41, 34, 28, 30, -13, -8, 49, 2, -7, -2, 8, 13, 21, 16, 12, -888),
    # the same lengths, divided.
    (100, 39, 34, 37, 30, 30, -7, -47, -44, 53, 11, 24, -18, -32, 0, -5, -905),
    (93, 25, 26, 36, 30, 33, 7, 14, 5, 32, 15, 42, 3, -23, 35, -23, -923),
    (92, 21, 28, 37, 30, 10, 5, 5, 34, -20, 2, 40, -37, -38, 40, 17, -883),
    (94, 32, 31, 23, 30, -25, -6, 31, 20, -17, 12, 53, 50, 30, 0, -13, -913),
    (103, 26, 23, 25, 30, -21, 10, 0, 14, -26, -71, 5, 7, 7, 40, 27, -873),
    # as the first block, last token prewarmed.
    (100, 30, 30, 42, 53, 36, 0, 0, 0, 0, 0, -19, -19, -19, 3, 57, -919),
    (87, 30, 32, 37, 34, 5, -4, -9, -7, 22, 17, 11, -4, -17, 10, 29, -904),
    (95, 17, 33, 29, 30, 21, -4, 14, -3, -17, 20, -4, 6, -14, 4, 11, -910),
    (100, 24, 26, 18, 25, 3, 4, 2, 1, 2, 13, -5, 4, 12, 8, 12, -904),
    (100, 31, 28, 23, 25, -24, 3, 13, 0, 3, 2, 12, 15, 25, 19, 3, -888),
    (106, 39, 35, 43, 31, -14, 1, 33, 3, -9, 7, 4, 6, 10, -9, 10, -890),
    # as the second block, last token prewarmed.
    (95, 30, 34, 35, 32, 33, -2, -88, -32, 49, 31, -4, -10, -34, -13, 9, -910),
    (97, 23, 23, 29, 27, 65, 2, -22, 11, 73, 53, 62, -26, -43, -15, 1, -910),
    (89, 23, 30, 27, 19, 25, 32, -1, 10, 11, 42, 62, -53, -4, -3, -7, -875),
    (96, 25, 20, 26, 21, 2, 13, 21, -9, 38, 32, 41, -15, -36, 23, -9, -882),
    (101, 30, 18, 22, 31, 8, 21, -9, 7, -9, -29, -15, -14, -16, 31, 34, -877),
    # ORIGIN: earlier text, prompt, answer.
    (-31, 1, -6, 9, 11, 45, 2, 24, -32, 63, 93, 72, 12, 8, 90, 103, -24),
    (-22, -10, -13, 0, -6, -4, 20, 18, 41, 111, 105, 180, 22, -1, 39, 52, 23),
    (-28, -3, -11, 6, -7, 29, 26, 25, -15, 29, -5, 134, -18, 6, 100, 44, 82),
    # KNOWN pairs: none, harvested, prewarmed, both.
    (-7, 0, -8, 0, 15, 41, -7, 41, -11, 40, 7, 142, -11, 6, -11, 118, -11),
    (-23, -4, -8, 0, 6, 26, -8, 5, -6, 55, 66, 61, 21, -6, 56, 56, 56),
    (-27, 0, -10, 10, -8, 9, 40, 36, 10, 48, 20, 67, -6, 28, 94, 34, -6),
    (-24, -9, -5, 5, -15, -6, 21, -15, 1, 60, 100, 116, 12, -16, 89, -11, 41),
)
# fmt: on


def first_weights() -> Float64Array:
    """Return a new array of the initial weights, float64 [NUM_WEIGHT_ROWS, NUM_WEIGHTS]."""
    return np.array(_HUNDREDTHS, np.float64) / 100
