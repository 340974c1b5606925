"""Initial weights of a pool's sources, before it learns from answers.

`python -m benchmarks fit` fitted them to 108 greedy answers of SmolLM2-135M-Instruct in bfloat16,
to one half of Spec-Bench's prompts, without answers that end in a loop. Every published figure is
of the other half. It fits by the pool's learning (`_kernels.learn`), in seven passes at decreasing
rates, with and without a table of the target's successors. The run is in docs/results/weights.json.
Layers begin with the weights of earlier text.
"""

import numpy as np

from ngram_pool._kernels import EARLIER, LAYER_ROW, NUM_WEIGHT_ROWS, ORIGIN_ROW, Float64Array

# Rows and columns as in `_kernels.py`. The columns are: text, harvested pair, harvested single,
# prewarmed pair, prewarmed single, skip; length, count, newest, in answer, in prompt; the silence
# of the first five; bias.
# fmt: off
_HUNDREDTHS = (
    # MATCH, last token not prewarmed: none; length 1, 2, 3-4, 5-8, 9 or more, unanimous.
    (100, 36, 51, 30, 30, -1, 0, 0, 0, 0, 0, -12, -1, 99, -12, -12, -933),
    (87, 38, 37, 30, 30, -7, -5, 28, -11, -6, -6, 12, 19, 45, -10, -10, -931),
    (89, 32, 33, 30, 30, -13, -9, 40, -7, -7, 1, 17, 38, 37, 3, 3, -918),
    (91, 34, 26, 30, 30, 13, -3, 32, -5, -2, -10, 23, 23, 28, 13, 13, -909),
    (98, 32, 22, 30, 30, -4, 2, 7, -1, 19, -10, 13, 15, 31, 11, 11, -910),
    (105, 29, 28, 30, 30, -9, 5, 30, 3, -4, 4, -3, 7, 6, 2, 2, -919),
    # the same lengths, divided.
    (87, 40, 41, 30, 30, 10, 2, -36, -30, 40, -12, -22, 25, 6, -16, -16, -937),
    (91, 22, 41, 30, 30, 17, 16, -11, 13, 31, 42, 44, -16, 55, -20, -20, -941),
    (95, 26, 19, 30, 30, 17, 12, -2, 22, -3, 26, 63, -15, -93, 16, 16, -905),
    (99, 25, 16, 30, 30, -30, -6, 17, 23, -8, 13, 42, 2, -28, 11, 11, -910),
    (100, 22, 19, 30, 30, -7, 28, -18, 4, 0, -5, 21, -12, -31, 24, 24, -897),
    # as the first block, last token prewarmed.
    (100, 34, 39, 32, 50, 23, 0, 0, 0, 0, 0, -43, -30, 21, 47, 106, -964),
    (86, 35, 35, 33, 34, 34, -5, 22, -11, -14, 9, 4, -3, -16, 17, 21, -938),
    (93, 30, 32, 36, 25, 9, -5, 13, -4, -12, 18, 16, 14, 9, -1, 14, -914),
    (96, 30, 22, 29, 32, 19, 2, 16, -2, -11, 12, 20, -8, 0, 24, 34, -905),
    (101, 33, 24, 33, 28, 10, 0, 4, 1, 6, 4, 8, 9, 23, 3, 4, -912),
    (106, 27, 29, 30, 29, -9, 0, 31, 3, 2, -4, 8, 22, 16, 9, 6, -906),
    # as the second block, last token prewarmed.
    (84, 36, 40, 41, 26, 9, -2, -60, -24, 55, -1, -34, 10, 5, 56, -18, -963),
    (92, 24, 44, 30, 22, 12, 3, -24, 7, 34, 24, 34, -15, 61, -29, -6, -936),
    (96, 29, 21, 31, 22, 12, 11, -12, 15, 3, 23, 54, 15, -70, 42, -11, -891),
    (100, 27, 20, 29, 26, -22, -2, 5, 10, -7, 19, 30, -10, -11, 17, 23, -907),
    (101, 21, 19, 32, 28, -7, 28, -22, 2, 6, -23, 16, -16, -28, 45, 26, -889),
    # ORIGIN: earlier text, prompt, answer.
    (-42, -6, 3, 13, 4, 23, 18, 25, -23, 54, 50, 38, -8, 64, 95, 105, 7),
    (-35, 0, 3, 9, -3, 11, 26, 25, 54, 44, 85, 142, 40, 68, 81, 64, -26),
    (-26, 9, -7, 4, -10, 42, 25, 12, -26, 26, -13, 134, 40, 34, 76, 52, 44),
    # KNOWN pairs: none, harvested, prewarmed, both.
    (-12, 0, 9, 0, 20, 35, -9, 40, 10, 22, 29, 138, -38, 114, -38, 152, -38),
    (-29, 4, -5, 0, 5, 1, -3, 11, -15, 45, 12, 38, 92, 35, 29, 70, 29),
    (-31, 0, 1, 28, -15, 30, 52, 8, 3, -1, 14, 52, -21, 25, 184, 20, -21),
    (-31, -1, -7, -2, -19, 9, 30, 2, 8, 57, 67, 86, 39, -8, 77, -22, 56),
)
# fmt: on


def first_weights() -> Float64Array:
    """Return a new array of the initial weights, float64 [NUM_WEIGHT_ROWS, NUM_WEIGHTS]."""
    fitted = np.array(_HUNDREDTHS, np.float64) / 100
    of_layers = np.tile(fitted[ORIGIN_ROW + EARLIER], (NUM_WEIGHT_ROWS - LAYER_ROW, 1))
    return np.concatenate([fitted, of_layers])
