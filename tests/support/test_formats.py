"""`python -m tests.support --formats`: weight formats, their report and their command."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import lade
from lade.bench.report import write_json
from tests.support import formats
from tests.support.__main__ import main
from tests.support.formats import FORMATS, WIDTHS, Format, FormatRow, all_formats, run_format
from tests.support.formats_report import (
    cells,
    content_of,
    counts,
    markdown,
    read_json,
    results_of,
    summary,
)
from tests.support.run import CASES, QUICK_CASES, Difference, Row

GREEDY_CASES = [case for case in CASES if not case.is_sampled]
# As a package is imported, before the command can silence it.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("single_thread")]


def installed(kind: Format) -> bool:
    try:
        return kind.package is None or bool(metadata.version(kind.package))
    except metadata.PackageNotFoundError:
        return False


# --- formats --------------------------------------------------------------------------------


def test_every_format_that_transformers_knows_is_checked() -> None:
    methods = {kind.method for kind in all_formats().values()}
    assert methods >= AUTO_QUANTIZATION_CONFIG_MAPPING.keys()
    assert [*all_formats()][: len(FORMATS)] == [kind.name for kind in FORMATS]
    assert len(all_formats()) == len({kind.name for kind in FORMATS}) + len(
        AUTO_QUANTIZATION_CONFIG_MAPPING.keys() - {kind.method for kind in FORMATS}
    )


def test_a_format_of_a_future_transformers_appears(monkeypatch: pytest.MonkeyPatch) -> None:
    class Config:
        def __init__(self) -> None:
            raise RuntimeError("it needs a quantum computer")

    monkeypatch.setitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "future", Config)
    (row,) = run_format(all_formats()["future"])
    assert (row.dtype, row.check) == (None, None)
    assert row.why_not == "RuntimeError: it needs a quantum computer"
    assert not row.is_bad


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind.package], ids=lambda k: k.name)
def test_no_format_gets_a_wrong_token(kind: Format) -> None:
    if not installed(kind):
        pytest.skip(f"needs {kind.package}")
    for row in run_format(kind, cases=QUICK_CASES, is_timed=False):
        assert not row.is_bad, cells(row)
        if row.check is None:
            pytest.skip(str(row.why_not))
        assert row.check.should_speculate == row.check.speculates
        assert row.check.compared
        assert row.why_not_recorded is None


def test_floats_verify_trees_and_dynamic_int8_is_plain() -> None:
    named = all_formats()
    full, half = run_format(named["not quantized"], cases=QUICK_CASES, is_timed=False)
    assert full.check is not None
    assert half.check is not None
    assert (full.dtype, full.verdict, full.check.kind) == ("float32", "exact", "tree")
    assert full.check.compared == [case.name for case in QUICK_CASES]
    assert half.dtype == "bfloat16"
    assert half.verdict in ("exact", "tie")
    assert full.rounding is None
    assert half.rounding is not None
    assert 2**-9 < half.rounding < 0.05
    assert half.check.compared == [case.name for case in QUICK_CASES if not case.is_sampled]
    assert full.check.num_accepted > 0
    assert half.check.num_accepted > 0
    (dynamic,) = run_format(named["torch.ao dynamic int8"], cases=QUICK_CASES, is_timed=False)
    assert dynamic.check is not None
    assert (dynamic.verdict, dynamic.check.kind, dynamic.check.num_drafted) == ("exact", "plain", 0)


@pytest.mark.parametrize(
    ("rounding", "gap", "verdict"),
    [
        (0.006, 0.01, "tie"),
        (0.004, 0.01, "wrong"),
        (None, 0.01, "wrong"),  # float32
        (0.006, None, "wrong"),  # past the end of plain's text
    ],
)
def test_a_tie_is_as_wide_as_the_rounding_of_the_model(
    rounding: float | None, gap: float | None, verdict: str
) -> None:
    close = Difference("greedy short", 0, 3, 0.001)
    check = Row("x", "llama", "A", "tree", batch_verification="tree", compared=["greedy long"])
    check.differences = [close, Difference("greedy long", 0, 3, gap)]
    row = FormatRow("x", dtype="bfloat16", check=check, rounding=rounding)
    assert row.verdict == verdict
    assert row.is_bad == (verdict == "wrong")


def test_a_missing_package_is_the_reason() -> None:
    (row,) = run_format(Format("x", lambda model: model, package="no-such-package"))
    assert row.why_not == "it needs the package no-such-package"


def test_what_fails_in_one_dtype_is_told_beside_the_other() -> None:
    def build(model: Any) -> Any:
        if model.dtype == torch.bfloat16:
            raise RuntimeError("float32 only")
        return model

    full, half = run_format(Format("x", build), cases=QUICK_CASES[:1], is_timed=False)
    assert full.verdict == "exact"
    assert (half.dtype, half.why_not) == ("bfloat16", "RuntimeError: float32 only")


def test_int8_of_outliers_says_how_it_may_speculate() -> None:
    """The outliers of LLM.int8() are those of all tokens, unless its threshold is 0."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    named = all_formats()
    for name, kind in (("bitsandbytes int8", "plain"), ("bitsandbytes int8, threshold 0", "tree")):
        row = run_format(named[name], cases=GREEDY_CASES, is_timed=False)[1]
        assert row.check is not None
        assert (row.dtype, row.check.kind) == ("bfloat16", kind)


# --- the report -----------------------------------------------------------------------------


def _rows() -> list[FormatRow]:
    tree = Row(
        *("int8", "llama", "A", "tree"),
        batch_verification="tree",
        compared=["greedy long"],
        in_float32=["greedy long"],
        mat=2.5,
    )
    plain = Row(
        *("int4", "llama", "A", "plain"),
        batch_verification="plain",
        reasons={"tree": "steps", "chain": "steps"},
        batch_reasons={"tree": "steps", "chain": "steps"},
        compared=["greedy long"],
        differences=[Difference("greedy long", 0, 3, 0.01)],
    )
    return [
        FormatRow("int8", "some 1.0", "float32", check=tree, sec=0.0123, costs={2: 1.5, 32: 4.0}),
        FormatRow("int4", "some 1.0", "bfloat16", None, plain, "a | reason", rounding=0.02),
        FormatRow("fp8", why_not="it needs a GPU"),
        FormatRow("fp4", "some 1.0", "float32", why_not="not in float32"),
    ]


def test_cells_and_counts() -> None:
    int8, int4, fp8, _ = map(cells, _rows())
    assert int8[:8] == ("int8", "float32", "tree", "tree", "2.50", "", "exact", "yes")
    assert int8[8:] == ("12.3", "1.50", "", "", "", "4.00", "")
    assert int4[5:8] == (
        "2.0%",
        "tie; differs: greedy long, row 0, token 3, gap 0.01",
        "a | reason",
    )
    assert int4[-1] == "tree, chain: steps"
    assert fp8 == ("fp8", *[""] * 13, "it needs a GPU")
    assert counts(_rows())["models"] == 2
    assert summary(_rows()) == (
        "4 formats, 2 models, 1 speculate, 1 exact, 1 tie, 0 wrong, 0 failed"
    )


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    results = results_of(_rows(), 7, stopped=False)
    path = tmp_path / "x.json"
    write_json(path, content_of(results))
    assert read_json(path) == results
    content = json.loads(path.read_text())
    assert content["environment"]["torch"] == metadata.version("torch")
    text = markdown(results)
    assert "| int8 | float32 | tree | tree | 2.50 |  | exact | yes | 12.3 | 1.50 |" in text
    assert "a \\| reason" in text
    assert "| fp8 | it needs a GPU |" in text
    assert "| fp4, float32 | not in float32 |" in text
    assert f"lade {lade.__version__}" in text


# --- the command ----------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_the_command_prints_and_writes_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(formats, "TIMED", formats.TINY)
    path = tmp_path / "x.json"
    names = ["torch.ao dynamic int8", "mxfp4"]
    assert main(["--formats", *names, "--json", str(path)]) == 0
    assert "0 wrong, 0 failed" in capsys.readouterr().out
    rows = read_json(path).rows
    assert {row.name for row in rows} == {*names}
    assert rows[0].sec is not None
    assert [*rows[0].costs] == [*WIDTHS[1:]]
    assert all(0.1 < cost < 100 for cost in rows[0].costs.values())
