"""Initial weights of a pool's sources, before it learns from answers.

`python -m benchmarks fit` fits them to greedy answers of SmolLM2-135M-Instruct, from its 4-bit
file, to prompts of one half of Spec-Bench's, without answers that end in a loop. Every published
figure is of other prompts. It fits by the pool's learning (`_kernels.learn`), in seven passes at
decreasing rates. The run is in docs/results/weights.json; it had no prewarmed table, so layers that
know a pair begin with the weights of a pool that does, and layers' text with those of earlier text.
"""

import numpy as np

from ngram_pool._kernels import EARLIER, LAYER_ROW, NUM_WEIGHT_ROWS, ORIGIN_ROW, Float64Array

# Rows and columns as in `_kernels.py`. The columns are: text, harvested pair, harvested single,
# instead, after instead, unigram; length, count, newest, in answer, in prompt; the silence of the
# first three, of each and of all; bias.
# fmt: off
_HUNDREDTHS = (
    # MATCH: none; length 1, 2, 3-4, 5-8, 9 or more, unanimous.
    (100, 30, 45, 26, 36, 52, 0, 0, 0, 0, 0, 93, 94, 109, 111, -928),
    (84, 33, 33, 31, 34, 25, -1, 7, -3, -3, 4, 145, 118, 129, 18, -902),
    (92, 28, 33, 28, 29, 30, -1, 9, -1, -2, 3, 116, 99, 104, 63, -916),
    (96, 33, 32, 13, 16, 17, 1, 0, 0, -7, 6, 163, 124, 135, 74, -863),
    (103, 26, 27, 29, 33, 34, 0, 2, 0, -3, 3, 121, 116, 119, 83, -897),
    (106, 29, 28, 25, 27, 21, 1, 3, 1, 0, 0, 98, 102, 106, 92, -917),
    # the same lengths, divided.
    (83, 30, 38, 38, 29, 26, -1, 1, -7, 15, -7, 98, 95, 98, 90, -939),
    (93, 28, 33, 38, 33, 26, -2, 3, 7, 10, 8, 124, 91, 81, 60, -920),
    (96, 28, 23, 34, 25, 23, 7, 2, -1, 2, 14, 152, 99, 48, 78, -875),
    (103, 31, 17, 28, 24, 33, 3, 7, 2, -4, 8, 110, 70, 87, 26, -919),
    (100, 35, 25, 23, 23, 22, 7, 0, -3, 8, -7, 82, 118, 121, 70, -897),
    # ORIGIN: earlier text, prompt, answer.
    (-22, -4, 3, 1, -2, -11, 0, 14, -12, 9, 6, 13, -13, -2, -57, 41),
    (-13, 5, 1, -12, -7, -3, 14, 13, 25, -5, 32, 113, 54, 15, -142, 11),
    (-12, 1, 0, -6, -11, -7, 0, 7, -19, 12, -6, 77, -15, 23, -136, 106),
    # KNOWN pairs: none, by the pool, by a layer.
    (-20, 0, 6, -4, -4, -7, 5, 23, 2, 6, 8, 109, 17, 44, -151, 17),
    (-27, 2, -2, -13, -16, -14, 8, 10, -9, 10, 23, 93, 9, -7, -183, 140),
    (-27, 2, -2, -13, -16, -14, 8, 10, -9, 10, 23, 93, 9, -7, -183, 140),
)
# fmt: on


def first_weights() -> Float64Array:
    """Return a new array of the initial weights, float64 [NUM_WEIGHT_ROWS, NUM_WEIGHTS]."""
    fitted = np.array(_HUNDREDTHS, np.float64) / 100
    of_layers = np.tile(fitted[ORIGIN_ROW + EARLIER], (NUM_WEIGHT_ROWS - LAYER_ROW, 1))
    return np.concatenate([fitted, of_layers])
