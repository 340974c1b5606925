"""Prewarming before a command starts: once for a model, skippable, and never in the way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from lade.cli import prewarm as command
from lade.cli.app import app
from lade.cli.prewarm import prewarm_once
from lade.errors import UnsupportedModelError
from lade.models.loading import LoadedModel
from lade.prewarming import run as prewarming
from lade.prewarming import tables
from lade.prewarming.run import _Prewarming as Run
from lade.prewarming.tables import Effort, path_of_table, read_table, table_for
from lade.probing.report import Probe
from tests.lade.tiny import VOCAB_SIZE, byte_tokenizer, tiny_model

PLAIN = Probe("LlamaForCausalLM", "plain", None, {"tree": "trees do not grow here"})


@pytest.fixture
def loaded() -> LoadedModel:
    return LoadedModel(tiny_model("llama"), byte_tokenizer(), "tiny")


def stopping(error: BaseException) -> Callable[[Run], None]:
    """Work as a run does, and end with an error."""
    work = Run.work

    def work_and_stop(self: Run) -> None:
        work(self)
        raise error

    return work_and_stop


def effort_of(model: Any) -> Effort:
    """Return what went into the table of a model."""
    return read_table(path_of_table(model), model).effort


def test_it_runs_so_many_tokens_and_only_once(
    loaded: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    prewarm_once(loaded)
    effort = effort_of(loaded.model)
    assert effort.num_tokens >= 2 * VOCAB_SIZE
    assert effort.seconds < 20  # not the whole minute
    assert "prewarmed: " in capsys.readouterr().err
    prewarm_once(loaded)
    assert effort_of(loaded.model) == effort
    assert capsys.readouterr().err == ""


def test_it_runs_for_so_long_where_tokens_take_longer(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_TOKENS_PER_TOKEN", 10**6)
    monkeypatch.setattr(command, "_LEAST_SECONDS", 0.1)
    prewarm_once(loaded, 0.5)
    effort = effort_of(loaded.model)
    assert 0.5 <= effort.seconds < 5
    prewarm_once(loaded, 0.5)
    assert effort_of(loaded.model) == effort


def test_ctrl_c_skips_the_rest_and_keeps_what_was_made(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Run, "work", stopping(KeyboardInterrupt()))
    prewarm_once(loaded)
    shown = capsys.readouterr().err
    assert "skipped the rest" in shown
    assert "prewarmed: " in shown
    table = table_for(loaded.model)
    assert table is not None
    assert len(table) > 0


@pytest.mark.parametrize("kind", ["plain", "damaged", "full"])
def test_where_no_table_can_be_made_a_note_says_why(
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    path = path_of_table(loaded.model)
    if kind == "plain":
        monkeypatch.setattr(prewarming, "probe", lambda model: PLAIN)
        expected = "lade decodes LlamaForCausalLM plainly, so it would not use a table"
    elif kind == "damaged":
        path.parent.mkdir(parents=True)
        path.write_bytes(b"no table")
        expected = "remove it to begin anew"
    else:
        monkeypatch.setattr(Run, "work", stopping(OSError(28, "No space left on device")))
        expected = "No space left"
    prewarm_once(loaded)
    shown = capsys.readouterr().err
    assert "note: no table is made: " in shown
    assert expected in shown.replace("\n", " ")
    if kind == "plain":
        assert not path.exists()  # no work was done


def test_a_model_that_is_decoded_plainly_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(prewarming, "probe", lambda model: PLAIN)

    def work(self: Any) -> None:
        raise AssertionError("it works for a table that nobody uses")

    monkeypatch.setattr(Run, "work", work)
    with pytest.raises(UnsupportedModelError, match="plainly, so it would not use a table"):
        prewarming.prewarm(model, 60, folder=tmp_path / "tables")
    assert [*tmp_path.iterdir()] == []


@pytest.fixture
def demo(tmp_path: Path) -> Callable[..., Result]:
    """The demo on a saved tiny model."""
    model = tiny_model("llama", dtype=torch.float32, vocab_size=256)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")

    def run(*arguments: str) -> Result:
        options = ["--prompt", "one", "--max-new-tokens", "4", "--dtype", "float32"]
        options += ["--model", str(tmp_path / "model"), *arguments]
        return CliRunner().invoke(app, ["demo", *options], catch_exceptions=False)

    return run


def test_the_demo_prewarms_unless_it_is_told_not_to(demo: Callable[..., Result]) -> None:
    assert "prewarmed" not in demo("--no-prewarm").stderr
    assert not tables.tables_folder().exists()
    assert "prewarmed: " in demo().stderr
    assert len([*tables.tables_folder().glob("*.safetensors")]) == 1
    assert "prewarmed" not in demo().stderr  # a second time


def test_the_demo_of_plain_decoding_makes_no_table(demo: Callable[..., Result]) -> None:
    assert "1.00" in demo("--verification", "plain").stdout
    assert not tables.tables_folder().exists()


def test_no_table_is_no_effort(loaded: LoadedModel) -> None:
    assert effort_of(loaded.model) == Effort()
