"""`python -m tests.support`: every architecture and weight format, its report and its command."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import lade
from tests.lade.tiny import IS_NEWEST
from tests.support import formats, report
from tests.support import run as support
from tests.support.__main__ import main
from tests.support.formats import FORMATS, Format, all_formats, run_format
from tests.support.run import CASES, QUICK_CASES, Difference, run_all, run_one
from tests.support.tiny import tiny_model

pytestmark = [
    pytest.mark.usefixtures("single_thread"),
    # As a package of formats is imported, before the command can silence it.
    pytest.mark.filterwarnings("ignore"),
]


# --- all architectures ----------------------------------------------------------------------


@pytest.mark.exhaustive  # more than 200 models
def test_no_architecture_gets_a_wrong_token() -> None:
    rows = [*run_all(support.all_names(), cases=QUICK_CASES)]
    assert {row.name: report.text_of(row) for row in rows if row.is_bad} == {}
    found = report.summary(rows)["architectures"]
    assert found["all"] == len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for row in rows:
        assert row.speculates == row.should_speculate, row.name
        assert row.kind == "tree" or report.reason_of(row), row.name
    if IS_NEWEST:
        assert found["speculate"] >= 172
        assert found["tree"] >= 131


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
    assert Difference("greedy long", 0, 2, 1e-9).is_tie
    assert not Difference("sampled long", 0, 2, None).is_tie


def test_an_error_of_lade_is_a_failure_and_one_of_plain_generate_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = type(tiny_model("llama"))
    own, probed = kind.generate, lade.probe(tiny_model("llama"))

    def limited(model: Any, input_ids: Any, **options: Any) -> Any:
        if len(input_ids) > 1:
            raise RuntimeError("one row only")
        return own(model, input_ids, **options)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "generate", limited)
        patch.setattr(support, "probe", lambda model, num_rows=1: probed)
        told = "exact; plain generate fails on batches (RuntimeError: one row only)"
        assert report.text_of(run_one("llama")) == told

    def failing(model: Any, **options: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(support, "generate", failing)
    rows = [*run_all(["llama", "gpt2"], cases=QUICK_CASES)]
    assert [row.verdict for row in rows] == ["failed", "failed"]
    assert rows[0].failures["greedy long"] == "RuntimeError: broken"


# --- formats --------------------------------------------------------------------------------


@pytest.mark.exhaustive  # seconds each, and packages of their own
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind.package], ids=lambda k: k.name)
def test_no_format_gets_a_wrong_token(kind: Format) -> None:
    for row in run_format(kind, cases=QUICK_CASES, is_timed=False):
        assert not row.is_bad, formats.cells(row)
        if row.check is None:
            pytest.skip(str(row.why_not))
        assert row.check.should_speculate == row.check.speculates
        assert row.check.compared


@pytest.mark.exhaustive  # seconds
def test_floats_verify_trees_and_dynamic_int8_is_plain() -> None:
    named = all_formats()
    full, half = run_format(named["not quantized"], cases=QUICK_CASES, is_timed=False)
    (dynamic,) = run_format(named["torch.ao dynamic int8"], cases=QUICK_CASES, is_timed=False)
    assert full.check is not None
    assert half.check is not None
    assert dynamic.check is not None
    assert (full.dtype, full.verdict, full.check.kind) == ("float32", "exact", "tree")
    assert (half.dtype, half.verdict in ("exact", "tie")) == ("bfloat16", True)
    assert half.rounding is not None
    assert 2**-9 < half.rounding < 0.05
    assert half.check.compared == [case.name for case in QUICK_CASES if not case.is_sampled]
    assert full.check.num_accepted > 0 < half.check.num_accepted
    assert (dynamic.verdict, dynamic.check.kind, dynamic.check.num_drafted) == ("exact", "plain", 0)


# --- the report and the command ---------------------------------------------------------------


@pytest.mark.exhaustive  # five architectures in all cases, and two formats
def test_the_command_prints_and_writes_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(formats, "TIMED", formats.TINY)
    names, path = ["llama", "bloom", "mamba2", "recurrent_gemma", "moshi"], tmp_path / "x.json"
    assert main([*names, "--seed", "1", "--json", str(path)]) == 0
    assert "llama | LlamaForCausalLM | tree | tree" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert [row[0] for row in found["rows"]] == names
    kinds = ["tree", "chain", "snapshot", "plain", "not a text model"]
    assert [row[2] for row in found["rows"]] == kinds
    in_float32 = "exact, padding in float32"
    assert [row[5] for row in found["rows"]] == ["exact", in_float32, "exact", "exact", ""]
    assert main(["--formats", "torch.ao dynamic int8", "mxfp4", "--json", str(path)]) == 0
    row = json.loads(path.read_text())["formats"][0]
    assert all(0.1 < float(cost) < 100 for cost in row[9:-1])
