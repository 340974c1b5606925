"""`lade bench` as a command, on a tiny local model."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lade.bench import baselines, methods
from lade.bench.prompts import Prompt, read_prompts
from lade.cli.app import app
from lade.cli.bench import Chosen
from lade.errors import MissingExtraError
from ngram_pool import NGramPool
from tests.lade.tiny import byte_tokenizer, tiny_model


def run(*args: Any) -> Any:
    wide = {"COLUMNS": "150"}
    return CliRunner().invoke(app, ["bench", *map(str, args)], catch_exceptions=False, env=wide)


@pytest.fixture
def options(folder: str, tmp_path: Path) -> list[Any]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcabc\nxyxyxy\nhello\n")
    options = ["--prompts", prompts, "--model", folder, "--dtype", "float32"]
    return [*options, "--max-new-tokens", 16, "--limit", 2]


def test_a_table_is_printed_and_everything_is_written(options: list[Any], tmp_path: Path) -> None:
    path, markdown = tmp_path / "result.json", tmp_path / "result.md"
    options += ["--max-draft-tokens", 4, "--json", path, "--markdown", markdown]
    result = run(*options, "--plot", tmp_path / "plots")
    assert result.exit_code == 0
    assert "Greedy decoding, loops apart" in result.stdout
    assert "verification: tree" in result.stdout
    content = json.loads(path.read_text())
    settings = content["settings"]
    assert (settings["prompts"]["name"], settings["prompts"]["num"]) == ("prompts.txt", 2)
    assert settings["dtype"] == "float32"
    assert list(settings["methods"]) == [
        *("plain", "prompt_lookup", "no_drafts", "lade", "lade_fresh")
    ]
    assert settings["interrupted"] is False
    assert settings["verification"] == "tree"
    assert settings["config"]["verification"] is None
    for entry in content["prompts"]:
        assert entry["lade"]["same_text"]
        assert entry["lade"]["num_draft_tokens"] <= 4 * 15
    assert "| lade_fresh |" in markdown.read_text()
    written = sorted(each.name for each in (tmp_path / "plots").iterdir())
    assert written == ["speedup.png", "speedup.svg"]


@pytest.mark.exhaustive
def test_pools_and_models_that_draft_are_methods_where_they_are_given(
    options: list[Any], tmp_path: Path
) -> None:
    other, mine, path = tmp_path / "other", tmp_path / "mine.pool", tmp_path / "result.json"
    byte_tokenizer().save_pretrained(other)
    tiny_model("qwen3", seed=3, dtype=torch.float32, vocab_size=256).save_pretrained(other)
    NGramPool().save(mine)
    predicted = tmp_path / "predicted.txt"
    predicted.write_text("abcabcabc\n")
    options += ["--pool", mine, "--prediction", predicted, "--assistant", other]
    options += ["--first-layers", 1, "--json", path]
    assert "Sources of drafts" in run(*options).stdout
    content = json.loads(path.read_text())
    assert list(content["settings"]["methods"]) == [*methods.METHODS]
    for entry in content["prompts"]:
        assert all(entry[name]["same_text"] for name in methods.METHODS if name != "plain")


def test_an_interruption_keeps_what_was_measured(
    options: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def interrupting(model: Any, inputs: Any, options: Any) -> baselines.Answer:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return baselines.plain(model, inputs, options)

    info = baselines.MethodInfo(lambda given: interrupting, "interrupting")
    monkeypatch.setitem(methods.METHODS, "plain", info)
    path = tmp_path / "result.json"
    result = run(*options, "--json", path)
    assert result.exit_code == 130
    assert "stopped after 1 of 2" in result.stderr
    content = json.loads(path.read_text())
    assert len(content["prompts"]) == 1
    assert content["settings"]["interrupted"] is True


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"fine\n\xff\xfe\n", r"expected prompts\.txt in UTF-8, got byte 0xff in line 2"),
        (
            b'{"question": "x"}',
            r"line 1 of prompts\.txt .* 'prompt', a text, got {\"question\": \"x\"}",
        ),
        (b'\n{"prompt": 5}', r"line 2 of prompts\.txt .* got {\"prompt\": 5}"),
        (b'{"turns": "one"}', r"'turns', a list of texts, .* got {\"turns\": \"one\"}"),
        (b'{"turns": []}', r"got {\"turns\": \[\]}"),
        (b'{"prompt', r"line 1 of prompts\.txt .* its JSON is broken: Unterminated string"),
        (b" \n", r"expected prompts in prompts\.txt, found none"),
    ],
)
def test_prompts_are_read_before_a_model_is_loaded(
    content: bytes, message: str, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        run("--prompts", prompts, "--model", tmp_path / "no-model")


def test_prompt_files_from_windows_and_of_odd_characters_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes('\ufeff{"prompt": "one\u2028line"}\r\nplain\r\n'.encode())
    assert [prompt.text for prompt in read_prompts(path)] == ["one\u2028line", "plain"]


def test_without_a_file_the_prompts_are_those_of_the_demo() -> None:
    prompts, described = Chosen.read(None, 2)
    assert described == {"name": "demo", "num": 2}
    assert all(isinstance(prompt, Prompt) and len(prompt.text) > 20 for prompt in prompts)
    assert len(Chosen.read(None, None).prompts) == 6


def test_plots_are_refused_before_any_work_without_their_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"lade-decoding\[plots\]"):
        run("--model", "does-not-exist", "--plot", tmp_path)


def test_greedy_decoding_has_no_use_for_top_p() -> None:
    with pytest.raises(ValueError, match=r"expected a temperature above 0 with top_p=0\.9"):
        run("--model", "does-not-exist", "--top-p", 0.9)
