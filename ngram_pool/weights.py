"""Initial weights of a pool's sources, before it learns from answers.

`python -m benchmarks fit` fitted them to 57 greedy answers of SmolLM2-135M-Instruct in float32, to
prompts of one half of Spec-Bench's, without answers that end in a loop. Every published figure is
of the other half. It fits by the pool's learning (`_kernels.learn`), in seven passes at decreasing
rates, with and without a prewarmed table. The run is in docs/results/weights.json.
Layers begin with the weights of earlier text.
"""

import numpy as np

from ngram_pool._kernels import EARLIER, LAYER_ROW, NUM_WEIGHT_ROWS, ORIGIN_ROW, Float64Array

# Rows and columns as in `_kernels.py`. The columns are: text, harvested pair, harvested single,
# instead, after instead, unigram; length, count, newest, in answer, in prompt; the silence of the
# first three, of each and of all; bias.
# fmt: off
_HUNDREDTHS = (
    # MATCH: none; length 1, 2, 3-4, 5-8, 9 or more, unanimous.
    (100, 28, 47, 26, 38, 53, 0, 0, 0, 0, 0, 97, 101, 113, 0, -924),
    (85, 35, 35, 31, 35, 23, -1, 7, -3, -8, 9, 144, 115, 66, 0, -902),
    (93, 28, 35, 28, 31, 29, -1, 9, -1, -4, 4, 115, 90, 93, 0, -917),
    (96, 33, 34, 12, 16, 16, 1, 0, 0, -8, 7, 160, 117, 125, 0, -865),
    (104, 26, 27, 29, 29, 34, 1, 2, 0, -3, 4, 116, 110, 113, 0, -900),
    (108, 27, 27, 24, 29, 21, 2, 2, 1, 1, 0, 92, 100, 104, 0, -920),
    # the same lengths, divided.
    (80, 34, 37, 37, 30, 25, -1, -2, -9, 15, -6, 112, 104, 70, 0, -923),
    (94, 27, 32, 37, 32, 25, -1, 2, 4, 8, 7, 125, 83, 67, 0, -907),
    (96, 28, 22, 35, 26, 23, 6, 1, -3, 1, 14, 150, 93, 42, 0, -864),
    (105, 30, 13, 29, 25, 33, 1, 7, 0, -3, 8, 86, 55, 93, 0, -919),
    (102, 35, 21, 23, 19, 24, 8, 0, -4, 8, -7, 68, 114, 125, 0, -897),
    # ORIGIN: earlier text, prompt, answer.
    (-22, -4, 3, 1, -2, -11, 2, 11, -15, 9, 6, 11, -23, -22, 0, 46),
    (-6, 5, -2, -13, -8, -5, 7, 9, 26, -7, 39, 84, 46, -35, 0, 23),
    (-10, 1, -2, -6, -12, -7, 4, 7, -26, 5, -3, 71, -42, -33, 0, 125),
    # KNOWN pairs: none, by the pool, by a layer.
    (-12, 0, 2, -4, -6, -8, 3, 20, 0, 0, 20, 81, 30, -51, 0, 30),
    (-25, 1, -2, -14, -16, -16, 10, 8, -15, 7, 21, 84, -48, -39, 0, 164),
    (-25, 1, -2, -14, -16, -16, 10, 8, -15, 7, 21, 84, -48, -39, 0, 164),
)
# fmt: on


def first_weights() -> Float64Array:
    """Return a new array of the initial weights, float64 [NUM_WEIGHT_ROWS, NUM_WEIGHTS]."""
    fitted = np.array(_HUNDREDTHS, np.float64) / 100
    of_layers = np.tile(fitted[ORIGIN_ROW + EARLIER], (NUM_WEIGHT_ROWS - LAYER_ROW, 1))
    return np.concatenate([fitted, of_layers])
