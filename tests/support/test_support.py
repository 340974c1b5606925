"""`python -m tests.support`: every architecture of transformers, its report and its command."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import lade
from lade.bench.report import write_json
from lade.hf.generation import Generation
from tests.lade.recorder import CpuRecorder, RecordingPolicy
from tests.lade.tiny import IS_NEWEST
from tests.support import __main__ as command
from tests.support import run as support
from tests.support.__main__ import RESULTS, main
from tests.support.report import (
    Results,
    cells,
    content_of,
    counts,
    markdown,
    read_json,
    reason_of,
    results_of,
    summary,
    text_of,
)
from tests.support.run import CASES, QUICK_CASES, Difference, Row, run_all, run_one
from tests.support.tiny import VARIANTS, CannotBuild, NotText, causal_lm_types, tiny_model

pytestmark = pytest.mark.usefixtures("single_thread")


# --- all architectures ----------------------------------------------------------------------


def test_every_architecture_that_transformers_maps_is_checked() -> None:
    assert causal_lm_types() == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert support.all_names() == [*causal_lm_types(), *VARIANTS]
    assert {model_type for model_type, _ in VARIANTS.values()} <= {*causal_lm_types()}


@pytest.mark.exhaustive
def test_no_architecture_gets_a_wrong_token() -> None:
    rows = [*run_all(support.all_names(), cases=QUICK_CASES)]
    assert {row.name: text_of(row) for row in rows if row.is_bad} == {}
    found = counts(row for row in rows if not row.is_variant)
    assert found["all"] == len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for row in rows:
        assert row.speculates == row.should_speculate, row.name
        assert row.kind == "tree" or reason_of(row), row.name
    if IS_NEWEST:
        assert found["speculate"] >= 172
        assert found["tree"] >= 131


@pytest.mark.exhaustive
def test_fixed_shapes_and_recordings_give_no_architecture_a_wrong_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where steps can be recorded they are; every tree runs in fixed shapes."""
    recorder = CpuRecorder()
    monkeypatch.setattr(Generation, "policy", RecordingPolicy(recorder))
    cases = [case._replace(num_new=16) for case in QUICK_CASES if case.name != "greedy padded"]
    names = support.all_names()
    recorded = set()
    for name in names:
        before = recorder.num_replayed
        row = run_one(name, cases=cases, execution="graphs")
        assert not row.is_bad, (name, text_of(row), row.failures)
        if row.kind == "tree":
            assert row.why_eager is None, name
            if recorder.num_replayed > before:
                recorded.add(name)
    assert {"llama", "qwen3", "gemma3_text", "mistral", "gpt2", "phi3"} <= recorded
    if IS_NEWEST:  # the others have experts that are eager here, or wait for their device
        assert len(recorded) >= 85


class FutureConfig(LlamaConfig):  # type: ignore[misc]
    model_type = "future"


class FutureForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    config_class = FutureConfig


def test_an_architecture_of_a_future_transformers_appears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "future", "FutureForCausalLM")
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "future", FutureConfig)
    models = AutoModelForCausalLM._model_mapping._extra_content
    monkeypatch.setitem(models, FutureConfig, FutureForCausalLM)
    assert "future" in support.all_names()
    row = run_one("future", cases=QUICK_CASES)
    assert cells(row)[:4] == ("future", "FutureForCausalLM", "tree", "tree")
    assert row.verdict == "exact"


def test_types_that_cannot_be_built_say_why() -> None:
    with pytest.raises(NotText, match="musicgen: it writes audio codes"):
        tiny_model("musicgen")
    with pytest.raises(CannotBuild, match="no-such-type: no small configuration"):
        tiny_model("no-such-type")


# --- one architecture -----------------------------------------------------------------------


def test_drafts_are_accepted_and_rejected() -> None:
    row = run_one("llama")
    assert row.verdict == "exact"
    assert row.compared == row.speculated == [case.name for case in CASES]
    assert 0.2 * row.num_drafted < row.num_accepted < 0.7 * row.num_drafted
    assert row.mat is not None
    assert row.mat > 1.5
    assert not row.in_float32


def test_a_wrong_token_is_found_and_told_from_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: Any, **options: Any) -> Any:
        output = lade.generate(model, **options)
        output.sequences[0, 21 + 2] += 1
        return output

    monkeypatch.setattr(support, "generate", wrong)
    row = run_one("llama", cases=[case for case in CASES if case.name == "greedy long"])
    assert row.verdict == "wrong"
    assert row.is_bad
    (difference,) = row.differences
    assert (difference.case, difference.row, difference.token) == ("greedy long", 0, 2)
    assert difference.gap is not None
    assert difference.gap > 1e-6
    assert Difference("greedy long", 0, 2, 1e-9).is_tie
    assert not Difference("sampled long", 0, 2, None).is_tie


def test_an_error_of_lade_is_a_failure_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(model: Any, **options: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(support, "generate", failing)
    rows = [*run_all(["llama", "gpt2"], cases=QUICK_CASES)]
    assert [row.verdict for row in rows] == ["failed", "failed"]
    assert rows[0].failures["greedy long"] == "RuntimeError: broken"

    def unchecked(model: Any, num_rows: int = 1) -> Any:
        raise RuntimeError("no check")

    monkeypatch.setattr(support, "probe", unchecked)
    assert run_one("llama").failures == {"probe": "RuntimeError: no check"}


def test_what_plain_generate_cannot_do_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(tiny_model("llama"))
    own = kind.generate

    def limited(model: Any, input_ids: Any, **options: Any) -> Any:
        if len(input_ids) > 1:
            raise RuntimeError("one row only")
        return own(model, input_ids, **options)

    found = lade.probe(tiny_model("llama"))
    monkeypatch.setattr(kind, "generate", limited)
    monkeypatch.setattr(support, "probe", lambda model, num_rows=1: found)
    row = run_one("llama")
    assert row.verdict == "exact"
    assert len(row.compared) == 5
    assert text_of(row) == "exact; plain generate fails on batches (RuntimeError: one row only)"


def test_what_cannot_run_in_float64_runs_in_float32() -> None:
    row = run_one("xglm", cases=QUICK_CASES)
    assert row.in_float32 == row.compared == [case.name for case in QUICK_CASES]
    assert text_of(row) == "exact in float32"


# --- the report -----------------------------------------------------------------------------


def _rows() -> list[Row]:
    long = "its logits differ " * 20
    names = [case.name for case in CASES]
    return [
        Row(
            "llama",
            "llama",
            "A",
            "tree",
            batch_verification="tree",
            compared=names,
            mat=2,
        ),
        Row(
            *("rwkv", "rwkv", "B", "snapshot"),
            batch_verification="plain",
            reasons={"tree": "a state", "chain": "a list"},
            batch_reasons={"tree": "a state", "chain": "a list", "snapshot": "x"},
            compared=names,
            in_float32=names[5:],
            mat=1.234,
        ),
        Row("blt", "blt", "C", "not a text model", why_not="it reads | bytes"),
        Row(
            *("llama-x", "llama", "A", "plain"),
            batch_verification="plain",
            reasons={"tree": long},
            batch_reasons={"tree": long},
            compared=names,
            differences=[Difference("greedy short", 0, 3, 0.5)],
        ),
    ]


def test_counts_keep_variants_apart() -> None:
    found = counts(_rows())
    assert (found["all"], found["speculate"]) == (4, 2)
    assert (found["tree"], found["snapshot"], found["plain"]) == (1, 1, 1)
    assert (found["not a text model"], found["wrong"], found["failed"]) == (1, 1, 0)
    assert summary(_rows()).splitlines() == [
        "3 architectures, 2 speculate: 1 tree, 1 snapshot, 1 not a text model; "
        "2 exact, 0 tie, 0 wrong, 0 failed",
        "1 variants, 0 speculate: 1 plain; 0 exact, 0 tie, 1 wrong, 0 failed",
    ]


def test_cells_say_each_reason_once_and_shortly() -> None:
    tree, snapshot, not_text, plain = map(cells, _rows())
    assert tree == ("llama", "A", "tree", "tree", "2.00", "exact", "")
    assert snapshot[5] == "exact, batches in float32"
    assert snapshot[6] == "tree: a state; chain: a list; in a batch, snapshot: x"
    assert not_text == ("blt", "C", "not a text model", "", "", "", "it reads | bytes")
    assert plain[5] == "wrong; differs: greedy short, row 0, token 3, gap 0.5"
    assert len(plain[6]) < 130
    assert plain[6].endswith("…")


def test_files_of_several_versions_make_one_document(tmp_path: Path) -> None:
    results = results_of(_rows(), 7, stopped=False)
    fixed = results_of(_rows(), 7, stopped=False, execution="fixed")
    path = tmp_path / "x.json"
    write_json(path, content_of(results))
    assert read_json(path) == results
    content = json.loads(path.read_text())
    assert content["summary"]["architectures"]["tree"] == 1
    assert content["rows"][0] == {
        "name": "llama",
        "model": "A",
        "kind": "tree",
        "mat": 2.0,
    }
    assert [row["name"] for row in content_of(fixed)["rows"]] == ["llama-x"]  # the wrong one
    older = Results({**results.environment, "transformers": "4.9.1"}, results.settings, _rows())
    text = markdown([older, results])
    headings = re.findall(r"^## transformers (.*)$", text, re.MULTILINE)
    assert headings == [results.transformers, "4.9.1"]
    assert "| blt | C | not a text model |  |  |  | it reads \\| bytes |" in text
    assert "seed 7" in text


# --- the command ----------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_the_command_prints_and_writes_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path / "support")
    shutil.copytree(RESULTS, tmp_path / "support")
    names = ["llama", "bloom", "mamba2", "recurrent_gemma", "moshi"]
    path = tmp_path / "support" / "transformers-x.json"
    assert main([*names, "--seed", "1", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "llama | LlamaForCausalLM | tree | tree" in out
    assert "0 wrong, 0 failed" in out
    rows = read_json(path).rows
    assert [row.name for row in rows] == names
    assert [row.kind for row in rows[:4]] == ["tree", "chain", "snapshot", "plain"]
    assert rows[4].kind == "not a text model"
    assert all(row.verdict == "exact" for row in rows[:4])
    made = (tmp_path / "SUPPORT.md").read_text()
    assert made.index("# Supported architectures") < made.index("seed 1.")
    assert made.index("seed 1.") < made.index("## Weight formats")


def test_an_interrupted_run_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupting(name: str, **_: Any) -> Row:
        if name == "gpt2":
            raise KeyboardInterrupt
        return Row(name, name, "A")

    monkeypatch.setattr(support, "run_one", interrupting)
    path = tmp_path / "x.json"
    with pytest.raises(KeyboardInterrupt):
        main(["llama", "gpt2", "bloom", "--json", str(path)])
    assert [row.name for row in read_json(path).rows] == ["llama"]
    assert read_json(path).settings["interrupted"] is True


def test_the_exit_code_tells_of_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = iter([_rows()[0], _rows()[3]])
    monkeypatch.setattr(support, "run_one", lambda name, **_: next(rows))
    assert main(["llama"]) == 0
    assert main(["llama"]) == 1


def test_wrong_names_are_told() -> None:
    with pytest.raises(ValueError, match=r"expected model types .* maps, got no-such, nor-this"):
        main(["no-such", "llama", "nor-this"])
    with pytest.raises(ValueError, match=r"expected weight formats of .*, got int7"):
        main(["--formats", "int7"])
