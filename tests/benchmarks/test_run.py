"""The methods of `python -m benchmarks run`: all of them agree, and each is what its name says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lade
import lade.bench.methods
from benchmarks.methods import METHODS, named, numbers
from benchmarks.run import choose, share_repeated
from lade.bench.baselines import Answer, Given, MethodInfo
from lade.bench.prompts import Prompt
from lade.bench.report import OVERALL, as_json, write_json
from lade.bench.run import Result, run_methods, warm_up_methods
from lade.bench.settings import BenchSettings
from lade.config import VERIFICATIONS, Config
from lade.errors import UnsupportedModelError
from tests.lade.bench.test_bench import tiny_loaded
from tests.lade.tiny import tiny_model


def chosen(*names: str) -> dict[str, MethodInfo]:
    return {name: METHODS[name] for name in names}


def test_all_methods_run_and_agree(tmp_path: Path) -> None:
    prompts = [Prompt(str(i), "ab"[i % 2], text) for i, text in enumerate(["abcabc", "xy"])]
    results: list[Result] = []
    order: list[str] = []
    run_methods(
        tiny_loaded(),
        prompts,
        METHODS,
        BenchSettings(12, passes=2),
        Given(Config(max_draft_tokens=6), assistant=tiny_model("qwen3"), num_layers=1),
        results=results,
        on_answer=lambda name, answer: order.append(name),
    )
    assert len(results) == 4
    assert order[:: len(METHODS)][:2] == ["plain", "prompt_lookup"]  # another one begins each time
    for each in results:
        texts = {tuple(answer.rows[0]) for answer in each.answers.values()}
        assert len(texts) == 1
        assert each.answers["plain"].num_steps == 11
        assert 0 < each.answers["prompt_lookup"].num_steps <= 11
        assert each.answers["lade"].stats is not None
    path = tmp_path / "result.json"
    write_json(path, as_json(results, list(METHODS), {"threads": 1}))
    content: Any = json.loads(path.read_text())
    assert len(content["prompts"]) == 4
    assert content["summary"][OVERALL]["plain"]["speedup"] == 1.0
    assert len(content["summary"][OVERALL]["lade"]["speedup_of_each_pass"]) == 2
    assert {"cpu", "num_cores", "torch", "transformers", "date"} <= set(content["environment"])
    assert str(tmp_path) not in path.read_text()


def test_each_way_of_verifying_is_a_method_that_verifies_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verifications = {
        name: info.verification for name, info in METHODS.items() if info.verification is not None
    }
    assert verifications == {
        f"lade_{verification}": verification
        for verification in VERIFICATIONS
        if verification != "plain"
    }
    taken = []

    def generate(*args: Any, config: Config, **options: Any) -> Any:
        taken.append((config.verification, config.max_draft_tokens))
        return lade.generate(*args, config=config, **options)

    monkeypatch.setattr(lade.bench.methods, "generate", generate)
    given = Given(Config(max_draft_tokens=4, verification="plain"))
    assert warm_up_methods(tiny_loaded(), chosen(*verifications), BenchSettings(4), given) == {}
    assert taken == [(verification, 4) for verification in verifications.values()]


def test_a_way_that_the_model_cannot_do_is_left_out() -> None:
    loaded = tiny_loaded()
    loaded.model.config.alibi = True  # so that a rule says no to trees
    methods = chosen("plain", "lade", "lade_tree", "lade_chain")
    left_out = warm_up_methods(loaded, methods, BenchSettings(4))
    assert list(left_out) == ["lade_tree"]
    assert "cannot verify drafts by 'tree': its ALiBi bias" in left_out["lade_tree"]
    with pytest.raises(UnsupportedModelError, match="by 'tree'"):
        warm_up_methods(loaded, chosen("lade_tree"), BenchSettings(4))
    given = Given(Config(verification="tree"))
    with pytest.raises(UnsupportedModelError, match="by 'tree'"):
        warm_up_methods(loaded, chosen("plain", "lade"), BenchSettings(4), given)


def test_texts_that_come_again_in_every_pass_are_counted() -> None:
    def of(num_pass: int, *rows: list[int]) -> Result:
        answer = Answer([*rows], 1.0, 1, 1, 0)
        prompts = [Prompt(str(len(rows)), "all", "x")] * len(rows)
        return Result(prompts, num_pass, 7, {"plain": answer}, False)

    results = [of(0, [1, 2]), of(0, [3], [4]), of(1, [1, 2]), of(1, [3], [5])]
    assert share_repeated(results[:2], "plain") is None
    assert share_repeated(results, "plain") == pytest.approx(2 / 3)
    assert share_repeated([*results, of(2, [1]), of(2, [3], [4])], "plain") == pytest.approx(1 / 3)
    # Interrupted in its second pass; the same prompt twice.
    assert share_repeated(results[:3], "plain") == 1.0
    assert share_repeated([*results[:1] * 2, of(1, [1, 2]), of(1, [7])], "plain") == 0.5


def test_transformers_own_assisted_decoding_is_counted_as_lades_is() -> None:
    model = tiny_model("llama", vocab_size=97)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 5, 6]])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    model.generation_config.eos_token_id = None
    given = Given(assistant=tiny_model("llama", vocab_size=97), num_layers=1)  # always right
    given.assistant.generation_config.update(
        num_assistant_tokens=3, assistant_confidence_threshold=0.0, eos_token_id=None
    )
    options = BenchSettings(17).options()
    plain = METHODS["plain"].make(given)(model, inputs, options)
    assisted = METHODS["hf_assistant"].make(given)(model, inputs, options)
    stats = assisted.stats
    assert stats is not None
    assert assisted.rows == plain.rows
    assert assisted.num_steps == 4  # the prompt's forward has a draft, too, and begins with four
    assert stats.num_draft_tokens <= 3 * 4
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    assert stats.num_corrected_row_steps == 0
    assert 0 < stats.forward_sec + stats.prefill_sec + stats.draft_sec <= assisted.sec * 1.001
    exiting = METHODS["hf_early_exit"].make(given)(model, inputs, options)
    assert exiting.rows == plain.rows
    assert exiting.stats is not None
    assert exiting.stats.num_row_steps == exiting.num_steps
    assert exiting.stats.num_corrected_row_steps > 0
    assert model.config.num_hidden_layers == 3  # as before


def test_lists_of_names_and_numbers_are_read() -> None:
    assert named(None, METHODS) == [*METHODS]
    assert named("plain, lade", METHODS) == ["plain", "lade"]
    assert numbers("8, 16") == [8, 16]
    for text in ("plain,magic", "plain,plain", " "):
        with pytest.raises(ValueError, match=f"expected different ones of plain, .*, got '{text}'"):
            named(text, METHODS)
    for text in ("8,x", "0", "8,8", ""):
        with pytest.raises(ValueError, match=f"expected different numbers above 0, got '{text}'"):
            numbers(text)


def test_methods_get_what_they_draft_by() -> None:
    usual = ["plain", "prompt_lookup", "no_drafts", "lade", "lade_fresh"]
    assert choose(None, False, None, None) == usual
    assert choose(None, True, None, None) == [*usual, "lade_pool", "lade_pool_fresh"]
    assert choose("plain,hf_assistant", False, "x", None) == ["plain", "hf_assistant"]
    for text, given, message in (
        ("plain,assistant", (False, None, None), "expected --assistant with a method"),
        ("lade_pool", (False, None, None), "expected --pool with lade_pool"),
        ("hf_early_exit", (False, None, None), "expected --first-layers N with hf_early_exit"),
        (
            "plain,lade",
            (False, "x", None),
            r"expected one of pool\+assistant, hf_assistant, assista",
        ),
        ("plain", (False, None, 2), r"expected one of pool\+first_layers, hf_early_exit, first_la"),
        ("plain", (True, None, None), "expected one of lade_pool, lade_pool_fresh in --methods"),
    ):
        with pytest.raises(ValueError, match=message):
            choose(text, *given)
