"""Every Numba function of drafting, and nothing else; `ngram_pool/_kernels.py` says why.

Logits are taken as the integers of their bits, int16 for bfloat16 and int32 for float32, because
compilers turn the search for the largest integer of a slice into vector instructions. Positive
numbers are in the order of their bits; negative ones in the reverse order. `LEAST` is the smallest
integer, the bits of -0.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngram_pool._kernels import Float64Array, Int32Array, Int64Array, kernel

Bits = NDArray[np.integer[Any]]
_BLOCK = 256  # logits; a block that has none of the highest is passed over
# 2 ** (x + this) as the bits of a float32, to 3 %, by their linear interpolation.
_EXPONENT = 126.957
_ONE = float(2**23)
_LEAST_LOG2 = -100.0


@kernel
def largest(block: Bits) -> int:
    """Return the largest of some integers."""
    most = block[0]
    for i in range(block.shape[0]):
        most = max(most, block[i])
    return int(most)


@kernel
def smallest(block: Bits) -> int:
    """Return the smallest of some integers."""
    least = block[0]
    for i in range(block.shape[0]):
        least = min(least, block[i])
    return int(least)


@kernel
def rank_rows(
    bits: Bits,
    unsigned: Bits,
    least: int,
    infinity: int,
    keys: Int64Array,
    token_ids: Int64Array,
) -> bool:
    """Find the highest logits of each row, highest first, the first of equals first.

    Args:
        bits: [num_rows, vocab_size], of the logits.
        unsigned: the same bits.
        least, infinity: bits of -0 and of infinity.
        keys: int64 [num_rows, num_ranked], scratch.
        token_ids: int64 [num_rows, num_ranked], written; num_ranked is at most vocab_size.

    Returns:
        Whether all are ranked; if not, some logit is infinite or NaN.
    """
    num_ranked = keys.shape[1]
    for row in range(bits.shape[0]):
        num = 0
        lowest = -(2**62)  # of those ranked, once there are as many
        for start in range(0, bits.shape[1], _BLOCK):
            block = bits[row, start : start + _BLOCK]
            # The largest unsigned bits are the most negative number, or NaN.
            if largest(unsigned[row, start : start + _BLOCK]) > infinity - least:
                return False
            best = largest(block)
            if best >= infinity:
                return False
            if best < 0:
                best = least - smallest(block)
            if best <= lowest:
                continue
            for i in range(block.shape[0]):
                key = int(block[i])
                if key < 0:
                    key = least - key
                if key <= lowest:
                    continue
                place = min(num, num_ranked - 1)
                while place > 0 and keys[row, place - 1] < key:
                    keys[row, place] = keys[row, place - 1]
                    token_ids[row, place] = token_ids[row, place - 1]
                    place -= 1
                keys[row, place] = key
                token_ids[row, place] = start + i
                num = min(num + 1, num_ranked)
                if num == num_ranked:
                    lowest = int(keys[row, num_ranked - 1])
    return True


@kernel
def estimate_probs(
    bits: Bits,
    shift: int,
    step: int,
    ranked: NDArray[np.float32],
    scratch: Int32Array,
    values: NDArray[np.float32],
    sums: Float64Array,
    probs: NDArray[np.float32],
) -> None:
    """Estimate the probabilities of the highest logits of each row, from a part of the others.

    Args:
        bits: [num_rows, vocab_size], of the logits.
        shift: by how many bits to shift them to have those of a float32.
        step: between the logits that are summed.
        ranked: [num_rows, num_ranked], the highest logits, highest first; all are finite.
        scratch: int32 [vocab_size / step, rounded up, and then up to a multiple of 8].
        values: the same memory as float32.
        sums: float64 [8], scratch.
        probs: float32 [num_rows, num_ranked], written.
    """
    num_ranked = ranked.shape[1]
    num = (bits.shape[1] + step - 1) // step
    for row in range(bits.shape[0]):
        top, least = ranked[row, 0], ranked[row, num_ranked - 1]
        for i in range(num):
            scratch[i] = np.int32(bits[row, i * step]) << shift
        for i in range(num):
            # The ranked ones may be among these: they are cut to the least, and subtracted below.
            log2 = (min(values[i], least) - top) * np.float32(1 / math.log(2))
            log2 = max(log2, np.float32(_LEAST_LOG2)) + np.float32(_EXPONENT)
            scratch[i] = np.int32(log2 * np.float32(_ONE))
        for i in range(num, scratch.shape[0]):
            scratch[i] = 0
        for j in range(8):
            sums[j] = 0.0
        for i in range(0, scratch.shape[0], 8):
            for j in range(8):
                sums[j] += values[i + j]
        of_ranked = 0.0
        for j in range(num_ranked):
            of_ranked += math.exp(ranked[row, j] - top)
        of_others = 0.0
        for j in range(8):
            of_others += sums[j]
        of_others = step * of_others - num_ranked * math.exp(least - top)
        total = of_ranked + max(0.0, of_others)
        for j in range(num_ranked):
            probs[row, j] = math.exp(ranked[row, j] - top) / total
