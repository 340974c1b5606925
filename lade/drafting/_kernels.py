"""Every Numba function of drafting, and nothing else; `ngram_pool/_kernels.py` says why.

Logits are taken as the integers of their bits, int16 for bfloat16 and int32 for float32, because
compilers turn the search for the largest integer of a slice into vector instructions. Positive
numbers are in the order of their bits; negative ones in the reverse order. `LEAST` is the smallest
integer, the bits of -0.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngram_pool._kernels import NONE, Float64Array, Int32Array, Int64Array, kernel

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


@kernel
def add_children(
    nodes: Int32Array,
    probs: Float64Array,
    token_ids: Int32Array,
    worths: Float64Array,
    vocab_size: int,
    whole: Int32Array,
    whole_probs: Float64Array,
    places: Int64Array,
) -> int:
    """Merge a draft with new children of its root, both likeliest first; return how many there are.

    A probability that rises counts as the one before it, so that parents stay first.

    Args:
        nodes: int32 [3, num_nodes], tokens, parents and depths of the draft.
        probs: [num_nodes], of the draft.
        token_ids, worths: [num_new], the new children; those from `vocab_size` on are left out.
        whole: int32 [3, most], written.
        whole_probs: [most], written.
        places: int64 [num_nodes], scratch.
    """
    num = old = new = 0
    least = np.inf
    while num < whole.shape[1]:
        while new < token_ids.shape[0] and token_ids[new] >= vocab_size:
            new += 1
        if old < probs.shape[0]:
            least = min(least, probs[old])
        if old == probs.shape[0] and new == token_ids.shape[0]:
            break
        if new < token_ids.shape[0] and (old == probs.shape[0] or worths[new] > least):
            whole[0, num], whole[1, num], whole[2, num] = token_ids[new], NONE, 1
            whole_probs[num] = worths[new]
            new += 1
        else:
            parent = nodes[1, old]
            whole[0, num], whole[2, num] = nodes[0, old], nodes[2, old]
            whole[1, num] = NONE if parent == NONE else places[parent]
            whole_probs[num] = least
            places[old] = num
            old += 1
        num += 1
    return num
