"""Every Numba function of drafting, and nothing else; `ngram_pool/_kernels.py` says why.

Logits are compared as the integers of their bits, because compilers turn the search for the largest
integer of a slice into vector instructions. Positive numbers are in the order of their bits;
negative ones in the reverse order.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngram_pool._kernels import kernel

Bits = NDArray[np.integer[Any]]
Float32Array = NDArray[np.float32]
Int32Array = NDArray[np.int32]
_BLOCK = 256  # logits; a block without one of the highest is skipped
_LEAST, _INFINITY = -(1 << 31), 0x7F800000  # bits of -0, and of infinity
# The bits of a float32 are about its logarithm, times and plus a number: so powers of e are had
# within 4 % without a call (Schraudolph, doi:10.1162/089976600300015033).
_PER_E, _ONE = np.float32(12102203.0), np.float32(1064866805.0)
SAMPLED = 16  # see `rank_rows`


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
    logits: Float32Array,
    bits: Bits,
    unsigned: Bits,
    powers: Float32Array,
    bits_of_powers: Bits,
    keys: Int32Array,
    ids: Int32Array,
    probs: Float32Array,
) -> bool:
    """Find the highest logits of each row, highest first, the first of equals first.

    The sum of the softmax is estimated from every 16th logit: logarithms of probabilities differ by
    about 0.2 from those with all logits, which take much longer.

    Args:
        logits: [num_rows, vocab_size].
        bits, unsigned: the same memory as integers.
        powers: float32 [vocab_size], scratch.
        bits_of_powers: the same memory as integers.
        keys: int32 [num_ranked], scratch; num_ranked is at most vocab_size.
        ids: int32 [num_rows, num_ranked], written.
        probs: float32 [num_rows, num_ranked], written.

    Returns:
        Whether all are ranked; if not, some logit is infinite or NaN.
    """
    num_ranked, vocab_size = ids.shape[1], logits.shape[1]
    step = SAMPLED if vocab_size > 4 * SAMPLED * num_ranked else 1
    for row in range(logits.shape[0]):
        num = 0
        lowest = -(2**62)  # of those ranked, once there are as many
        for start in range(0, vocab_size, _BLOCK):
            block = bits[row, start : start + _BLOCK]
            # The largest unsigned bits are the most negative number, or NaN.
            if largest(unsigned[row, start : start + _BLOCK]) > _INFINITY - _LEAST:
                return False
            best = largest(block)
            if best >= _INFINITY:
                return False
            if best < 0:
                best = _LEAST - smallest(block)
            if best <= lowest:
                continue
            for i in range(block.shape[0]):
                key = int(block[i])
                if key < 0:
                    key = _LEAST - key
                if key <= lowest:
                    continue
                place = min(num, num_ranked - 1)
                while place > 0 and keys[place - 1] < key:
                    keys[place] = keys[place - 1]
                    ids[row, place] = ids[row, place - 1]
                    place -= 1
                keys[place] = key
                ids[row, place] = start + i
                num = min(num + 1, num_ranked)
                if num == num_ranked:
                    lowest = int(keys[num_ranked - 1])
        top, least = logits[row, ids[row, 0]], logits[row, ids[row, num_ranked - 1]]
        num = 0
        for i in range(0, vocab_size, step):
            power = _PER_E * (min(logits[row, i], least) - top) + _ONE
            bits_of_powers[num] = np.int32(max(power, np.float32(0.0)))
            num += 1
        others = np.float32(0.0)
        for i in range(num):
            others += powers[i]
        whole = np.float32(0.0)
        for place in range(num_ranked):
            probs[row, place] = np.exp(logits[row, ids[row, place]] - top)
            whole += probs[row, place]
        # The ranked ones may be among the others, as the least of them: they are subtracted.
        whole += max(step * others - num_ranked * probs[row, num_ranked - 1], np.float32(0.0))
        for place in range(num_ranked):
            probs[row, place] /= whole
    return True
