"""`check` passes drafters that are right, and names each flaw of those that are not."""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import lade
from lade.drafters import AssistantModel, CallPool, DrafterError, Merged, check
from lade.drafting.drafter import Drafter, DraftingCall
from lade.drafting.drafts import chain
from lade.drafting.pool_drafter import PoolDrafter
from ngram_pool import Draft, SampledDraft
from tests.lade.drafting.test_drafters import ints, shy
from tests.lade.shared import shared_model

FEW = {"vocab_size": 97, "num_steps": 60, "max_draft_tokens": 6}


class Right(lade.Drafter):
    """Drafts the last token twice, from its own notes of each sequence."""

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}
        self.num_opened = 0

    def open(self, prompt_ids: Sequence[int]) -> int:
        self.num_opened += 1
        self.texts[self.num_opened] = [*prompt_ids]
        return self.num_opened

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Any:
        last = self.texts[sequence][-1]
        return self.changed(chain([last, last], 0.5).first(max_draft_tokens), committed)

    def changed(self, draft: Draft, committed: Sequence[int]) -> Any:
        return draft

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        self.texts[sequence] += token_ids

    def close(self, sequence: int) -> None:
        del self.texts[sequence]


def nodes(
    token_ids: Any = (1, 2), parents: Any = (-1, 0), depths: Any = (1, 2), probs: Any = (0.5, 0.4)
) -> Callable[..., Any]:
    def changed(self: Any, draft: Draft, committed: Any) -> Any:
        arrays: list[Any] = [
            each if isinstance(each, np.ndarray) else np.array(each, np.int32)
            for each in (token_ids, parents, depths)
        ]
        arrays.append(probs if isinstance(probs, np.ndarray) else np.array(probs, np.float64))
        whole = Draft(*arrays)
        return whole.first(len(draft)) if all(each.ndim == 1 for each in arrays) else whole

    return changed


FLAWS: dict[str, tuple[Callable[..., Any], str]] = {
    "no draft": (
        lambda self, draft, committed: [1, 2],
        "a draft is wrong: expected a Draft, got list",
    ),
    "two axes": (nodes(token_ids=ints(1, 2)[None]), "expected token_ids of shape [1], got [1, 2]"),
    "dtype": (nodes(token_ids=np.array([1, 2])), "token_ids is int64, not int32"),
    "floats": (nodes(probs=np.array([0.5, 0.4], np.float32)), "probs is float32, not float64"),
    "lengths": (
        lambda self, draft, committed: Draft(ints(1), ints(), ints(1), np.ones(1)),
        "expected parents of shape [1], got [0]",
    ),
    "cycle": (nodes(parents=(1, 0)), "expected parents[i] from -1 to i - 1, got [1"),
    "parent of itself": (nodes(parents=(0, -1)), "expected parents[i] from -1 to i - 1"),
    "ids too large": (nodes(token_ids=(1, 97)), "a token id is not from 0 to 96: 97"),
    "negative ids": (nodes(token_ids=(-1, 2)), "a token id is not from 0 to 96: -1"),
    "depths": (nodes(depths=(1, 1)), "depths are [1, 1], not [1, 2]"),
    "twins": (nodes((3, 3), (-1, -1), (1, 1)), "two children of one parent have the same token"),
    "above 1": (nodes(probs=(1.5, 0.4)), "expected probs from 0 to 1"),
    "not a number": (nodes(probs=(np.nan, 0.4)), "expected probs from 0 to 1"),
    "increasing": (nodes(probs=(0.2, 0.4)), "probabilities increase along a draft"),
    "drawn": (
        lambda self, draft, committed: SampledDraft.empty(),
        "returns a SampledDraft where drafts are not drawn",
    ),
    "too many": (
        lambda self, draft, committed: chain([1] * 99, 0.5),
        "a draft has 99 nodes where 6 were asked for",
    ),
    "changes the text": (
        lambda self, draft, committed: [draft, committed.append(1)][0],
        "draft changes the list of committed tokens",
    ),
    "raises": (lambda self, draft, committed: 1 // 0, "draft raises ZeroDivisionError"),
    "python's random": (
        lambda self, draft, committed: [draft, random.random()][0],
        "draws from a global random generator",
    ),
    "numpy's random": (
        lambda self, draft, committed: [draft, np.random.random()][0],
        "draws from a global random generator",
    ),
    "torch's random": (
        lambda self, draft, committed: [draft, torch.rand(1)][0],
        "draws from a global random generator",
    ),
    "a cache of all texts": (
        lambda self, draft, committed: [draft, self.__dict__.setdefault("seen", []).append([0])][0],
        "its state grows: by ",
    ),
}


@pytest.mark.parametrize("name", FLAWS)
def test_a_flaw_of_a_draft_is_named(name: str) -> None:
    changed, told = FLAWS[name]
    drafter = type("Broken", (Right,), {"changed": changed})()
    with pytest.raises(DrafterError, match=re.escape(told)) as raised:
        check(drafter, **FEW)
    assert isinstance(raised.value, lade.LadeError)
    assert len(raised.value.flaws) == 1
    assert str(raised.value).splitlines() == ["Broken has 1 flaw:", f"- {raised.value.flaws[0]}"]


@pytest.mark.parametrize("name", ["num_successors", "has_table", "open"])
def test_what_raises_when_it_is_looked_at_is_named(name: str) -> None:
    with pytest.raises(DrafterError, match="raises RuntimeError: do not look"):
        check(shy(name), **FEW)


class Shared(Right):
    """Has one text for all sequences."""

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        for text in self.texts.values():
            text += token_ids


class Keeping(Right):
    """Keeps a sequence when it is closed."""

    def close(self, sequence: int) -> None:
        pass


class ClosingAll(Right):
    """Ends all sequences with one."""

    def close(self, sequence: int) -> None:
        self.texts.clear()


class Exploring(Right):
    num_successors = 2

    def harvest(self, *_: Any) -> None:
        pass

    def explore(self, sequence: int, excluded: Any, max_tokens: int) -> Any:
        return ints(1, 9), np.array([0.1, 0.2])


class Excluded(Exploring):
    def explore(self, sequence: int, excluded: Any, max_tokens: int) -> Any:
        return ints(1, 9), np.array([0.2, 0.1])


class BadHarvest(Excluded):
    def harvest(self, *_: Any) -> None:
        raise KeyError("harvested")

    def explore(self, sequence: int, excluded: Any, max_tokens: int) -> Any:
        return ints(9), np.array([0.2])


class BadNgrams(Right):
    learns_ngrams = True

    def observe_ngrams(self, sequence: int, ngrams: Any) -> None:
        raise KeyError("grams")


@pytest.mark.parametrize(
    ("drafter", "told"),
    [
        (Shared(), "two sequences disturb each other"),
        (Keeping(), "its state grows"),
        (ClosingAll(), "draft raises KeyError"),
        (Exploring(), "explore is wrong: ValueError: expected tokens to explore with the most"),
        (Excluded(), "explore names tokens that it was told not to"),
        (BadHarvest(), "harvest raises KeyError: 'harvested'"),
        (BadNgrams(), "observe_ngrams raises KeyError: 'grams'"),
        (Right, "it is no lade.Drafter: it is a class"),
        (3, "it is no lade.Drafter"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_other_flaws_are_named(drafter: Any, told: str) -> None:
    with pytest.raises(DrafterError, match=re.escape(told)):
        check(drafter, **FEW)


class Drawing(Right):
    """Draws chains, each token of three after it."""

    draws = True
    probs = np.array([0.6, 0.3, 0.1])
    said = probs

    def sample(
        self,
        sequence: int,
        committed: Sequence[int],
        max_draft_tokens: int,
        rng: np.random.Generator,
    ) -> Any:
        drawn = [int(rng.choice(3, p=self.probs)) for _ in range(max_draft_tokens)]
        supports = np.tile(ints(0, 1, 2), (len(drawn), 1))
        whole = chain(drawn, 0.5)
        return SampledDraft(
            *(whole.token_ids, whole.parents, whole.depths, whole.probs),
            supports,
            np.tile(self.said, (len(drawn), 1)),
        )


class Biased(Drawing):
    said = np.array([0.5, 0.4, 0.1])


class NoDistribution(Drawing):
    said = np.array([0.6, 0.6, 0.1])


class OutOfSupport(Drawing):
    said = np.array([0.0, 0.9, 0.1])


class Backwards(Drawing):
    """Draws the last token first."""

    def sample(self, *args: Any) -> Any:
        whole = super().sample(*args)
        return SampledDraft(
            whole.token_ids[::-1].copy(),
            *(whole.parents, whole.depths, whole.probs),
            *(whole.support_token_ids, whole.support_probs),
        )


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Biased, "some come more often and some less than support_probs says"),
        (NoDistribution, "support_probs of a node are no distribution"),
        (OutOfSupport, "expected every token to be in the support that it was drawn from"),
        pytest.param(
            Backwards, "a node may depend only on the draws before it", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_drafts_drawn_otherwise_than_they_say_are_named(kind: Any, told: str) -> None:
    with pytest.raises(DrafterError, match=re.escape(told)):
        check(kind(), **FEW)


class Made(lade.Drafter):
    """Makes a drafter for each call, which draws two paths."""

    def for_call(self, call: DraftingCall) -> Drafter:
        if call.rngs is None:
            return Right()
        drafter = Right()
        ids = ints(1, 2)
        wide = SampledDraft(
            *(ids, ints(-1, -1), ints(1, 1), np.array([0.5, 0.5])), *(ids[:, None], np.ones((2, 1)))
        )
        drafter.changed = lambda *_: wide  # type: ignore[method-assign]
        return drafter


class Refusing(lade.Drafter):
    def for_call(self, call: DraftingCall) -> Drafter:
        raise ValueError("no")


def test_flaws_of_what_makes_drafters_are_named() -> None:
    with pytest.raises(DrafterError, match="several paths where max_candidates is 1"):
        check(Made(), **FEW)
    with pytest.raises(DrafterError, match="for_call raises ValueError: no"):
        check(Refusing(), **FEW)


@pytest.mark.parametrize(
    "make",
    [
        Right,
        Drawing,
        lambda: PoolDrafter(lade.NGramPool()),
        lambda: Merged([lade.NGramPool()]),
        lambda: Merged([CallPool(), Right()]),
        pytest.param(
            lambda: Merged([Right(), Drawing(), lade.NGramPool()]), marks=pytest.mark.exhaustive
        ),
    ],
    ids=["right", "drawing", "pool", "merged pool", "merged", "merged drawing"],
)
def test_drafters_that_are_right_pass(make: Callable[[], Any]) -> None:
    check(make(), num_steps=200, max_draft_tokens=8)


def test_models_that_draft_pass() -> None:
    model = shared_model("llama", seed=1)
    assistant = AssistantModel(shared_model("llama", seed=2))
    check(assistant, model=model, **FEW)
    check(Merged([CallPool(), assistant]), model=model, **FEW)
