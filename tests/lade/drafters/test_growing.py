"""Drafts of models: their shapes against a model that is a table, and K against a simulation."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from lade.budget.seconds import Seconds
from lade.drafters.model_drafter import TREE_WIDTH, GrowingTree, Level, RankedTokens, Rule
from ngram_pool import Draft, SampledDraft
from tests.chi_square import FALSE_ALARM, p_value
from tests.lade.tiny import paths_of

VOCAB_SIZE = 6
END = 5
Path = tuple[int, ...]


class Table:
    """Tells probabilities that depend on the path alone, and keeps what was run."""

    def __init__(self, seed: int, sharpness: float = 2.0) -> None:
        self._seed = seed
        self._sharpness = sharpness
        self.forwards: list[list[Path]] = []

    def probs(self, path: Path) -> NDArray[np.float64]:
        rng = np.random.default_rng([self._seed, *path])
        weights = np.exp(self._sharpness * rng.standard_normal(VOCAB_SIZE))
        return np.array(weights / weights.sum())

    def prob_of(self, path: Path) -> float:
        """Return the probability of a whole path."""
        return float(np.prod([self.probs(path[:i])[token] for i, token in enumerate(path)]))

    def grown(self, tree: GrowingTree, num_levels: int, *ends: int) -> Draft:
        """Grow a tree by what the table tells."""

        def say(nodes: Sequence[int]) -> RankedTokens:
            self.forwards.append([(*tree.path(node),) for node in nodes])
            probs = np.stack([self.probs(path) for path in self.forwards[-1]])
            token_ids = np.argsort(-probs, axis=1)[:, : tree.num_ranked]
            return token_ids, np.take_along_axis(probs, token_ids, axis=1)

        tree.grow(say, num_levels, lambda levels: True, frozenset(ends))
        return tree.draft()


@pytest.mark.parametrize("seed", range(10))
def test_a_tree_has_the_likeliest_paths_best_first(seed: int) -> None:
    """Of all paths whose parents were run: the rule for what is run is checked beside."""
    table = Table(seed)
    draft = table.grown(GrowingTree(12), 4, END)
    children = [
        (*path, int(token))
        for path in set(itertools.chain(*table.forwards))
        for token in np.argsort(-table.probs(path))[:TREE_WIDTH]
    ]
    ranked = sorted(children, key=lambda path: -table.prob_of(path))
    assert paths_of(draft) == ranked[:12]
    np.testing.assert_allclose(draft.probs, [table.prob_of(path) for path in ranked[:12]])
    for level, paths in enumerate(table.forwards[1:]):
        of_level = [path for path in ranked if len(path) == level + 1]
        share = table.prob_of(of_level[0]) * 0.1
        best = [path for path in of_level[:TREE_WIDTH] if path[-1] != END]
        assert paths == [path for path in best if table.prob_of(path) >= share]
    chain = Table(seed).grown(GrowingTree(64, is_chain=True), 3, END)
    assert paths_of(chain)[-1] == likeliest_of(table, 3)


def likeliest_of(table: Table, length: int) -> Path:
    """Return the likeliest token after each, until an end."""
    path: Path = ()
    while len(path) < length and path[-1:] != (END,):
        path = (*path, int(table.probs(path).argmax()))
    return path


def test_drawn_tokens_have_the_distributions_that_they_tell() -> None:
    """The children of the text and of its likeliest token; later siblings leave out those before.

    Which nodes there are does not depend on the tokens that are drawn for them.
    """

    table, rng = Table(3, sharpness=1.0), np.random.default_rng(0)
    best = int(table.probs(()).argmax())
    counts: dict[Path, NDArray[np.int64]] = {}
    dense: dict[Path, NDArray[np.float64]] = {}
    for _ in range(1500):
        draft = table.grown(GrowingTree(64, rng=rng, acceptance=0.5), 2)
        assert isinstance(draft, SampledDraft)
        told, paths = draft.dense_probs(VOCAB_SIZE), paths_of(draft)
        for node, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
            path = paths[parent] if parent >= 0 else ()
            before = tuple(each[-1] for each in paths[:node] if each[:-1] == path)
            expected = table.probs(path)
            expected[[*before]] = 0
            np.testing.assert_allclose(told[node], expected / expected.sum(), atol=1e-12)
            if path in ((), (best,)):
                place = (*path, -1, *before)
                counts.setdefault(place, np.zeros(VOCAB_SIZE, np.int64))[token_id] += 1
                dense[place] = told[node]
    for place, of_place in counts.items():
        assert p_value(of_place.tolist(), dense[place].tolist()) > FALSE_ALARM, place
    roots = [table.grown(GrowingTree(64, rng=rng, acceptance=rate), 1) for rate in (1.0, 0.6, 0.2)]
    assert [len(draft) for draft in roots] == [1, 3, 4]  # more where they are rarely accepted


def test_tokens_that_are_ruled_out_are_no_nodes() -> None:
    class OnlyTwo(Table):
        def probs(self, path: Path) -> NDArray[np.float64]:
            return np.array([0.0, 0.6, 0.4, 0.0, 0.0, 0.0])

    for tree in (GrowingTree(64), GrowingTree(64, rng=np.random.default_rng(0), acceptance=0.3)):
        assert {*OnlyTwo(0).grown(tree, 3).token_ids.tolist()} == {1, 2}


def length_of(rule: Rule, probs: Sequence[float]) -> int:
    """Return how many levels a rule lets a chain of these probabilities have."""
    levels, mass = list[Level](), 1.0
    for prob in probs:
        mass *= prob
        levels.append(Level(mass, prob, 1))
        if not rule.goes_on(levels):
            break
    return len(levels)


@pytest.mark.parametrize(("right", "promised"), [(0.3, 0.9), (0.7, 0.7), (0.9, 0.3), (0.97, 0.9)])
@pytest.mark.parametrize("forward", [0.001, 0.05, 0.2])
def test_measured_drafts_are_as_long_as_is_fastest(
    right: float, forward: float, promised: float
) -> None:
    """Where levels are as likely, whatever is promised, the best length is found by trying all."""
    forward_sec = Seconds()
    for sec in (1.5, forward, forward, forward):  # libraries prepare kernels in the first one
        forward_sec.record(1, sec)
    rule = Rule(forward_sec, lambda num_nodes: 0.1 + 0.002 * num_nodes)
    rng, lengths = np.random.default_rng(0), []
    for _ in range(600):
        num = length_of(rule, [promised] * 20)
        lengths.append(num)
        num_right = int(np.argmax(rng.random(num + 1) >= [*[right] * num, 0.0]))
        levels = [Level(promised**depth, promised, 1) for depth in range(1, num + 1)]
        rule.learn(levels, num_right, num_right < num)
    speeds = [
        sum(right**depth for depth in range(num + 1)) / (0.1 + num * (forward + 0.002))
        for num in range(1, 21)
    ]
    assert np.mean(lengths[100:]) == pytest.approx(1 + int(np.argmax(speeds)), rel=0.3, abs=1)
