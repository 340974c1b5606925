"""Functions that build, narrow and validate drafts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngram_pool import Draft
from ngram_pool._kernels import MAX_TOKEN_ID

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


def draft_of(
    token_ids: Sequence[int] | Ints,
    parents: Sequence[int] | Ints,
    probs: Sequence[float] | Floats | float = 1.0,
) -> Draft:
    """Return a draft of nodes, each after its parent, with their depths."""
    num_nodes = len(token_ids)
    parents = np.array(parents, np.int32).reshape(num_nodes)
    depths: list[int] = []
    for parent in parents.tolist():
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return Draft(
        np.array(token_ids, np.int32).reshape(num_nodes),
        parents,
        np.array(depths, np.int32).reshape(num_nodes),
        np.full(num_nodes, probs, np.float64),
    )


def chain(token_ids: Sequence[int], probs: Sequence[float] | float = 1.0) -> Draft:
    """Return a draft of one path."""
    return draft_of(token_ids, range(-1, len(token_ids) - 1), probs)


def joined(drafts: Sequence[Draft], max_nodes: int) -> Draft:
    """Return one draft, best nodes first, out of several: equal tokens on equal paths are one node.

    Given its parent, a node comes unless all sources that propose it are wrong, as if they were
    wrong independently; siblings come with a probability of at most 1 together. Of simulated
    sources, that is off by 0.1 to 0.2 where sources err together; the budget, which calibrates
    joined drafts as it does all others, learns by how much.
    """
    if len(drafts) == 1:
        return drafts[0].first(max_nodes)
    indices: dict[tuple[int, int], int] = {}  # by parent's index and token
    misses: list[float] = []  # probability that all sources are wrong, given the parent
    for draft in drafts:
        nodes = zip(
            draft.parents.tolist(), draft.token_ids.tolist(), draft.probs.tolist(), strict=True
        )
        mine = [(-1, 1.0)]  # index and probability of the root and of each node, at node + 1
        for parent, token_id, prob in nodes:
            above, most = mine[parent + 1]
            index = indices.setdefault((above, token_id), len(indices))
            if index == len(misses):
                misses.append(1.0)
            misses[index] *= 1.0 - min(1.0, prob / most if most > 0 else 0.0)
            mine.append((index, prob))
    sums = [0.0] * (1 + len(indices))  # of siblings, by parent
    for (above, _), miss in zip(indices, misses, strict=True):
        sums[above + 1] += 1.0 - miss
    probs = [1.0]  # the root's, then of each index
    for (above, _), miss in zip(indices, misses, strict=True):
        probs.append(probs[above + 1] * (1.0 - miss) / max(1.0, sums[above + 1]))
    keys = [*indices]
    return best_first(
        [token_id for _, token_id in keys], [above for above, _ in keys], probs[1:], max_nodes
    )


def best_first(
    token_ids: Sequence[int] | Ints, parents: Sequence[int] | Ints, probs: Any, max_nodes: int
) -> Draft:
    """Return a draft of the likeliest of some nodes; of equals, parents stay first."""
    ids, above = np.array(token_ids, np.int32), np.array(parents, np.int32)
    likely = np.array(probs, np.float64)
    order = (-likely).argsort(kind="stable")[:max_nodes]
    indices = np.full(len(likely) + 1, -1, np.int32)  # new index of each node; the last is -1's
    indices[order] = np.arange(len(order))
    return draft_of(ids[order], indices[above[order]], likely[order])


def after(token_ids: Sequence[int], draft: Draft) -> Draft:
    """Prepend a chain of tokens, each of probability 1, to a draft."""
    first = chain(token_ids)
    return draft_of(
        np.concatenate([first.token_ids, draft.token_ids]),
        np.concatenate([first.parents, draft.parents + len(first)]),
        np.concatenate([first.probs, draft.probs]),
    )


def narrowed(draft: Draft, max_candidates: int) -> Draft:
    """Return a draft without the nodes that would open more than `max_candidates` paths."""
    kept: dict[int, int] = {-1: -1}  # node -> node of the new draft
    leaves: set[int] = set()
    for node, parent in enumerate(draft.parents.tolist()):
        extends = parent in leaves
        if parent in kept and (extends or len(leaves) < max_candidates):
            kept[node] = len(kept) - 1
            leaves = (leaves - {parent}) | {node}
    if len(kept) == len(draft) + 1:
        return draft
    nodes = [*kept][1:]
    parents = [kept[parent] for parent in draft.parents[nodes].tolist()]
    return draft_of(draft.token_ids[nodes], parents, draft.probs[nodes])


def checked(draft: object, allowance: int) -> Draft:
    """Validate a drafter's draft and return it with its depths recomputed.

    The distribution of a drawn draft is left out: the result is verified like any other draft.

    Args:
        allowance: maximum number of nodes; later ones are dropped.

    Raises:
        TypeError: it is not a `Draft`, or an array has the wrong dtype.
        ValueError: the shapes of the arrays do not match, a parent does not come before its child,
            or a probability is not from 0 to 1.
    """
    if not isinstance(draft, Draft):
        raise TypeError(f"expected a Draft, got {type(draft).__name__}")
    arrays, shape = list[NDArray[Any]](), (len(draft.token_ids),)
    for name, kind in (("token_ids", np.integer), ("parents", np.integer), ("probs", np.floating)):
        array = np.asarray(getattr(draft, name))
        if array.shape != shape:
            raise ValueError(f"expected {name} of shape {[*shape]}, got {[*array.shape]}")
        if len(array) and not np.issubdtype(array.dtype, kind):
            raise TypeError(f"expected {name} of {kind.__name__}, got {array.dtype}")
        arrays.append(array[:allowance])
    token_ids, parents, probs = arrays
    if not ((parents >= -1) & (parents < np.arange(len(parents)))).all():
        raise ValueError(f"expected parents[i] from -1 to i - 1, got {parents.tolist()}")
    if not ((probs >= 0) & (probs <= 1)).all():  # False for NaN
        raise ValueError("expected probs from 0 to 1")
    # Ids outside the vocabulary are cut off later; here they only have to fit into int32.
    return draft_of(np.clip(token_ids, -1, MAX_TOKEN_ID).astype(np.int32), parents, probs)
