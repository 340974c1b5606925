"""Rivals are set up fairly: what each drafts of texts made by hand, its budget, what it keeps."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import lade
from benchmarks.methods import METHODS
from benchmarks.rivals.catalogue import RIVALS
from benchmarks.rivals.growing import ROOT
from benchmarks.rivals.recycling import static_tree
from benchmarks.rivals.sam import SamDrafter
from tests.lade.tiny import tiny_model


class Top(NamedTuple):
    """What the target finds likely after each node."""

    token_ids: Any  # [num_nodes, num_successors]
    probs: Any


class Told:
    """A rival with one sequence, given a text and likely next tokens."""

    def __init__(self, drafter: Any, text: Sequence[int]) -> None:
        self.drafter: Any = RIVALS[drafter].make_drafter() if isinstance(drafter, str) else drafter
        self.text = [*text]
        self._sequence = self.drafter.open(self.text)

    def observe(self, token_ids: Sequence[int]) -> None:
        self.text += token_ids
        self.drafter.observe(self._sequence, token_ids)

    def harvest(self, nodes: dict[int, list[int]], probs: Sequence[float] = ()) -> None:
        """Give it a chain of nodes, the first one committed: token -> likely next tokens."""
        token_ids = np.array([*nodes.values()], np.int32)
        weights = np.array(probs) if probs else np.ones(token_ids.shape[1])
        top = Top(token_ids, np.tile(weights / 2, (len(nodes), 1)).astype(np.float32))
        committed = [*self.text[:-1], next(iter(nodes))]
        self.drafter.harvest(self._sequence, committed, [*nodes], range(-1, len(nodes) - 1), top)

    def drafted(self, most: int = 100, forced: Sequence[int] = ()) -> tuple[list[int], list[int]]:
        """Return tokens and parents of the next draft, which is a tree of so many nodes at most."""
        draft = self.drafter.draft(self._sequence, [*self.text, *forced], most)
        parents, depths = draft.parents.tolist(), draft.depths.tolist()
        assert len(draft) <= most
        assert all(-1 <= parent < node for node, parent in enumerate(parents))
        assert depths == [1 if parent == ROOT else depths[parent] + 1 for parent in parents]
        places = [*zip(parents, draft.token_ids.tolist(), strict=True)]
        assert len({*places}) == len(places)  # no token twice under one parent
        assert (np.diff(draft.probs) <= 0).all()
        return draft.token_ids.tolist(), parents

    def close(self) -> None:
        self.drafter.close(self._sequence)


def chain_of(tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    return [*tokens], [*range(-1, len(tokens) - 1)]


def test_prompt_lookup_copies_ten_tokens_from_the_earliest_longest_match() -> None:
    for text, expected in (
        # Not 5, from the latest place of 1 2 3.
        ([7, 1, 2, 3, 4, 8, 1, 2, 3, 5, 1, 2, 3], [4, 8, 1, 2, 3, 5, 1, 2, 3]),
        ([1, 2, 9, 3, 2], [9, 3, 2]),  # of one token
        ([*range(30), 3], [*range(4, 14)]),
        ([1, 2, 3], []),
    ):
        assert Told("rival_prompt_lookup", text).drafted() == chain_of(expected)
    # Not 7, from the earliest place of 2 3, of two tokens.
    assert Told("rival_prompt_lookup", [2, 3, 7, 1, 2, 3, 8, 1, 2, 3]).drafted(2) == chain_of(
        [8, 1]
    )


def test_sam_copies_the_more_the_longer_the_match() -> None:
    for text, expected in (
        ([2, 3, 7, 1, 2, 3, 8, 1, 2, 3], [8, 1, 2, 3]),  # not 7, from a shorter match
        ([*range(11), 0], [1, 2, 3, 4, 5]),  # one and four for each token that matched
        ([*range(60), *range(20), 99, *range(20)], [*range(20, 60)]),  # 40, from the earliest place
        ([1, 2, 3], []),
    ):
        assert Told(SamDrafter(), text).drafted() == chain_of(expected)


def test_sam_recycling_copies_after_five_tokens() -> None:
    copied = chain_of([8, 1, 2, 3, 4, 5])
    for first, expected in ((1, copied), (9, ([60, 61], [-1, -1]))):  # a match of five, and of four
        rival = Told("rival_sam_recycling", [first, 2, 3, 4, 5, 8, 1, 2, 3, 4, 5])
        rival.harvest({5: [60, 61]})
        assert rival.drafted(80) == expected


def test_recycling_fills_the_static_tree_with_the_successors_last_seen() -> None:
    tree = static_tree((8, 21, 25, 15, 8, 3), 8)  # the sizes of the paper
    depths: list[int] = []
    for parent, _ in tree:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    assert [depths.count(depth) for depth in range(1, 7)] == [8, 21, 25, 15, 8, 3]
    rival = Told("rival_recycling", [1, 5])
    rival.harvest({5: [2, 3], 6: [8, 9]})
    rival.harvest({5: [6, 7]})  # replaces, and does not add
    # 8 and 9 stand under 6 at depth 2; of 7, 8 and 9 nothing is known.
    assert rival.drafted(80) == ([6, 8, 7, 9], [-1, 0, -1, 0])
    whole = Told("rival_recycling", [0])
    whole.harvest({i: [(i + k) % 97 for k in range(1, 9)] for i in range(97)})
    assert len(whole.drafted(200)[0]) == 80
    # Where there is less room: six first choices, and the second one at the root.
    assert whole.drafted(7) == ([1, 2, 3, 4, 5, 6, 2], [-1, 0, 1, 2, 3, 4, -1])


def test_goose_puts_branches_beside_a_copied_spine() -> None:
    rival = Told("rival_goose", [1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    rival.harvest({3: [4, 9, 8, 7]}, probs=[0.5, 0.3, 0.195, 0.005])
    # All seven tokens that followed 1 2 3; then 9 and 8 beside them, but not 4, which is there, nor
    # 7, whose probability is below 1 %. Behind the spine, whose last token is 3 again, one branch.
    expected = [4, 5, 6, 7, 1, 2, 3, 9, 8, 4], [-1, 0, 1, 2, 3, 4, 5, -1, -1, 6]
    assert rival.drafted() == expected
    # Of 5 nodes, 6 with the root, 76 % are spine; the one left would hang from it, where nothing is
    # known, and not from the root.
    assert rival.drafted(5) == chain_of([4, 5, 6, 7])


def test_sssd_drafts_all_continuations_by_their_frequency() -> None:
    told = Told("rival_sssd", [1, 2, 5, 1, 2, 6, 7, 3, 2, 8, 1, 2, 6, 9, 1, 2])
    # After 1 2: two of three times 6, of these once 7 and once 9; once 5. Last, 8 after 2 alone.
    assert told.drafted(4) == ([6, 5, 7, 9], [-1, -1, 0, 0])
    tokens, parents = told.drafted()
    assert (8, -1) in zip(tokens, parents, strict=True)
    assert Told("rival_sssd", [1, 2, 3]).drafted() == ([], [])


@pytest.mark.parametrize("name", RIVALS)
def test_only_those_that_are_kept_warm_know_earlier_prompts(name: str) -> None:
    rival = Told(name, [1, 2, 3, 4, 5, 6])
    if rival.drafter.num_successors:
        rival.harvest({i: [i + 1, i + 2] for i in range(1, 6)})
    rival.observe([1, 2, 3, 4, 5, 6])
    rival.close()
    later = Told(rival.drafter, [3, 4])
    assert (later.drafted()[0] != []) == (name in ("rival_recycling", "rival_sam_recycling"))


def test_each_rival_has_its_published_budget_unless_one_is_asked_for() -> None:
    from benchmarks.methods import Given

    published = {
        "rival_prompt_lookup": 10,
        "rival_recycling": 80,
        "rival_sam_recycling": 80,
        "rival_goose": 100,
        "rival_sssd": 16,
    }
    assert {name: rival.max_draft_tokens for name, rival in RIVALS.items()} == published
    model, prompt = tiny_model("llama", seed=4), torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8]])
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    options = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0, "eos_token_id": None}
    for name, most in published.items():
        drafted = []
        for config in (lade.Config(), lade.Config(max_draft_tokens=2)):
            make: Any = METHODS[name].make
            drafted.append(make(Given(config))(model, inputs, options).stats.draft_tokens_per_step)
        assert drafted[1] <= 2 < drafted[0] <= most, name
        assert f"{most} draft tokens" in METHODS[name].description
