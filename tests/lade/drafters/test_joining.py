"""Drafts are joined as a plain-Python search of all paths joins them, and believed as they come."""

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lade.budget._kernels import NUM_INTERVALS, PROMISES
from lade.drafters.joining import Joining, matched_depth
from ngram_pool import Draft

Path = tuple[int, ...]


def draft_of(nodes: list[tuple[Path, float]]) -> Draft:
    """Return a draft of paths, parents before children."""
    place: dict[Path, int] = {(): -1}
    place |= {path: number for number, (path, _) in enumerate(nodes)}
    return Draft(
        np.array([path[-1] for path, _ in nodes], np.int32),
        np.array([place[path[:-1]] for path, _ in nodes], np.int32),
        np.array([len(path) for path, _ in nodes], np.int32),
        np.array([prob for _, prob in nodes], np.float64),
    )


def paths_of(draft: Draft) -> list[Path]:
    paths: list[Path] = []
    for token, parent in zip(draft.token_ids.tolist(), draft.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


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
    return draft_of(nodes)


def joined_plainly(drafts: dict[int, Draft], worths: Any, agreement: Any) -> dict[Path, float]:
    """Return the probability of every path that a draft has."""

    def worth(table: Any, prob: float) -> float:
        return float(table[sum(prob >= bound for bound in PROMISES)])

    believed: dict[int, dict[Path, float]] = {}
    for source, draft in drafts.items():
        mine = believed[source] = {(): 1.0}
        for path, prob in zip(paths_of(draft), draft.probs.tolist(), strict=True):
            mine[path] = min(mine[path[:-1]], prob * worth(worths[source], prob))
    all_paths = {path for mine in believed.values() for path in mine if path}
    given_parent = {}
    for path in all_paths:
        miss = 1.0
        for mine in believed.values():
            if path in mine and mine[path[:-1]] > 0:
                miss *= 1 - mine[path] / mine[path[:-1]]
        given_parent[path] = 1 - miss
    promised: dict[Path, float] = {(): 1.0}
    found: dict[Path, float] = {(): 1.0}
    for path in sorted(all_paths, key=len):
        of_siblings = sum(p for other, p in given_parent.items() if other[:-1] == path[:-1])
        promised[path] = promised[path[:-1]] * given_parent[path] / max(1.0, of_siblings)
        sources = sum(1 << source for source, mine in believed.items() if path in mine)
        right = promised[path] * worth(agreement[sources], promised[path])
        found[path] = min(found[path[:-1]], right)
    del found[()]
    return found


@given(first=drafts(), second=drafts(), third=drafts(), seed=st.integers(0, 99))
@settings(max_examples=150)
def test_a_joined_tree_is_that_of_all_paths(
    first: Draft, second: Draft, third: Draft, seed: int
) -> None:
    joining = Joining(3)
    rng = np.random.default_rng(seed)
    joining._worths[:] = rng.uniform(0.2, 1.3, joining._worths.shape)
    joining._agreements[7] = agreement = type("Worths", (), {})()
    agreement.worths = rng.uniform(0.2, 1.3, (8, NUM_INTERVALS))
    parts = {0: first, 1: second, 2: third}
    expected = joined_plainly(parts, joining._worths, agreement.worths)
    whole = joining.join(parts, 99)
    found = dict(zip(paths_of(whole.draft), whole.draft.probs.tolist(), strict=True))
    assert found == pytest.approx(expected)
    assert len(found) == len(whole.draft)  # no path twice
    assert (whole.draft.parents < np.arange(len(found))).all()
    assert whole.draft.depths.tolist() == [len(path) for path in found]
    assert (np.diff(whole.draft.probs) <= 0).all()
    for path, sources in zip(found, whole.sets.tolist(), strict=True):
        assert sources == sum(1 << each for each in parts if path in paths_of(parts[each]))
    few = joining.join(parts, 4).draft
    assert paths_of(few) == paths_of(whole.draft)[:4]


def test_agreement_makes_more_of_a_token_and_a_dispute_less() -> None:
    joining = Joining(2)
    one = draft_of([((5,), 0.6), ((5, 6), 0.3)])
    other = draft_of([((5,), 0.5), ((7,), 0.4)])
    joined = joining.join({0: one, 1: other}, 9).draft
    probs = dict(zip(paths_of(joined), joined.probs.tolist(), strict=True))
    # 5 comes unless both are wrong, 1 - 0.4 * 0.5 = 0.8; 0.8 and 0.4 cannot both be.
    assert probs[5,] == pytest.approx(0.8 / 1.2)
    assert probs[7,] == pytest.approx(0.4 / 1.2)
    assert probs[5, 6] == pytest.approx(probs[5,] * 0.5)  # more than 0.3: its parent is surer


@given(draft=drafts(), emitted=st.lists(st.integers(0, 3), max_size=5))
def test_the_matched_depth_is_that_of_the_longest_path(draft: Draft, emitted: list[int]) -> None:
    prefixes = {tuple(each) for each in accumulate(([token] for token in emitted), initial=[])}
    assert matched_depth(draft, emitted) == len(prefixes & {*paths_of(draft)})


def gaps_of(*, learns_agreement: bool, together: float) -> dict[int, float]:
    """Return how far what is expected is from what comes, by the set of sources that propose it.

    Args:
        together: how often both sources look at the same thing, and are wrong alike.
    """
    rng = np.random.default_rng(0)
    joining = Joining(2)
    expected, came = dict.fromkeys((1, 2, 3), 0.0), dict.fromkeys((1, 2, 3), 0.0)
    counts = dict.fromkeys((1, 2, 3), 0)
    for step in range(4000):
        right = int(rng.integers(0, 20))
        luck, wrong = rng.random(2), rng.integers(20, 40, 2)
        if rng.random() < together:
            luck[1], wrong[1] = luck[0], wrong[0]
        tokens = [right if luck[each] < 0.6 else int(wrong[each]) for each in (0, 1)]
        joined = joining.join({s: draft_of([((tokens[s],), 0.6)]) for s in (0, 1)}, 9)
        if step > 300:
            for node, sources in enumerate(joined.sets.tolist()):
                expected[sources] += float(joined.draft.probs[node])
                came[sources] += float(joined.draft.token_ids[node] == right)
                counts[sources] += 1
        joining.learn(joined, [right])
        if not learns_agreement:
            joining._agreements.clear()
    return {s: abs(expected[s] - came[s]) / counts[s] for s in counts}


@pytest.mark.parametrize("together", [0.0, 0.5, 0.9])
def test_what_agreement_is_worth_is_learned_where_sources_err_together(together: float) -> None:
    independent = gaps_of(learns_agreement=False, together=together)
    learned = gaps_of(learns_agreement=True, together=together)
    assert max(learned.values()) < 0.05
    assert max(independent.values()) > 0.1
