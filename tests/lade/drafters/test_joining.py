"""Drafts are joined as a search of all their paths joins them."""

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lade.drafters.joining import joined
from lade.drafting.drafts import draft_of, matched_depth
from ngram_pool import Draft
from tests.lade.tiny import paths_of

Path = tuple[int, ...]


def tree_of(nodes: list[tuple[Path, float]]) -> Draft:
    """Return a draft of paths, parents before children."""
    place: dict[Path, int] = {(): -1}
    place |= {path: number for number, (path, _) in enumerate(nodes)}
    parents = [place[path[:-1]] for path, _ in nodes]
    return draft_of([path[-1] for path, _ in nodes], parents, [prob for _, prob in nodes])


@st.composite
def drafts(draw: Any) -> Draft:
    nodes: list[tuple[Path, float]] = []
    known: list[tuple[Path, float]] = [((), 1.0)]
    for _ in range(draw(st.integers(0, 12))):
        parent, most = draw(st.sampled_from(known))
        path = (*parent, draw(st.integers(0, 3)))
        if path not in [each for each, _ in known]:
            node = path, most * draw(st.floats(0.0, 1.0))
            nodes.append(node)
            known.append(node)
    nodes.sort(key=lambda node: -node[1])  # stable: parents stay before children of equal ones
    return tree_of(nodes)


def joined_plainly(drafts: list[Draft]) -> dict[Path, float]:
    """Return the probability of every path that a draft has."""
    sources: list[dict[Path, float]] = [
        {(): 1.0} | dict(zip(paths_of(draft), draft.probs.tolist(), strict=True))
        for draft in drafts
    ]
    all_paths = {path for mine in sources for path in mine if path}
    given_parent = {}
    for path in all_paths:
        miss = 1.0
        for mine in sources:
            if path in mine and mine[path[:-1]] > 0:
                miss *= 1 - mine[path] / mine[path[:-1]]
        given_parent[path] = 1 - miss
    found: dict[Path, float] = {(): 1.0}
    for path in sorted(all_paths, key=len):
        of_siblings = sum(p for other, p in given_parent.items() if other[:-1] == path[:-1])
        found[path] = found[path[:-1]] * given_parent[path] / max(1.0, of_siblings)
    del found[()]
    return found


@given(parts=st.lists(drafts(), min_size=2, max_size=3))
@settings(max_examples=150)
def test_a_joined_tree_is_that_of_all_paths(parts: list[Draft]) -> None:
    whole = joined(parts, 99)
    found = dict(zip(paths_of(whole), whole.probs.tolist(), strict=True))
    assert found == pytest.approx(joined_plainly(parts))
    assert len(found) == len(whole)  # no path twice
    assert (whole.parents < np.arange(len(found))).all()
    assert whole.depths.tolist() == [len(path) for path in found]
    assert (np.diff(whole.probs) <= 0).all()
    assert paths_of(joined(parts, 4)) == paths_of(whole)[:4]


def test_agreement_makes_more_of_a_token_and_a_dispute_less() -> None:
    one = tree_of([((5,), 0.6), ((5, 6), 0.3)])
    other = tree_of([((5,), 0.5), ((7,), 0.4)])
    whole = joined([one, other], 9)
    probs = dict(zip(paths_of(whole), whole.probs.tolist(), strict=True))
    # 5 comes unless both are wrong, 1 - 0.4 * 0.5 = 0.8; 0.8 and 0.4 cannot both be.
    assert probs[5,] == pytest.approx(0.8 / 1.2)
    assert probs[7,] == pytest.approx(0.4 / 1.2)
    assert probs[5, 6] == pytest.approx(probs[5,] * 0.5)  # more than 0.3: its parent is surer


@given(draft=drafts(), emitted=st.lists(st.integers(0, 3), max_size=5))
def test_the_matched_depth_is_that_of_the_longest_path(draft: Draft, emitted: list[int]) -> None:
    prefixes = {tuple(each) for each in accumulate(([token] for token in emitted), initial=[])}
    assert matched_depth(draft, emitted) == len(prefixes & {*paths_of(draft)})
