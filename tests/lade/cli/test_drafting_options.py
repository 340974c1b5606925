"""`--assistant` and `--first-layers`: models that draft beside the pool, and their figures."""

from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lade.chat.figures import sources_text
from lade.cli.app import app
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
    plain = run("generate", *options, "--verification", "plain")
    got = run("generate", *options, "--assistant", assistant)
    assert got.stdout == plain.stdout
    assert "accepted of drafted: pool " in got.stderr
    assert ", assistant " in got.stderr
    got = run("generate", *options, "--first-layers", "1")
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
    chat = CliRunner().invoke(app, ["chat", *options, "--first-layers", "1"], input="abcabc")
    assert chat.exit_code == 0
    assert "first_layers" in chat.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--assistant", "x"], "expected no --assistant with --verification plain"),
        (
            ["--assistant", "x", "--first-layers", "1"],
            "expected no --assistant or --first-layers with",
        ),
    ],
)
@pytest.mark.parametrize("command", [["generate", "Hi"], ["demo"]])
def test_what_cannot_be_is_refused_before_a_model_is_loaded(
    command: list[str], options: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(*command, "--model", "does-not-exist", *options, "--verification", "plain")


def test_sources_are_told_in_a_line() -> None:
    sources = {"pool": SourceStats(3, 40, 12, 0.0123), "assistant": SourceStats(1, 5, 2, 0.5)}
    assert sources_text(sources) == (
        "accepted of drafted: pool 12 of 40 in 0.01 s, assistant 2 of 5 in 0.50 s"
    )
    assert sources_text({}) == ""
