"""Every Numba function of drafting, and nothing else; `ngram_pool/_kernels.py` says why.

Logits are taken as the integers of their bits, int16 for bfloat16 and int32 for float32, because
compilers turn the search for the largest integer of a slice into vector instructions. Positive
numbers are in the order of their bits; negative ones in the reverse order. `LEAST` is the smallest
integer, the bits of -0.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngram_pool._kernels import Int64Array, kernel

Bits = NDArray[np.integer[Any]]
_BLOCK = 256  # logits; a block without one of the highest is skipped


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
