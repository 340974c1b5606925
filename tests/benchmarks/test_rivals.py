"""Rivals of the arena: what they draft from texts made by hand, and that they keep to the rules."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import lade
from benchmarks.methods import METHODS
from benchmarks.replay import DRAFTERS
from benchmarks.rivals.catalogue import RIVALS
from benchmarks.rivals.goose import GooseDrafter
from benchmarks.rivals.growing import ROOT, GrowingDraft
from benchmarks.rivals.lookahead import LookaheadDrafter
from benchmarks.rivals.prompt_lookup import PromptLookupDrafter
from benchmarks.rivals.recycling import RecyclingDrafter, TreePlace, static_tree
from benchmarks.rivals.sam import SamDrafter, SamRecyclingDrafter, SuffixAutomaton
from benchmarks.run import choose
from lade.bench import methods
from lade.bench.baselines import Given
from lade.bench.run import run_methods
from lade.bench.settings import BenchSettings
from lade.config import Config, Lookahead
from lade.drafting.drafter import Drafter
from lade.drafting.successors import Successors
from ngram_pool import Draft
from tests.grids import thinned
from tests.lade.bench.test_bench import PROMPTS, tiny_loaded
from tests.lade.tiny import tiny_model

HARVESTING = ["rival_recycling", "rival_sam_recycling", "rival_goose"]
#: Whose first nodes do not depend on how many are asked for.
CUT_FROM_BEHIND = [name for name in RIVALS if name != "rival_goose"]


def drafted(drafter: Drafter, text: Sequence[int], max_draft_tokens: int = 100) -> tuple[Any, Any]:
    """Return tokens and parents of the draft after a prompt."""
    sequence = drafter.open(text)
    draft = drafter.draft(sequence, text, max_draft_tokens)
    drafter.close(sequence)
    assert_is_tree(draft, max_draft_tokens)
    return draft.token_ids.tolist(), draft.parents.tolist()


def assert_is_tree(draft: Draft, max_draft_tokens: int) -> None:
    assert len(draft) <= max_draft_tokens
    assert draft.token_ids.dtype == draft.parents.dtype == draft.depths.dtype == np.int32
    parents, depths = draft.parents.tolist(), draft.depths.tolist()
    assert all(-1 <= parent < node for node, parent in enumerate(parents))
    assert depths == [1 if parent == -1 else depths[parent] + 1 for parent in parents]
    places = [*zip(parents, draft.token_ids.tolist(), strict=True)]
    assert len(set(places)) == len(places)  # no token twice under one parent
    assert (np.diff(draft.probs) <= 0).all()
    assert ((draft.probs > 0) & (draft.probs <= 1)).all()


def chain_of(tokens: Sequence[int]) -> tuple[Any, Any]:
    return [*tokens], [*range(-1, len(tokens) - 1)]


def harvest(
    drafter: Drafter,
    sequence: int,
    committed: Sequence[int],
    nodes: dict[int, list[int]],
    probs: Sequence[float] | None = None,
) -> None:
    """Tell of a chain of nodes, the first of which is committed: token -> successors."""
    token_ids = np.array([*nodes.values()], np.int32)
    weights = np.ones(token_ids.shape[1]) if probs is None else np.array(probs)
    all_probs = np.tile(weights / 2, (len(nodes), 1)).astype(np.float32)
    parents = [*range(-1, len(nodes) - 1)]
    drafter.harvest(sequence, committed, [*nodes], parents, Successors(token_ids, all_probs))


# --- a draft made node by node --------------------------------------------------------------


def test_candidates_share_what_they_have_in_common_and_end_where_room_ends() -> None:
    growing = GrowingDraft(4)
    assert growing.add_path([1, 2, 3]) == [0, 1, 2]
    assert growing.add_path([1, 2, 4, 5]) == [0, 1, 3]
    assert growing.add_path([1, 2]) == [0, 1]  # nothing new needs no room
    assert growing.add_path([7]) == []
    draft = growing.build()
    assert draft.token_ids.tolist() == [1, 2, 3, 4]
    assert draft.parents.tolist() == [-1, 0, 1, 1]
    assert draft.depths.tolist() == [1, 2, 3, 3]


# --- copying --------------------------------------------------------------------------------


def test_prompt_lookup_copies_ten_tokens_from_the_earliest_longest_match() -> None:
    text = [7, 1, 2, 3, 4, 8, 1, 2, 3, 5, 1, 2, 3]
    # Not 5, from the latest place of 1 2 3.
    assert drafted(PromptLookupDrafter(), text) == chain_of([4, 8, 1, 2, 3, 5, 1, 2, 3])
    # Not 7, from the earliest place of 2 3, of two tokens.
    assert drafted(PromptLookupDrafter(), [2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 2) == chain_of([8, 1])
    assert drafted(PromptLookupDrafter(), [1, 2, 9, 3, 2]) == chain_of([9, 3, 2])  # of one token
    assert drafted(PromptLookupDrafter(), [*range(30), 3]) == chain_of(range(4, 14))
    assert drafted(PromptLookupDrafter(), [1, 2, 3]) == ([], [])


def test_sam_copies_the_more_the_longer_the_match() -> None:
    # 1 2 3 occurred once; 2 3 occurred earlier, and went on with 7.
    text = [2, 3, 7, 1, 2, 3, 8, 1, 2, 3]
    assert drafted(SamDrafter(), text) == chain_of([8, 1, 2, 3])
    # A single token is followed by five, though ten could be copied.
    assert drafted(SamDrafter(), [*range(11), 0]) == chain_of([1, 2, 3, 4, 5])
    # From the earliest of several places, and never more than 40 tokens.
    text = [*range(60), *range(20), 99, *range(20)]
    assert drafted(SamDrafter(), text) == chain_of(range(20, 60))
    assert drafted(SamDrafter(), [1, 2, 3]) == ([], [])


def naive_match(text: list[int], context: list[int]) -> tuple[int, int]:
    """Return the longest end of `context` in `text`, before its last place, and where it ended."""
    for length in range(len(context), 0, -1):
        for start in range(len(text) - length + 1):
            end = start + length
            is_itself = end == len(text) == len(context)
            if text[start:end] == context[-length:] and not is_itself:
                return length, end
    return 0, 0


def test_the_automaton_finds_what_a_search_of_all_text_finds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        text = rng.integers(0, int(rng.integers(1, 5)), int(rng.integers(1, 40))).tolist()
        automaton = SuffixAutomaton()
        automaton.extend(text)
        assert automaton.match(text) == naive_match(text, text)
        # With tokens that a grammar forces and the automaton has not read.
        context = text + rng.integers(0, 5, 3).tolist()
        assert automaton.match(context).length == naive_match(text, context)[0]


# --- the pool of lookahead decoding ---------------------------------------------------------


def test_lookahead_merges_what_followed_the_last_token_newest_first() -> None:
    text = [1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1, 2, 7, 7, 7, 1]
    expected = [2, 7, 7, 7, 3, 4, 6, 5], [-1, 0, 1, 2, 0, 4, 5, 5]
    assert drafted(LookaheadDrafter(), text) == expected
    # The oldest candidate goes first, and not a leaf of each.
    assert drafted(LookaheadDrafter(), text, 5) == (expected[0][:5], expected[1][:5])


def test_lookahead_keeps_the_seven_candidates_last_seen() -> None:
    candidates = [[1, i, i, i, i] for i in range(10, 18)]  # eight
    first, second, *others = candidates
    text = [token for ngram in [first, second, first, *others, [1]] for token in ngram]
    tokens, parents = drafted(LookaheadDrafter(), text)
    firsts = [token for token, parent in zip(tokens, parents, strict=True) if parent == ROOT]
    assert firsts == [17, 16, 15, 14, 13, 12, 10]  # 10 was seen again after 11
    assert len(tokens) == 28


def test_lookahead_learns_of_the_answer_or_of_a_window() -> None:
    for has_window, expected in ((False, [2, 3, 4, 5]), (True, [6, 7, 8, 9])):
        drafter = LookaheadDrafter(has_window)
        sequence = drafter.open([9])
        drafter.observe(sequence, [1, 2, 3])
        drafter.observe(sequence, [4, 5])  # an n-gram may end in a later step
        if has_window:
            drafter.observe_ngrams(sequence, np.array([[1, 6, 7, 8, 9]], np.int32))
        assert drafter.draft(sequence, [9, 1], 28).token_ids.tolist() == expected


# --- the target's successors ----------------------------------------------------------------


def test_the_static_tree_has_the_sizes_of_the_paper() -> None:
    tree = static_tree((8, 21, 25, 15, 8, 3), 8)
    depths: list[int] = []
    for parent, _ in tree:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    assert [depths.count(depth) for depth in range(1, 7)] == [8, 21, 25, 15, 8, 3]
    assert all(parent < place for place, (parent, _) in enumerate(tree))
    assert len(set(tree)) == 80
    # The first choice at every depth comes before any second choice.
    assert tree[:6] == [TreePlace(parent, 0) for parent in range(-1, 5)]
    assert static_tree((2, 2), 2) == [
        TreePlace(ROOT, 0),
        TreePlace(0, 0),
        TreePlace(ROOT, 1),
        TreePlace(0, 1),
    ]


def test_recycling_fills_the_tree_with_the_successors_last_seen() -> None:
    drafter = RecyclingDrafter()
    sequence = drafter.open([1, 5])
    harvest(drafter, sequence, [1, 5], {5: [2, 3], 6: [8, 9]})
    harvest(drafter, sequence, [1, 5], {5: [6, 7]})  # replaces, and does not add
    draft = drafter.draft(sequence, [1, 5], 80)
    # 8 and 9 stand under 6 at depth 2; of 7, 8 and 9 nothing is known.
    assert draft.token_ids.tolist() == [6, 8, 7, 9]
    assert draft.parents.tolist() == [-1, 0, -1, 0]
    assert len(drafter.draft(sequence, [5, 1], 80)) == 0  # 1 was not run


def test_recycling_fills_all_80_places_and_takes_the_best_where_there_are_fewer() -> None:
    drafter = RecyclingDrafter()
    sequence = drafter.open([0])
    # token -> the eight after it; all are known.
    harvest(drafter, sequence, [0], {i: [(i + k) % 97 for k in range(1, 9)] for i in range(97)})
    whole = drafter.draft(sequence, [0], 200)
    assert_is_tree(whole, 80)
    assert len(whole) == 80
    assert whole.token_ids[whole.depths == 1].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    few = drafter.draft(sequence, [0], 7)
    # Six first choices, and the second one at the root: not the eight of depth 1.
    assert few.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 2]
    assert few.parents.tolist() == [-1, 0, 1, 2, 3, 4, -1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 4, 5, 8, 1, 2, 3, 4, 5], chain_of([8, 1, 2, 3, 4, 5])),
        ([9, 2, 3, 4, 5, 8, 1, 2, 3, 4, 5], ([60, 61], [-1, -1])),  # a match of four
    ],
)
def test_sam_recycling_copies_after_five_tokens(text: list[int], expected: Any) -> None:
    drafter = SamRecyclingDrafter()
    sequence = drafter.open(text)
    harvest(drafter, sequence, text, {5: [60, 61]})
    draft = drafter.draft(sequence, text, 80)
    assert (draft.token_ids.tolist(), draft.parents.tolist()) == expected


# --- Goose ----------------------------------------------------------------------------------


def test_goose_puts_branches_beside_a_copied_spine() -> None:
    drafter = GooseDrafter()
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    sequence = drafter.open(text)
    harvest(drafter, sequence, text, {3: [4, 9, 8, 7]}, probs=[0.5, 0.3, 0.195, 0.005])
    draft = drafter.draft(sequence, text, 100)
    # All seven tokens that followed 1 2 3; then 9 and 8 beside them, but not 4, which is there, nor
    # 7, whose probability is below 1 %. Behind the spine, whose last token is 3 again, one branch.
    assert draft.token_ids.tolist() == [4, 5, 6, 7, 1, 2, 3, 9, 8, 4]
    assert draft.parents.tolist() == [-1, 0, 1, 2, 3, 4, 5, -1, -1, 6]
    # Of 5 nodes, 6 with the root, 76 % are spine; the one left would hang from it, where nothing is
    # known, and not from the root.
    assert drafter.draft(sequence, text, 5).token_ids.tolist() == [4, 5, 6, 7]


def test_goose_prefers_pairs_and_grows_branches() -> None:
    drafter = GooseDrafter()
    sequence = drafter.open([1])
    harvest(drafter, sequence, [1], {1: [2, 3], 2: [4, 5]})  # 2 behind 1
    harvest(drafter, sequence, [9, 2], {2: [6, 7]})  # 2 behind 9, and so the newest of 2 alone
    harvest(drafter, sequence, [8, 3], {3: [2]})
    draft = drafter.draft(sequence, [1], 6)
    # Both tokens after 1; then, breadth first, the pair 1 2 (not 6 7), 3, and the pair 3 2, which
    # is not known, so 2 alone.
    assert draft.token_ids.tolist() == [2, 3, 4, 5, 2, 6]
    assert draft.parents.tolist() == [-1, -1, 0, 0, 1, 4]
    assert drafter.draft(sequence, [9], 6).token_ids.tolist() == []


def test_goose_copies_alone_where_its_tables_are_empty_and_on_where_all_agree() -> None:
    drafter = GooseDrafter()
    text = [*range(40), *range(5)]
    sequence = drafter.open(text)
    assert drafter.draft(sequence, text, 100).token_ids.tolist() == [*range(5, 25)]
    # The third time, both places before went on alike: the spine takes all, and goes on behind 20.
    text = [*text, *range(5, 40), *range(5)]
    drafter.observe(sequence, [*range(5, 40), *range(5)])
    harvest(drafter, sequence, text, {4: [5, 60]})
    draft = drafter.draft(sequence, text, 100)
    assert draft.token_ids.tolist() == [*range(5, 40), *range(40), *range(25)]  # 100 of them
    assert draft.depths.tolist() == [*range(1, 101)]


def test_goose_gives_less_to_spines_that_fail() -> None:
    drafter = GooseDrafter()
    sequence, text = drafter.open([]), []
    lengths = []
    for first in (10, 20, 30, 40):
        # Something new, and the beginning of it again: five tokens could be copied.
        new = [first, first + 1, first + 2, first + 3, first + 4, first, first + 1, first + 2]
        text += new
        drafter.observe(sequence, new)
        harvest(drafter, sequence, text, {first + 2: [0]})
        draft = drafter.draft(sequence, text, 5)
        assert_is_tree(draft, 5)
        lengths.append(int((draft.token_ids != 0).sum()))
    # Acceptances of 0.5, 0.35, 0.245 and 0.1715: shares of 0.5, 0.3, 0.3 and 0.15, raised by trust.
    assert lengths == [4, 3, 3, 2]


# --- all of them ----------------------------------------------------------------------------


def live(drafter: Drafter, rng: np.random.Generator, max_draft_tokens: int) -> Iterator[Draft]:
    """Yield the drafts of a made-up generation of two interleaved sequences."""
    texts = [rng.integers(0, 6, int(rng.integers(1, 30))).tolist() for _ in range(2)]
    handles = [drafter.open(text) for text in texts]
    for _ in range(25):
        for handle, text in zip(handles, texts, strict=True):
            draft = drafter.draft(handle, text, max_draft_tokens)
            yield draft
            if drafter.num_successors:
                token_ids = [text[-1], *draft.token_ids.tolist()]
                top = [rng.permutation(12)[: drafter.num_successors] for _ in token_ids]
                probs = -np.sort(-rng.dirichlet(np.ones(top[0].size), len(top)))
                successors = Successors(np.array(top, np.int32), probs.astype(np.float32))
                parents = [-1, *(draft.parents + 1).tolist()]
                drafter.harvest(handle, [*text], token_ids, parents, successors)
            emitted = rng.integers(0, 6, int(rng.integers(1, 4))).tolist()
            text += emitted
            drafter.observe(handle, emitted)
    for handle in handles:
        drafter.close(handle)


@pytest.mark.parametrize("name", RIVALS)
def test_drafts_are_trees_within_the_budget(name: str) -> None:
    num_nodes = 0
    for max_draft_tokens in (1, 2, 5, 16, RIVALS[name].max_draft_tokens):
        for draft in live(RIVALS[name].make_drafter(), np.random.default_rng(1), max_draft_tokens):
            assert_is_tree(draft, max_draft_tokens)
            num_nodes += len(draft)
    assert num_nodes > 0


@pytest.mark.parametrize("name", CUT_FROM_BEHIND)
def test_fewer_nodes_are_the_first_of_more(name: str) -> None:
    rng = np.random.default_rng(2)
    drafter = RIVALS[name].make_drafter()
    text = rng.integers(0, 4, 60).tolist()
    sequence = drafter.open(text)
    if drafter.num_successors:
        harvest(drafter, sequence, text, {i: [*rng.permutation(4)] for i in range(4)})
    whole = drafter.draft(sequence, text, 100)
    assert len(whole) > 3
    for max_draft_tokens in range(len(whole)):
        draft = drafter.draft(sequence, text, max_draft_tokens)
        assert draft.token_ids.tolist() == whole.token_ids[:max_draft_tokens].tolist()
        assert draft.parents.tolist() == whole.parents[:max_draft_tokens].tolist()


@pytest.mark.parametrize("name", RIVALS)
def test_drafts_go_on_behind_forced_tokens(name: str) -> None:
    drafter = RIVALS[name].make_drafter()
    text = [1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1, 2]
    sequence = drafter.open(text)
    if drafter.num_successors:
        harvest(drafter, sequence, text, {2: [1, 3], 3: [4, 1]})
    draft = drafter.draft(sequence, [*text, 3], 10)  # a grammar leaves no choice but 3
    assert draft.token_ids[0] == 4
    drafter.observe(sequence, [3, 4, 5])
    assert_is_tree(drafter.draft(sequence, [*text, 3, 4, 5], 10), 10)


@pytest.mark.parametrize(
    "name", thinned(RIVALS, "rival_prompt_lookup", "rival_recycling", "rival_goose")
)
def test_greedy_text_is_that_of_plain_decoding(name: str) -> None:
    model = tiny_model("llama", seed=4)
    inputs = torch.tensor([[0, 0, 5, 6, 5, 6], [7, 8, 9, 7, 8, 9], [0, 0, 0, 0, 0, 11]])
    mask = (inputs != 0).long()
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    plain = model.generate(inputs, attention_mask=mask, **options)
    rival = RIVALS[name]
    drafter = rival.make_drafter()
    config = Config(max_draft_tokens=rival.max_draft_tokens, lookahead=rival.lookahead)
    for row in (slice(0, 3), slice(1, 2)):  # a batch, then one row with the same drafter
        output = lade.generate(
            model,
            inputs[row],
            attention_mask=mask[row],
            drafter=drafter,
            config=config,
            return_dict_in_generate=True,
            **options,
        )
        assert output.sequences.tolist() == plain[row, : output.sequences.shape[1]].tolist()
        assert output.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("name", RIVALS)
def test_what_is_kept_of_a_sequence_goes_with_it(name: str) -> None:
    drafter: Any = RIVALS[name].make_drafter()
    [*live(drafter, np.random.default_rng(3), 8)]
    parts = [drafter, *(part for part in vars(drafter).values() if hasattr(part, "draft"))]
    kept = [vars(part)["_open"] for part in parts if "_open" in vars(part)]
    assert all(each == {} for each in kept)
    assert kept or name == "rival_recycling"  # which keeps nothing of a sequence
    assert (drafter.num_successors > 0) == (name in HARVESTING)
    assert drafter.learns_ngrams == name.startswith("rival_lookahead")


@pytest.mark.parametrize("name", RIVALS)
def test_only_the_warm_ones_know_earlier_prompts(name: str) -> None:
    drafter = RIVALS[name].make_drafter()
    sequence = drafter.open([1, 2, 3, 4, 5, 6])
    if drafter.num_successors:
        harvest(drafter, sequence, [1], {i: [i + 1, i + 2] for i in range(1, 6)})
    drafter.observe(sequence, [1, 2, 3, 4, 5, 6])
    drafter.close(sequence)
    is_warm = name in ("rival_recycling", "rival_sam_recycling")
    assert (drafted(drafter, [3, 4])[0] != []) == is_warm


# --- as methods -----------------------------------------------------------------------------


def test_rivals_run_only_when_named() -> None:
    assert set(RIVALS) <= set(METHODS)
    assert not set(RIVALS) & set(choose(None, False, None, None))
    assert choose("rival_sam,plain", False, None, None) == ["rival_sam", "plain"]


def test_each_rival_has_its_own_budget_unless_one_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[Any] = []

    def generate(*args: Any, drafter: Any, config: Config, **options: Any) -> Any:
        taken.append((drafter, config.max_draft_tokens, config.lookahead))
        return lade.generate(*args, drafter=drafter, config=config, **options)

    monkeypatch.setattr(methods, "generate", generate)
    own = [10, 28, 28, 80, 40, 80, 100]
    window = {"rival_lookahead_window": Lookahead(window_size=7, ngram_size=5)}
    for config, budgets in ((Config(), own), (Config(max_draft_tokens=6), [6] * len(own))):
        taken.clear()
        run_methods(
            *(
                tiny_loaded(),
                PROMPTS[:2],
                {name: METHODS[name] for name in RIVALS},
                BenchSettings(4, passes=2),
            ),
            Given(config),
            results=[],
        )
        for name, budget in zip(RIVALS, budgets, strict=True):
            make: Any = RIVALS[name].make_drafter
            kind = make if isinstance(make, type) else LookaheadDrafter
            calls = [
                call for call in taken if type(call[0]) is kind and call[2] == window.get(name)
            ]
            assert [call[1] for call in calls] == [budget] * 4, name
            drafters = [call[0] for call in calls]
            # One for all prompts of a pass, a new one for the next.
            assert drafters[0] is drafters[1]
            assert drafters[2] is drafters[3]
            assert drafters[1] is not drafters[2]


def test_descriptions_name_source_and_budget() -> None:
    for name, rival in RIVALS.items():
        description = METHODS[name].description
        assert "arXiv" in description or "Saxena 2023" in description
        assert f"{rival.max_draft_tokens} draft tokens" in description
        assert (name not in DRAFTERS) == (name == "rival_lookahead_window")
