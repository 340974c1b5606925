"""The arena and the fit of first weights: same texts, halves of prompts, lessons learned."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lade
from benchmarks import arena
from benchmarks.arena import Entry, SameText, run_arena, steps_by_prompt
from benchmarks.fit import Lesson, as_source, crude_weights, fit, record_lessons
from benchmarks.points import points
from benchmarks.prompts import Half, choose
from lade.bench.prompts import Prompt
from lade.bench.settings import BenchSettings
from lade.config import Config
from lade.models.loading import LoadedModel
from ngram_pool import NGramPool
from ngram_pool.weights import first_weights
from tests.lade.shared import shared_model
from tests.lade.tiny import byte_tokenizer

PROMPTS = [Prompt(str(i), "ab"[i % 2], text) for i, text in enumerate(("abab", "xyz", "hello"))]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return LoadedModel(shared_model(), byte_tokenizer(), "tiny")


def test_a_method_has_to_write_the_text_it_is_given(loaded: LoadedModel) -> None:
    prompt, text = torch.tensor([[5, 6, 7]]), [9, 9, 4, 30, 9, 9, 4, 31]
    processors: Any = [SameText(3, text)]
    written = lade.generate(
        loaded.model, prompt, max_new_tokens=len(text), logits_processor=processors
    )
    assert written[0, 3:].tolist() == text


@pytest.mark.exhaustive
def test_all_methods_write_the_texts_of_generate_with_every_size(loaded: LoadedModel) -> None:
    entries: list[Entry] = []
    names = ["lade", "lade_fresh", "rival_goose"]
    run_arena(loaded, PROMPTS, names, [2, 8], BenchSettings(24), Config(), entries=entries)
    assert [(e.prompt.id, e.max_draft_tokens, e.method) for e in entries] == [
        (prompt.id, size, name) for prompt in PROMPTS for size in (2, 8) for name in names
    ]
    for entry in entries:
        assert entry.stats.num_tokens == entries[0].stats.num_tokens
        assert entry.stats.draft_tokens_per_step <= entry.max_draft_tokens
    assert len({entry.stats.num_steps for entry in entries}) > 1
    by_prompt = steps_by_prompt(entries)
    assert [each["num_steps"]["lade"]["8"] for each in by_prompt] == [
        e.stats.num_steps for e in entries if e.method == "lade" and e.max_draft_tokens == 8
    ]
    assert {point.num_answers for point in points(entries)} <= {1, 2, 3}


def test_a_method_that_writes_another_text_is_found(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OtherText(SameText):
        def __init__(self, num_prompt_tokens: int, token_ids: list[int]) -> None:
            super().__init__(num_prompt_tokens, [token + 1 for token in token_ids])

    monkeypatch.setattr(arena, "SameText", OtherText)
    with pytest.raises(RuntimeError, match="expected lade to write the text of generate"):
        run_arena(loaded, PROMPTS, ["lade"], [4], BenchSettings(8), Config(), entries=[])


def test_a_prompt_is_in_the_same_half_of_any_file(tmp_path: Path) -> None:
    assert [Half.of(prompt_id) for prompt_id in ("81", "84", "560", "translation-1")] == [
        *("fit", "publish", "fit", "fit")
    ]
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(f"p{i}" for i in range(40)))
    halves = [{prompt.id for prompt in choose(path, None, half).prompts} for half in Half]
    assert halves[0] | halves[1] == {str(i) for i in range(1, 41)}
    assert not halves[0] & halves[1]
    assert min(map(len, halves)) > 10
    assert {prompt.id for prompt in choose(path, 5, Half.fit).prompts} <= halves[0]
    path.write_text('{"question_id": 84, "prompt": "a"}')
    with pytest.raises(ValueError, match=r"expected prompts in the fit half of prompts\.txt"):
        choose(path, None, Half.fit)


def prob_after(weights: np.ndarray[Any, Any], text: list[int], next_token_id: int) -> float:
    """Return the probability that a pool with these weights gives for the token after a text."""
    pool = NGramPool()
    pool._weights = weights
    sequence = pool.open_sequence()
    pool.observe(text, sequence)
    draft = pool.draft(text, 8, sequence=sequence)
    at_root = zip(draft.parents, draft.token_ids, draft.probs, strict=True)
    return next(
        float(prob) for parent, token, prob in at_root if (parent, token) == (-1, next_token_id)
    )


def test_fitted_weights_trust_what_was_right() -> None:
    text = [1, 2, 3, 4, 5, 1, 2, 3]
    right = [Lesson(text, [[4], [5], [1], [2], [3], [4]])] * 20
    wrong = [Lesson(text, [[9], [8], [1], [7], [2], [6]])] * 20
    begun = crude_weights()
    before = prob_after(begun, text, 4)
    assert prob_after(fit(right, begun, None), text, 4) > before > 0.1
    assert prob_after(fit(wrong, begun, None), text, 4) < before
    assert (begun == crude_weights()).all()
    assert (fit(right, begun, None, rates=()) == begun).all()


def test_lessons_are_what_a_drafter_is_told(loaded: LoadedModel) -> None:
    lessons: list[Lesson] = []
    record_lessons(
        loaded, PROMPTS, BenchSettings(12), Config(max_draft_tokens=4), None, lessons=lessons
    )
    for lesson in lessons:
        committed = [token for told in lesson.told if isinstance(told, list) for token in told]
        assert len(committed) == 12
    fitted = fit(lessons, first_weights(), None)
    assert fitted.shape == first_weights().shape
    assert as_source(first_weights()).splitlines()[0].startswith("    (100, 36, 51, 30, 30, -1, 0")
