"""What a grammar forces is foreseen, and asking about it changes nothing."""

import json
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    TemperatureLogitsWarper,
)

import lade
from lade.drafting.grammar import ForcedTokens, forced_tokens_of
from tests.lade.tiny import random_prompt, tiny_model

# --- processors that know -----------------------------------------------------------------------


class Knowing(LogitsProcessor, ForcedTokens):  # type: ignore[misc]
    """Forces 7 after the first token; what it foresees is as asked for."""

    def __init__(self, foresee: Callable[[], Any] = lambda: [7]) -> None:
        self._foresee = foresee

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def forced_tokens(self, row: int, committed: Sequence[int], max_tokens: int) -> list[int]:
        foreseen: list[int] = self._foresee()
        return foreseen


def test_the_first_processor_with_foresight_is_found() -> None:
    knowing = Knowing()
    assert forced_tokens_of([]) is None
    assert forced_tokens_of([TemperatureLogitsWarper(0.5)]) is None
    assert forced_tokens_of([TemperatureLogitsWarper(0.5), knowing]) is knowing


def test_no_name_of_an_attribute_makes_a_processor_know() -> None:
    class Named(LogitsProcessor):  # type: ignore[misc]
        forced_tokens: Any = ((20, 33),)

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

    class Called(Named):
        def forced_tokens(self, step: int) -> list[int]:
            raise AssertionError("it is not lade's to call")

    prefix_function = PrefixConstrainedLogitsProcessor(lambda row, ids: [7], 1)
    assert forced_tokens_of([Named(), Called(), prefix_function]) is None


def _draws() -> list[int]:
    torch.rand(3)
    return []


@pytest.mark.parametrize(
    "foresee",
    [lambda: 1 / 0, lambda: None, lambda: ["x"], lambda: [2**40, -3], lambda: [[7]], _draws],
)
def test_what_a_processor_foresees_can_fail_no_call_and_change_no_text(foresee: Any) -> None:
    model, prompt = tiny_model(), torch.tensor([[5, 6, 7]])
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12}
    torch.manual_seed(1)
    expected = model.generate(prompt, **options)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.DrafterWarning)
        got = lade.generate(model, prompt, logits_processor=[Knowing(foresee)], **options)
    assert got.equal(expected)
    assert torch.get_rng_state().equal(state)


def test_an_author_sees_what_foresight_raises() -> None:
    config = lade.Config(strict_drafter=True)
    processors = [Knowing(lambda: 1 / 0)]
    options: dict[str, Any] = {"logits_processor": processors, "max_new_tokens": 4}
    with pytest.raises(ZeroDivisionError):
        lade.generate(tiny_model(), torch.tensor([[5, 6]]), config=config, **options)


# --- xgrammar -----------------------------------------------------------------------------------

# One token for each byte and some for words, so that one text has many splits.
# "u" is there twice, as in vocabularies that have all bytes beside their characters.
WORDS = [b"na", b"name", b'":', b'{"', b' "', b"ber", b"u"]
PIECES = [*(bytes([i]) for i in range(256)), *WORDS, b"<end>"]
END = len(PIECES) - 1
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "number": {"type": "integer"},
        "größe": {"enum": ["big", "small"]},
    },
    "required": ["name", "number", "größe"],
    "additionalProperties": False,
}


class Grammars:
    """Makes a processor, over and over: one serves a single call of `generate`."""

    def __init__(self, xgrammar: Any) -> None:
        raw = xgrammar.VocabType.RAW
        info = xgrammar.TokenizerInfo(PIECES, raw, stop_token_ids=[END])
        self.compiler = xgrammar.GrammarCompiler(info)
        self.json = self.compiler.compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
        self.processor = xgrammar.contrib.hf.LogitsProcessor


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    pytest.importorskip("xgrammar.contrib.hf", reason="xgrammar has no wheel for this platform")
    return Grammars(__import__("xgrammar"))


def write(
    processor: Any, num_rows: int, rng: np.random.Generator, grammar: ForcedTokens | None
) -> tuple[list[list[int]], list[list[set[int]]], list[list[list[int]]]]:
    """Emit tokens that the processor allows, with forecasts made before each of its calls.

    Returns:
        For each row the tokens; for each step and row the allowed tokens, and the forecasts.
    """
    rows = [[1, 2, 3] for _ in range(num_rows)]
    allowed_at: list[list[set[int]]] = []
    forecasts: list[list[list[int]]] = []
    while len(rows[0]) < 200 and not all(END in row for row in rows):
        if grammar is not None:
            forecasts.append([grammar.forced_tokens(i, row, 6) for i, row in enumerate(rows)])
        scores = processor(torch.tensor(rows), torch.zeros(num_rows, END + 1))
        allowed_at.append([set(row.isfinite().nonzero()[:, 0].tolist()) for row in scores])
        for row, allowed in zip(rows, allowed_at[-1], strict=True):
            choices = sorted(allowed if len(allowed) < 40 else allowed & {*b'"ab'})  # short strings
            row.append(END if END in row else int(rng.choice(choices)))
    return rows, allowed_at, forecasts


@pytest.mark.parametrize("seed", range(6))
def test_forced_text_is_what_the_processor_then_leaves(grammars: Grammars, seed: int) -> None:
    processor = grammars.processor(grammars.json)
    grammar = forced_tokens_of([TemperatureLogitsWarper(0.5), processor])
    (row,), allowed_at, forecasts = write(processor, 1, np.random.default_rng(seed), grammar)
    emitted = row[3 : row.index(END) + 1]
    num_checked = num_right = 0
    for step, (forecast,) in enumerate(forecasts):
        for ahead, token_id in enumerate(forecast):
            if emitted[step : step + ahead] != forecast[:ahead]:
                break  # another split of the same text
            allowed = allowed_at[step + ahead][0]
            assert token_id in allowed
            assert all(PIECES[token_id].startswith(PIECES[other]) for other in allowed)
            num_checked += 1
            num_right += emitted[step + ahead] == token_id
    assert num_checked > 20
    assert num_right > 10
    # Before its first call a processor has no matcher yet, and the opening is known all the same.
    assert [PIECES[i] for i in forecasts[0][0]] == [b'{"', b"name", b'":', b' "']
    # The end is forced, too.
    assert forecasts[len(emitted) - 1][0] == [END]


def test_asking_leaves_no_trace(grammars: Grammars) -> None:
    for seed in range(4):
        asked, unasked = (grammars.processor(grammars.json) for _ in range(2))
        grammar = forced_tokens_of([asked])
        with_forecasts = write(asked, 1, np.random.default_rng(seed), grammar)
        without = write(unasked, 1, np.random.default_rng(seed), None)
        assert with_forecasts[:2] == without[:2]


def test_each_row_has_its_own_state_and_its_own_grammar(grammars: Grammars) -> None:
    word = grammars.compiler.compile_regex("banana|bandit")
    processor = grammars.processor([grammars.json, word])
    grammar = forced_tokens_of([processor])
    rows, _, forecasts = write(processor, 2, np.random.default_rng(0), grammar)
    # Not "na", though all that may come next begins it: "n" and then "d" is as good.
    assert [PIECES[i] for i in forecasts[0][1]] == [b"b", b"a"]
    assert PIECES[forecasts[0][0][0]] == b'{"'
    num_steps = rows[1].index(END) - 3
    assert bytes(b"".join(PIECES[i] for i in rows[1][3 : 3 + num_steps])) in {b"banana", b"bandit"}
    # A row that has ended is fed on, and nothing is known of it.
    assert all(forecast == [] for _, forecast in forecasts[num_steps + 1 :])
    assert len(forecasts) > num_steps + 2


def test_one_grammar_serves_a_batch(grammars: Grammars) -> None:
    processor = grammars.processor(grammars.json)
    grammar = forced_tokens_of([processor])
    assert grammar is not None
    assert grammar.forced_tokens(1, [1, 2, 3], 3) == grammar.forced_tokens(0, [1, 2, 3], 3)
    _, _, forecasts = write(processor, 3, np.random.default_rng(1), grammar)
    assert sum(len(forecast) > 0 for step in forecasts for forecast in step) > 20


def test_text_outside_of_the_grammar_is_no_error(grammars: Grammars) -> None:
    processor = grammars.processor(grammars.json)
    grammar = forced_tokens_of([processor])
    assert grammar is not None
    processor(torch.tensor([[1, 2]]), torch.zeros(1, END + 1))
    assert grammar.forced_tokens(0, [1, 2, ord("x")], 4) == []


def test_json_is_that_of_plain_generate(grammars: Grammars) -> None:
    model = tiny_model(vocab_size=END + 1, eos_token_id=END)
    rng = np.random.default_rng(0)
    for _ in range(3):
        prompt = random_prompt(rng)
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 60}
        processors = [[grammars.processor(grammars.json)] for _ in range(2)]
        expected = model.generate(prompt, logits_processor=processors[0], **options)
        assert lade.generate(model, prompt, logits_processor=processors[1], **options).equal(
            expected
        )
