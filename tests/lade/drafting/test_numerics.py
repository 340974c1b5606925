"""Numbers behind drafts: ranks of logits, joined trees."""

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lade.drafting.drafts import draft_of, joined
from lade.drafting.successors import rank, ranked_on_device, successors_of
from lade.tree import matched_path
from ngram_pool import Draft
from tests.lade.tiny import paths_of

# --- ranks ----------------------------------------------------------------------------------


DTYPES = [torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("scale", "shift", "vocab_size"),
    [(4.0, 0.0, 5000), (0.01, 0.0, 700), (3.0, -40.0, 5000), (0.02, -1.0, 300), (1.0, 0.0, 5)],
)
def test_equal_logits_are_ranked_in_the_order_of_their_ids(
    dtype: torch.dtype, scale: float, shift: float, vocab_size: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(2, 10, vocab_size, generator=generator) + shift).to(dtype)
    logits[0, :, ::7] = logits[0, :, ::7].round()  # zeros of both signs among them
    logits[1, :4, 1:] = -torch.inf
    ranked = rank(logits, 8)
    assert ranked is not None
    order = logits.float().sort(dim=-1, descending=True, stable=True)
    assert np.array_equal(ranked.token_ids, order.indices[..., : min(8, vocab_size)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_left_to_torch(dtype: torch.dtype, value: float) -> None:
    for place in (0, 299, 511, 999):
        logits = torch.randn(2, 1000).to(dtype)
        logits[1, place] = value
        assert rank(logits, 4) is None
        assert np.array_equal(successors_of(logits, 4).token_ids, logits.topk(4).indices)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("way", [rank, lambda *given: ranked_on_device(*given)()])
def test_probabilities_are_about_those_of_the_softmax(
    way: Any, scale: float, dtype: torch.dtype
) -> None:
    logits = scale * torch.randn(20, 40000, generator=torch.Generator().manual_seed(0))
    logits = logits.to(dtype)
    for known, most in ((logits, 0.6), (logits[:, :40], 0.05)):  # of few, all are summed
        got = way(known, 8)
        expected = known.double().softmax(-1).gather(-1, torch.tensor(got.token_ids).long())
        probable = expected.numpy() > 1e-9
        assert np.abs(np.log(got.probs) - expected.log().numpy())[probable].max() < most


# --- trees ----------------------------------------------------------------------------------

Path = tuple[int, ...]


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Return a draft of different paths, best first."""
    nodes: list[tuple[Path, float]] = [((), 1.0)]
    for _ in range(draw(st.integers(0, 10))):
        parent, most = draw(st.sampled_from(nodes))
        path = (*parent, draw(st.integers(0, 3)))
        if path not in [each for each, _ in nodes]:
            nodes.append((path, most * draw(st.floats(0.0, 1.0))))
    nodes = sorted(nodes[1:], key=lambda node: -node[1])  # stable: of equals, parents come first
    place: dict[Path, int] = {(): -1} | {path: number for number, (path, _) in enumerate(nodes)}
    parents = [place[path[:-1]] for path, _ in nodes]
    return draft_of([path[-1] for path, _ in nodes], parents, [prob for _, prob in nodes])


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
    """A token comes unless all sources are wrong, and siblings come at most once together."""
    whole = joined(parts, 99)
    found = dict(zip(paths_of(whole), whole.probs.tolist(), strict=True))
    assert found == pytest.approx(joined_plainly(parts))
    assert len(found) == len(whole)  # no path twice
    assert (whole.parents < np.arange(len(found))).all()
    assert whole.depths.tolist() == [len(path) for path in found]
    assert (np.diff(whole.probs) <= 0).all()
    assert paths_of(joined(parts, 4)) == paths_of(whole)[:4]


@given(draft=drafts(), emitted=st.lists(st.integers(0, 3), max_size=5))
def test_the_matched_depth_is_that_of_the_longest_path(draft: Draft, emitted: list[int]) -> None:
    prefixes = {tuple(each) for each in accumulate(([token] for token in emitted), initial=[])}
    assert len(matched_path(draft, emitted)) == len(prefixes & {*paths_of(draft)})
