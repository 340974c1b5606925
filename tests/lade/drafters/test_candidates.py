"""Candidate generators of transformers as drafters: their text, their trees and how far they go."""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.generation import candidate_generator as hf

import lade
from lade.drafters import AssistantModel, CallPool, Candidates, Merged
from lade.drafters.candidates import config_for
from lade.drafting.drafter import DraftingCall
from ngram_pool import SampledDraft
from tests.chi_square import FALSE_ALARM, p_value
from tests.lade.both import ONE, same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import paths_of, tiny_model

STRICT = lade.Config(max_draft_tokens=8, strict_drafter=True)
VOCAB_SIZE = 6
Path = tuple[int, ...]

# --- the text -----------------------------------------------------------------------------------


def words(ids: list[int]) -> Any:
    """Return a tokenizer of 97 words with these ids."""
    tokenizer = Tokenizer(models.WordLevel({f"w{word}": id_ for word, id_ in enumerate(ids)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


MINE, THEIRS = words([*range(97)]), words([*reversed(range(97))])


def reversed_twin(model: Any) -> Any:
    """Return a copy whose tokens are those of `THEIRS`."""
    twin = copy.deepcopy(model)
    for layer in (twin.get_input_embeddings(), twin.get_output_embeddings()):
        layer.weight.data = layer.weight.data.flip(0).clone()
    return twin


def early_exit(call: DraftingCall, input_ids: Any, processors: Any) -> Any:
    twin, config = copy.deepcopy(call.model), config_for(call)
    config.assistant_early_exit = 2
    return hf.EarlyExitCandidateGenerator(input_ids, twin, config, {}, logits_processor=processors)


def universal(call: DraftingCall, input_ids: Any, processors: Any) -> Any:
    assistant = reversed_twin(call.model)
    translator = hf.AssistantToTargetTranslator(MINE, THEIRS, 97, assistant)
    return hf.UniversalSpeculativeDecodingGenerator(
        *(input_ids, assistant, MINE, THEIRS, config_for(call), {}, translator)
    )


def looked_up(call: DraftingCall, input_ids: Any, processors: Any) -> Any:
    return hf.PromptLookupCandidateGenerator(max_length=call.max_length, num_output_tokens=4)


def assisted(call: DraftingCall, input_ids: Any, processors: Any, do_sample: bool = False) -> Any:
    twin, config = copy.deepcopy(call.model), config_for(call)
    config.do_sample = do_sample
    return hf.AssistedCandidateGenerator(input_ids, twin, config, {}, logits_processor=processors)


# Draws from the generator that the text is drawn from.
sampling = partial(assisted, do_sample=True)


@pytest.mark.parametrize("make", [assisted, early_exit, universal, looked_up, sampling])
def test_a_generator_changes_no_text(make: Callable[..., Any]) -> None:
    model, num_drafted = shared_model("llama", seed=1), 0
    for drafter in (Candidates(make), Merged([CallPool(), Candidates(make)])):
        for do_sample in (False, True):
            options: dict[str, Any] = {"do_sample": do_sample, "max_new_tokens": 30}
            _, got = same_as_generate(model, ONE, drafter=drafter, config=STRICT, **options)
            num_drafted += got.stats.sources["candidates"].num_draft_tokens
    assert num_drafted > 20


def test_an_assistant_may_have_other_tokens() -> None:
    """It is the same model, so all that it drafts is right."""
    model = shared_model("llama", seed=1)
    options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": None, "config": STRICT}
    assistant = reversed_twin(model)
    drafter = AssistantModel(assistant, THEIRS, target_tokenizer=MINE, length=4)
    _, got = same_as_generate(model, ONE, drafter=drafter, **options)
    assert got.stats.num_steps < 15
    for name in ("assistant_lookbehind", "target_lookbehind"):
        given: dict[str, Any] = {"assistant_tokenizer": THEIRS, "tokenizer": MINE, name: 5}
        given |= {"assistant_model": assistant, "do_sample": False}
        out = lade.generate(model, ONE, **options, **given)
        assert torch.equal(out, got.sequences)


def test_generators_that_need_the_targets_states_are_refused() -> None:
    def needing(call: DraftingCall, input_ids: Any, processors: Any) -> Any:
        return SimpleNamespace(requires_model_outputs=True)

    with pytest.raises(lade.UnsupportedOptionError, match="SimpleNamespace drafts from hidden sta"):
        same_as_generate(shared_model("llama"), ONE, drafter=Candidates(needing), config=STRICT)


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


# --- how far it goes ------------------------------------------------------------------------------


@pytest.mark.parametrize("right", [0.3, 0.7, 0.97])
@pytest.mark.parametrize("forward", [0.001, 0.05, 0.2])
def test_measured_drafts_are_as_long_as_is_fastest(right: float, forward: float) -> None:
    drafter: Any = AssistantModel(tiny_model("llama", seed=1))
    for sec in (1.5, forward, forward, forward):  # libraries prepare kernels in the first one
        drafter._forward_sec.record(1, sec)
    step_sec = lambda num_tokens: 0.1 + 0.002 * num_tokens  # noqa: E731
    mine = drafter.for_call(DraftingCall(drafter.model, 97, 500, step_sec=step_sec))
    state, lengths = mine._texts[mine.open([1, 2])], list[int]()
    model, rng = SimpleNamespace(options=GenerationConfig()), np.random.default_rng(0)
    update = lambda *given: None  # noqa: E731
    state.generator = SimpleNamespace(assistant_model=model, update_candidate_strategy=update)
    for _ in range(400):
        length = mine._best_length(state)
        lengths.append(length)
        state.token_ids = [5] * length
        num_right = int(np.argmax(rng.random(length + 1) >= [*[right] * length, 0.0]))
        mine.observe(0, [*[5] * num_right, 7])
    speeds = [
        sum(right**depth for depth in range(num + 1)) / (0.1 + num * (forward + 0.002))
        for num in range(1, 21)
    ]
    assert np.mean(lengths[100:]) == pytest.approx(1 + int(np.argmax(speeds)), rel=0.3, abs=1)


@pytest.mark.parametrize(("schedule", "nums"), [("heuristic", {2, 4, 6}), ("constant", {0, 1, 2})])
def test_a_schedule_of_transformers_is_followed(schedule: str, nums: set[int]) -> None:
    """Drafts that are right become longer, or not; those at the end are cut."""
    drafted = set[int]()

    class Noting(AssistantModel):
        def draft(self, *given: Any) -> Any:
            draft = super().draft(*given)
            drafted.add(int(draft.depths.max(initial=0)))
            return draft

    options: dict[str, Any] = {"num_assistant_tokens_schedule": schedule, "num_assistant_tokens": 2}
    model, options["assistant_confidence_threshold"] = shared_model("llama", seed=1), 0.0
    config = lade.Config(max_draft_tokens=40, strict_drafter=True)
    wanted: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": None, "config": config}
    same_as_generate(model, ONE, drafter=Noting(model, options=options), **wanted)
    assert nums <= drafted if schedule == "heuristic" else drafted <= nums
