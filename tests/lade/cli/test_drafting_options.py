"""`--assistant` and `--first-layers`: models that draft beside the pool, and their figures."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lade.cli.app import app
from lade.cli.drafting import sources_text
from lade.stats import SourceStats
from tests.lade.tiny import byte_tokenizer, tiny_model


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another saved tiny model with the same tokenizer."""
    path = tmp_path_factory.mktemp("assistant")
    byte_tokenizer().save_pretrained(path)
    model = tiny_model("qwen3", seed=3, dtype=torch.float32, vocab_size=256)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    return str(path)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_generate_drafts_by_an_assistant_and_says_what_it_did(folder: str, assistant: str) -> None:
    options = ["abcabc", "--model", folder, "--dtype", "float32", "--max-new-tokens", "12"]
    plain = run("generate", *options, "--verification", "plain", "--no-learn")
    got = run("generate", *options, "--no-learn", "--assistant", assistant)
    assert got.stdout == plain.stdout
    assert "accepted of drafted: pool " in got.stderr
    assert ", assistant " in got.stderr
    got = run("generate", *options, "--no-learn", "--first-layers", "1")
    assert got.stdout == plain.stdout
    assert ", first_layers " in got.stderr
    assert "accepted of drafted" not in plain.stderr


def test_demo_and_chat_take_first_layers(folder: str) -> None:
    options = ["--model", folder, "--dtype", "float32", "--max-new-tokens", "8"]
    shown = run("demo", *options, "--prompt", "abcabc", "--no-prewarm", "--first-layers", "1")
    assert shown.exit_code == 0
    assert "drafted by the n-gram pool and others" in shown.stdout
    assert "first_layers" in shown.stdout
    assert "1 of 1 same" in shown.stdout
    chat = CliRunner().invoke(
        app, ["chat", *options, "--no-learn", "--first-layers", "1"], input="abcabc"
    )
    assert chat.exit_code == 0
    assert "first_layers" in chat.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--first-layers", "0"], "expected --first-layers of 1 or more, or auto, got '0'"),
        (["--first-layers", "some"], "expected --first-layers of 1 or more, or auto, got 'some'"),
        (["--assistant", "x", "--verification", "plain"], "expected no --assistant or --first"),
    ],
)
@pytest.mark.parametrize("command", [["generate", "Hi"], ["demo"]])
def test_what_cannot_be_is_refused_before_a_model_is_loaded(
    command: list[str], options: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(*command, "--model", "does-not-exist", *options)


def test_bench_run_compares_drafters(folder: str, assistant: str, tmp_path: Path) -> None:
    prompts, path = tmp_path / "prompts.txt", tmp_path / "run.json"
    prompts.write_text("abcabc\nhello\n")
    names = "plain,pool,assistant,first_layers,pool+assistant,pool+first_layers,prompt_lookup"
    names += ",hf_assistant,hf_early_exit"
    result = run(
        *("bench", "run", "--prompts", str(prompts), "--methods", names, "--json", str(path)),
        *("--model", folder, "--dtype", "float32", "--max-new-tokens", "16"),
        *("--assistant", assistant, "--first-layers", "1"),
    )
    assert result.exit_code == 0
    assert "Where time goes" in result.stdout
    assert "Sources of drafts" in result.stdout
    content = json.loads(path.read_text())
    assert content["settings"]["assistant"] == Path(assistant).name
    assert content["settings"]["first_layers"] == 1
    for entry in content["prompts"]:
        for name in names.split(",")[1:]:
            assert entry[name]["same_text"], name
    projected = run("bench", "project", "--measured", str(path), "--cost-ratio", "0.1")
    assert projected.exit_code == 0
    assert "The formula against real runs" in projected.stdout
    assert "Assisted generation by the formula" in projected.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "plain,assistant"], "expected --assistant with assistant in --methods"),
        (["--methods", "plain,hf_early_exit"], "expected --first-layers N with hf_early_exit"),
        (["--methods", "plain,lade", "--assistant", "x"], "expected one of hf_assistant, assistan"),
        (["--methods", "plain", "--first-layers", "2"], "expected one of hf_early_exit, first_la"),
    ],
)
def test_bench_run_refuses_methods_without_their_model(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run("bench", "run", "--prompts", __file__, "--model", "does-not-exist", *options)


def test_bench_project_needs_something_to_project(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected --mat with --step-cost, --cost-ratio or"):
        run("bench", "project")
    costs = tmp_path / "costs.csv"
    costs.write_text("1,1.0\n9,2.0\n")
    result = run("bench", "project", "--cost-ratio", "0.1", "--k", "2,8", "--step-cost", str(costs))
    assert "by costs.csv" in result.stdout
    path, markdown = tmp_path / "formula.json", tmp_path / "formula.md"
    options = ["--acceptance", "0.5", "--json", str(path), "--markdown", str(markdown)]
    run("bench", "project", "--cost-ratio", "0.2", "--k", "1,2", *options)
    assert [entry["num_draft_tokens"] for entry in json.loads(path.read_text())["runs"]] == [1, 2]
    assert "| speed-up | 1 |" in markdown.read_text()
    with pytest.raises(ValueError, match="expected --mat with --step-cost, and without"):
        run("bench", "project", "--mat", str(costs), "--cost-ratio", "0.1")


def test_sources_are_told_in_a_line() -> None:
    sources = {"pool": SourceStats(3, 40, 12, 0.0123), "assistant": SourceStats(1, 5, 2, 0.5)}
    assert sources_text(sources) == (
        "accepted of drafted: pool 12 of 40 in 0.01 s, assistant 2 of 5 in 0.50 s"
    )
    assert sources_text({}) == ""
