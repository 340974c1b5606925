"""Shapes of drafts, against a model that is a table."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lade.drafters.expansion import (
    TREE_CHILDREN,
    TREE_WIDTH,
    Grown,
    GrowthLimits,
    RankedTokens,
    drawn,
    likeliest,
)
from ngram_pool import SampledDraft
from tests.chi_square import FALSE_ALARM, p_value
from tests.grids import thinned
from tests.lade.tiny import paths_of

VOCAB_SIZE = 6
END = 5


class Table:
    """Tells probabilities that depend on the path alone, and keeps what was run."""

    def __init__(self, seed: int, sharpness: float = 2.0) -> None:
        self._seed = seed
        self._sharpness = sharpness
        self._paths: dict[int, tuple[int, ...]] = {-1: ()}
        self.forwards: list[list[tuple[int, ...]]] = []

    def probs(self, path: tuple[int, ...]) -> NDArray[np.float64]:
        rng = np.random.default_rng([self._seed, *path])
        weights = np.exp(self._sharpness * rng.standard_normal(VOCAB_SIZE))
        return np.array(weights / weights.sum())

    def prob_of(self, path: Sequence[int]) -> float:
        """Return the probability of a whole path."""
        parts = [self.probs(tuple(path[:place]))[token] for place, token in enumerate(path)]
        return float(np.prod(parts))

    def first(self, num_ranked: int) -> RankedTokens:
        return self._ranked([()], num_ranked)

    def grow(
        self,
        nodes: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        num_ranked: int,
    ) -> RankedTokens:
        for node, token_id, parent in zip(nodes, token_ids, parents, strict=True):
            assert token_id != END
            self._paths[node] = (*self._paths[parent], token_id)
        return self._ranked([self._paths[node] for node in nodes], num_ranked)

    def is_end(self, token_id: int) -> bool:
        return token_id == END

    def _ranked(self, paths: list[tuple[int, ...]], num_ranked: int) -> RankedTokens:
        self.forwards.append(paths)
        probs = np.stack([self.probs(path) for path in paths])
        token_ids = np.argsort(-probs, axis=1)[:, :num_ranked]
        return RankedTokens(token_ids, np.take_along_axis(probs, token_ids, axis=1))


def always(levels: object) -> bool:
    return True


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_takes_the_likeliest_token_until_an_end(seed: int) -> None:
    table = Table(seed)
    grown = likeliest(table, GrowthLimits(64, 6), always, is_chain=True)
    expected: tuple[int, ...] = ()
    while len(expected) < 6 and expected[-1:] != (END,):
        expected = (*expected, int(table.probs(expected).argmax()))
    assert paths_of(grown.draft)[-1] == expected
    assert len(grown.draft) == len(expected) == len(grown.levels)
    # The last token is drafted, not run.
    assert len(table.forwards) == len(expected)
    probs = [table.prob_of(expected[: depth + 1]) for depth in range(len(expected))]
    np.testing.assert_allclose(grown.draft.probs, probs)
    np.testing.assert_allclose([level.mass for level in grown.levels], probs)


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_has_the_likeliest_paths_best_first(seed: int) -> None:
    """Of all paths whose parents were run: the rule for what is run is checked beside."""
    table = Table(seed)
    grown = likeliest(table, GrowthLimits(12, 4), always)
    run = set(itertools.chain(*table.forwards))
    assert all(len(paths) <= TREE_WIDTH for paths in table.forwards)
    children = [
        (*path, int(token))
        for path in run
        for token in np.argsort(-table.probs(path))[:TREE_CHILDREN]
    ]
    expected = sorted(children, key=lambda path: -table.prob_of(path))[:12]
    assert paths_of(grown.draft) == expected
    assert (np.diff(grown.draft.probs) <= 0).all()
    np.testing.assert_allclose(grown.draft.probs, [table.prob_of(path) for path in expected])
    for level, paths in enumerate(table.forwards[1:]):
        ranked = sorted(
            (path for path in children if len(path) == level + 1),
            key=lambda path: -table.prob_of(path),
        )
        best = [path for path in ranked[:TREE_WIDTH] if path[-1] != END]
        share = table.prob_of(ranked[0]) * 0.1
        assert paths == [path for path in best if table.prob_of(path) >= share]


def test_rules_for_k_and_limits_end_a_draft() -> None:
    table = Table(0, sharpness=0.5)
    seen: list[int] = []

    def twice(levels: Sequence[object]) -> bool:
        seen.append(len(levels))
        return len(levels) < 2

    for is_chain in (False, True):
        grown = likeliest(table, GrowthLimits(64, 9), twice, is_chain=is_chain)
        assert int(grown.draft.depths.max()) == len(grown.levels) == 2
    assert seen == [1, 2] * 2
    grown = likeliest(table, GrowthLimits(5, 9), always)
    assert len(grown.draft) == 5


def test_tokens_that_are_ruled_out_are_no_nodes() -> None:
    class OnlyTwo(Table):
        def probs(self, path: tuple[int, ...]) -> NDArray[np.float64]:
            return np.array([0.0, 0.6, 0.4, 0.0, 0.0, 0.0])

    grown = likeliest(OnlyTwo(0), GrowthLimits(64, 3), always)
    assert {*grown.draft.token_ids.tolist()} == {1, 2}
    rng = np.random.default_rng(0)
    grown = drawn(OnlyTwo(0), GrowthLimits(64, 3), always, rng, 0.3)
    assert {*grown.draft.token_ids.tolist()} == {1, 2}


# --- drawn ----------------------------------------------------------------------------------


def drawn_drafts(num: int, table: Table, is_chain: bool) -> list[tuple[SampledDraft, Grown]]:
    rng = np.random.default_rng(0)
    drafts = []
    for _ in range(num):
        grown = drawn(table, GrowthLimits(64, 2), always, rng, 0.5, is_chain=is_chain)
        assert isinstance(grown.draft, SampledDraft)
        drafts.append((grown.draft, grown))
    return drafts


@pytest.mark.parametrize("is_chain", thinned([True, False], True), ids=["chain", "tree"])
def test_drawn_tokens_have_the_distributions_that_they_tell(is_chain: bool) -> None:
    """First, second and third child of the text, and the first child of the likeliest token.

    A later sibling's distribution leaves out those before it.
    """
    table = Table(3, sharpness=1.0)
    likeliest = int(table.probs(()).argmax())
    counts: dict[tuple[int, ...], NDArray[np.int64]] = {}
    dense: dict[tuple[int, ...], NDArray[np.float64]] = {}
    for draft, grown in drawn_drafts(1500, table, is_chain):
        told = draft.dense_probs(VOCAB_SIZE)
        siblings: dict[int, tuple[int, ...]] = {}
        paths = paths_of(grown.draft)
        for node, (token_id, parent) in enumerate(
            zip(draft.token_ids.tolist(), draft.parents.tolist(), strict=True)
        ):
            before = siblings.get(parent, ())
            siblings[parent] = (*before, token_id)
            path = paths[parent] if parent >= 0 else ()
            expected = table.probs(path)
            expected[[*before]] = 0
            np.testing.assert_allclose(told[node], expected / expected.sum(), atol=1e-12)
            if path in ((), (likeliest,)):
                place = (*path, -1, *before)
                counts.setdefault(place, np.zeros(VOCAB_SIZE, np.int64))[token_id] += 1
                dense[place] = told[node]
    assert len(counts) > (1 if is_chain else 30)
    for place, of_place in counts.items():
        assert p_value(of_place.tolist(), dense[place].tolist()) > FALSE_ALARM, place


def test_the_shape_of_a_drawn_draft_does_not_depend_on_its_tokens() -> None:
    class Endless(Table):
        def is_end(self, token_id: int) -> bool:
            return False

        def grow(self, *args: Any) -> RankedTokens:
            return self._ranked([(1,)] * len(args[0]), args[-1])

    drafts = [draft for draft, _ in drawn_drafts(200, Endless(1), is_chain=False)]
    assert len({tuple(draft.token_ids.tolist()) for draft in drafts}) > 100
    shapes = {tuple(draft.parents.tolist()) for draft in drafts}
    assert len(shapes) == 1
    assert shapes.pop().count(-1) > 1


def test_more_children_are_drawn_where_tokens_are_rarely_accepted() -> None:
    def num_children(acceptance: float) -> int:
        rng = np.random.default_rng(0)
        draft = drawn(Table(1), GrowthLimits(64, 1), always, rng, acceptance).draft
        return sum(parent == -1 for parent in draft.parents.tolist())

    assert [num_children(acceptance) for acceptance in (1.0, 0.6, 0.2)] == [1, 3, 4]
