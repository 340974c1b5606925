"""Initial weights of a pool's sources, before it learns from answers.

`python -m benchmarks fit` fitted them to 57 greedy answers of SmolLM2-135M-Instruct in float32, to
prompts of one half of Spec-Bench's, without answers that end in a loop. Every published figure is
of the other half. It fits by the pool's learning (`_kernels.learn`), in seven passes at decreasing
rates, with and without a prewarmed table. The run is in docs/results/weights.json.
Layers begin with the weights of earlier text.
"""

import numpy as np

from ngram_pool._kernels import EARLIER, LAYER_ROW, NUM_WEIGHT_ROWS, ORIGIN_ROW, Float64Array

# Rows and columns as in `_kernels.py`. The columns are: text, harvested pair, harvested single;
# length, count, newest, in answer, in prompt; the silence of the first three; bias.
# fmt: off
_HUNDREDTHS = (
    # MATCH: none; length 1, 2, 3-4, 5-8, 9 or more, unanimous.
    (100, 32, 50, 0, 0, 0, 0, 0, -24, 23, 102, -945),
    (81, 34, 41, -1, 6, -3, -6, 8, 24, 4, 39, -925),
    (91, 31, 28, -2, 13, -1, 5, -4, 19, -3, 16, -915),
    (90, 34, 26, 0, -1, -1, -11, 8, 78, 44, 38, -855),
    (98, 31, 22, -2, 3, 0, -4, 2, 35, 31, 38, -888),
    (106, 26, 24, -1, 5, 1, 1, -1, 6, 20, 13, -909),
    # the same lengths, divided.
    (77, 43, 42, -1, 7, -7, 23, -13, -21, 47, 11, -962),
    (91, 28, 35, -1, 2, 10, 13, 11, 41, 13, -19, -911),
    (93, 26, 24, 14, -1, -6, 1, 19, 62, -12, -54, -862),
    (104, 23, 23, 4, 13, 3, -5, 16, 60, -12, -2, -895),
    (97, 33, 21, 13, -5, -3, 12, -11, -14, 29, 34, -890),
    # ORIGIN: earlier text, prompt, answer.
    (-30, -3, 10, -1, 23, -12, 12, 10, 30, 18, 95, 61),
    (-18, 7, 2, 15, 15, 23, -7, 40, 139, 87, 77, -5),
    (-22, 7, -5, 9, 4, -18, 23, -14, 96, 78, 44, 118),
    # KNOWN pairs: none, by the pool, by a layer.
    (-14, 0, 9, -5, 38, -2, 1, 12, 129, 27, 131, 27),
    (-33, 4, -3, 14, 13, -4, 25, 24, 78, 56, 17, 133),
    (-24, 7, 1, 15, -9, -2, 2, 0, 58, 100, 69, 14),
)
# fmt: on


def first_weights() -> Float64Array:
    """Return a new array of the initial weights, float64 [NUM_WEIGHT_ROWS, NUM_WEIGHTS]."""
    fitted = np.array(_HUNDREDTHS, np.float64) / 100
    of_layers = np.tile(fitted[ORIGIN_ROW + EARLIER], (NUM_WEIGHT_ROWS - LAYER_ROW, 1))
    return np.concatenate([fitted, of_layers])
