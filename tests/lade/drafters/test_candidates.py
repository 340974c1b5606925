"""Candidate generators of transformers as drafters: their trees."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.generation import candidate_generator as hf

import lade
from lade.drafters import Candidates
from lade.drafting.drafter import DraftingCall
from ngram_pool import SampledDraft
from tests.chi_square import FALSE_ALARM, p_value
from tests.lade.tiny import paths_of

VOCAB_SIZE = 6
Path = tuple[int, ...]

# --- which tree it is -----------------------------------------------------------------------------


class Table(hf.CandidateGenerator):  # type: ignore[misc]
    """Proposes the likeliest path by probabilities that depend on the path alone."""

    def __init__(self, seed: int, num_levels: int, num_prompt: int = 2) -> None:
        self._seed, self._num_levels, self._num_prompt = seed, num_levels, num_prompt

    def probs(self, path: Path) -> NDArray[np.float64]:
        rng = np.random.default_rng([self._seed, *path])
        weights = np.exp(1.5 * rng.standard_normal(VOCAB_SIZE))
        return np.array(weights / weights.sum())

    def get_candidates(self, input_ids: Any, **_: Any) -> Any:
        tokens, scores = input_ids[0].tolist(), list[Any]()
        while len(scores) < self._num_levels:
            scores.append(np.log(self.probs((*tokens[self._num_prompt :],))))
            tokens.append(int(scores[-1].argmax()))
        return torch.tensor([tokens]), torch.tensor(np.array([scores]))


def drafter_of(table: Table, **of_call: Any) -> lade.Drafter:
    call = DraftingCall(SimpleNamespace(), VOCAB_SIZE, 20, **of_call)
    drafter = Candidates(lambda *given: table).for_call(call)
    drafter.open([1, 2])
    return drafter


@pytest.mark.parametrize("seed", range(5))
def test_a_tree_has_the_path_and_the_likeliest_tokens_beside_it(seed: int) -> None:
    table = Table(seed, 3)
    draft, prob, best = drafter_of(table).draft(0, [1, 2], 12), 1.0, tuple[int, ...]()
    expected: dict[Path, float] = {}
    for _ in range(3):
        probs = table.probs(best)
        for token in np.argsort(-probs)[:4]:
            if probs[token] >= 0.1 * probs.max():
                expected[(*best, int(token))] = prob * probs[token]
        prob, best = prob * probs.max(), (*best, int(probs.argmax()))
    order = sorted(expected, key=lambda path: -expected[path])[:12]
    assert paths_of(draft) == order
    np.testing.assert_allclose(draft.probs, [expected[path] for path in order], rtol=1e-5)
    chain = drafter_of(table, max_candidates=1).draft(0, [1, 2], 12)
    assert paths_of(chain) == [best[:length] for length in (1, 2, 3)]


def test_drawn_tokens_have_the_distributions_that_they_tell() -> None:
    """Those after the text and after its likeliest token; later ones leave out those before.

    How many there are does not depend on the tokens that are drawn.
    """
    table, rng = Table(3, 2), np.random.default_rng(0)
    drafter, best = drafter_of(table, rngs=[rng]), int(table.probs(()).argmax())
    counts: dict[Path, NDArray[np.int64]] = {}
    dense: dict[Path, NDArray[np.float64]] = {}
    for _ in range(1500):
        draft = drafter.draft(0, [1, 2], 64)
        assert isinstance(draft, SampledDraft)
        told, paths = draft.dense_probs(VOCAB_SIZE), paths_of(draft)
        assert len(draft) == (4 if (best,) in paths else 2)
        for node, path in enumerate(paths):
            before = tuple(each[-1] for each in paths[:node] if each[:-1] == path[:-1])
            expected = table.probs(path[:-1])
            expected[[*before]] = 0
            np.testing.assert_allclose(told[node], expected / expected.sum(), atol=1e-6)
            place = (*path[:-1], -1, *before)
            counts.setdefault(place, np.zeros(VOCAB_SIZE, np.int64))[path[-1]] += 1
            dense[place] = told[node]
    for place, of_place in counts.items():
        assert p_value(of_place.tolist(), dense[place].tolist()) > FALSE_ALARM, place
