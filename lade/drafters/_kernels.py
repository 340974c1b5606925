"""Every Numba function of the drafters, and nothing else; `ngram_pool/_kernels.py` says why.

They hold the GIL: each takes a few microseconds.
"""

import numpy as np
from numpy.typing import NDArray

from ngram_pool._kernels import Int32Array, Int64Array, kernel_with_gil

Floats = NDArray[np.float64]


@kernel_with_gil
def join(
    token_ids: Int32Array,
    parents: Int32Array,
    probs: Floats,
    starts: Int64Array,
    sources: Int64Array,
    promises: Floats,
    worths: Floats,
    agreement: Floats,
    max_nodes: int,
    joined: Int32Array,
    joined_probs: Floats,
) -> int:
    """Join several drafts to one: equal tokens on equal paths become one node.

    Given its parent, a node comes unless all sources that propose it are wrong, as if they were
    wrong independently; siblings come with a probability of at most 1 together. How far that holds
    is known by which sources agree on the node: `agreement`.

    Args:
        token_ids, parents, probs: of the nodes of one draft after the other [num_nodes].
        starts: int64 [num_drafts + 1], where each draft begins, and the end.
        sources: int64 [num_drafts], the source of each draft.
        promises: lower bounds of the intervals of probabilities, but the first.
        worths: float64 [num_sources, num_intervals], acceptance over promise of each source.
        agreement: float64 [2 ** num_sources, num_intervals], the same by the set of sources that
            propose a node, one bit each; the promise is what the joined drafts promise.
        max_nodes: maximum number of nodes to keep, best first.
        joined: int32 [4, num_nodes], written: tokens, parents, depths and sets of sources.
        joined_probs: float64 [2, num_nodes], written: probabilities, and what was promised.

    Returns:
        The number of nodes.
    """
    num_all = token_ids.shape[0]
    tokens = np.empty(num_all, np.int32)
    above = np.empty(num_all, np.int64)
    depths = np.empty(num_all, np.int32)
    sets = np.zeros(num_all, np.int32)
    misses = np.ones(num_all)  # probability that all sources are wrong, given the parent
    place_of = np.empty(num_all, np.int64)  # joined node of each node
    believed = np.empty(num_all)
    first_child = np.full(num_all + 1, -1)  # of the root, then of each joined node
    next_sibling = np.full(num_all, -1)
    num = 0
    for draft in range(sources.shape[0]):
        start, source = starts[draft], sources[draft]
        for node in range(start, starts[draft + 1]):
            parent = -1 if parents[node] < 0 else place_of[start + parents[node]]
            most = 1.0 if parents[node] < 0 else believed[start + parents[node]]
            interval = np.searchsorted(promises, probs[node], "right")
            believed[node] = min(most, probs[node] * worths[source, interval])
            place = first_child[parent + 1]
            while place >= 0 and tokens[place] != token_ids[node]:
                place = next_sibling[place]
            if place < 0:
                place = num
                num += 1
                tokens[place], above[place] = token_ids[node], parent
                depths[place] = 1 if parent < 0 else depths[parent] + 1
                next_sibling[place] = first_child[parent + 1]
                first_child[parent + 1] = place
            place_of[node] = place
            if not sets[place] & (1 << source):  # a source may propose a token twice
                sets[place] |= 1 << source
                misses[place] *= 1.0 - (believed[node] / most if most > 0 else 0.0)
    sums = np.zeros(num + 1)
    for place in range(num):
        sums[above[place] + 1] += 1.0 - misses[place]
    promised, corrected = np.empty(num), np.empty(num)
    for place in range(num):
        parent = above[place]
        given = (1.0 - misses[place]) / max(1.0, sums[parent + 1])
        promised[place] = given if parent < 0 else given * promised[parent]
        interval = np.searchsorted(promises, promised[place], "right")
        most = 1.0 if parent < 0 else corrected[parent]
        corrected[place] = min(most, promised[place] * agreement[sets[place], interval])
    order = np.argsort(-corrected, kind="mergesort")  # stable: of equals, parents stay first
    new_place = np.empty(num, np.int64)
    num_kept = min(num, max_nodes)
    for rank in range(num_kept):
        place = order[rank]
        new_place[place] = rank
        joined[0, rank] = tokens[place]
        joined[1, rank] = -1 if above[place] < 0 else new_place[above[place]]
        joined[2, rank], joined[3, rank] = depths[place], sets[place]
        joined_probs[0, rank], joined_probs[1, rank] = corrected[place], promised[place]
    return num_kept


@kernel_with_gil
def count_agreement(
    token_ids: Int32Array,
    parents: Int32Array,
    depths: Int32Array,
    sets: Int32Array,
    promised: Floats,
    emitted: Int64Array,
    promises: Floats,
    sums: Floats,
) -> None:
    """Compare what joined drafts promised with what was emitted, as far as that is known.

    Args:
        token_ids, parents, depths, sets, promised: of the joined nodes, as `join` wrote them.
        emitted: int64, the tokens of the step.
        promises: lower bounds of the intervals of probabilities, but the first.
        sums: float64 [2 ** num_sources, 2, num_intervals], added to: what was promised, what came.
    """
    came = np.zeros(len(token_ids), np.bool_)
    for node in range(len(token_ids)):
        depth, parent = depths[node], parents[node]
        if depth > len(emitted):
            continue  # nobody knows
        is_possible = parent < 0 or came[parent]
        came[node] = is_possible and token_ids[node] == emitted[depth - 1]
        interval = np.searchsorted(promises, promised[node], "right")
        sums[sets[node], 0, interval] += promised[node]
        sums[sets[node], 1, interval] += came[node]


@kernel_with_gil
def matched_depth(token_ids: Int32Array, parents: Int32Array, emitted: Int64Array) -> int:
    """Return how many of the first emitted tokens are a path of a draft."""
    node, depth = -1, 0
    for child in range(len(token_ids)):  # parents come before children
        if depth < len(emitted) and parents[child] == node and token_ids[child] == emitted[depth]:
            node = child
            depth += 1
    return depth
