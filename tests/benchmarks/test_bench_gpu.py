"""`python -m benchmarks gpu` on a CPU: known models, replayed drafts, stages, what is saved."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import lade
from benchmarks.__main__ import app
from benchmarks.alone import alone
from benchmarks.gpu import measure, prepare
from benchmarks.gpu.drafter import MAT, ReplayedDrafter
from benchmarks.gpu.shapes import SHAPES, KnownModel, make_model, random_prompt

TINY = SHAPES["tiny"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def known() -> KnownModel:
    return make_model(TINY, CPU)


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["gpu", *args], catch_exceptions=False, env={"COLUMNS": "150"})


def test_plain_text_goes_from_token_to_token_by_a_wide_margin(known: KnownModel) -> None:
    prompt = random_prompt(TINY, 20, seed=1)
    output = known.model.generate(prompt, max_new_tokens=40, do_sample=False)
    assert output[0, 20:].tolist() == known.answer(int(prompt[0, -1]), 40)
    with torch.no_grad():
        best = known.model(prompt).logits[0].double().topk(2, dim=-1)
    assert best.indices[:, 0].tolist() == [known.successors[token] for token in prompt[0].tolist()]
    assert float((best.values[:, 0] - best.values[:, 1]).min()) > 1.0  # half precision: 0.05 or so
    assert sorted(known.answer(7, 512)) == [*range(512)]  # comes back after all others


def test_trees_have_their_size_and_accept_what_they_are_told() -> None:
    successors = [(7 * token + 3) % 512 for token in range(512)]
    for num_nodes, num_accepted in ((1, 0), (1, 1), (7, 3), (127, 0), (127, 63), (127, 127)):
        drafter: Any = ReplayedDrafter(successors, [num_accepted], num_nodes)
        sequence = drafter.open([1, 2, 3])
        drafter.observe(sequence, [5])
        draft = drafter.draft(sequence, [1, 2, 3, 5], num_nodes)
        places = zip(draft.parents.tolist(), draft.token_ids.tolist(), strict=True)
        children = {place: node for node, place in enumerate(places)}
        assert len(children) == len(draft) == num_nodes  # no two siblings are the same
        assert (np.diff(draft.probs) <= 0).all()
        node, token_id, accepted = -1, successors[5], 0
        while (node, token_id) in children:
            node = children[node, token_id]
            token_id, accepted = successors[token_id], accepted + 1
        assert accepted == num_accepted


@pytest.mark.parametrize("stage", ["plain", "installed", "eager", "static", "installed_4_rows"])
def test_a_stage_answers_with_the_known_text(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_MOST_PROMPTS", 2)
    row = measure.measured(stage, "tiny", "cpu")
    assert row["share_of_known_text"] == 1.0
    assert row["tokens_per_sec"] == pytest.approx(64 * row["num_rows"] / row["sec"], rel=1e-3)
    if stage == "eager":
        assert row["mean_accepted_tokens"] == pytest.approx(MAT, rel=0.1)


def test_stages_are_held_against_plain_and_one_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpu.json"

    def alone(function: Any, name: str, shape: str, device: str, timeout: float) -> Any:
        if name == "eager":
            raise lade.LadeError("measured ended with status -11")
        row = {"stage": name, "shape": shape, "share_of_known_text": 1.0}
        return {**row, "tokens_per_sec": 10.0 if "plain" in name else 25.0}

    monkeypatch.setattr(measure, "alone", alone)
    options = ("--device", "cpu", "--shapes", "tiny", "--json", str(path))
    with pytest.raises(lade.LadeError, match="1 failed: eager tiny: measured ended with status"):
        run(*options)
    content = json.loads(path.read_text())
    speeds = {row["stage"]: row["speedup_over_plain"] for row in content["rows"]}
    assert [*speeds] == [name for name in measure.STAGES if name != "eager"]
    assert {
        name: speed for name, speed in speeds.items() if "plain" not in name and speed != 2.5
    } == {}
    with pytest.raises(lade.LadeError, match="there was no time left"):
        run(*options, "--minutes", "0")


@pytest.mark.exhaustive  # processes that import torch
def test_what_a_process_does_alone_ends_with_it() -> None:
    assert alone(measure.measured, "plain", "tiny", "cpu")["num_rows"] == 1
    with pytest.raises(lade.LadeError, match="KeyError: 'none'"):
        alone(measure.measured, "none", "tiny", "cpu")
    with pytest.raises(lade.LadeError, match="_exit ended with status 3"):
        alone(os._exit, 3)
    with pytest.raises(lade.LadeError, match="sleep took more than 1 s"):
        alone(time.sleep, 60, timeout=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", r"expected a CUDA device, got none; --device cpu --shapes tiny"),
        ("--device cpu", "expected --shapes 1b_short or tiny with --device cpu"),
        ("--shapes 70b", "expected different ones of 1b, 8b, 1b_short, tiny, got '70b'"),
        ("--stages speed", "expected different ones of plain, installed, graphs"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        run(*options.split())


def test_what_a_gpu_needs_is_told_at_once_and_what_torch_brings_is_not_carried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    said = "; ".join(prepare.what_is_missing("cuda"))
    assert re.search("was not built for CUDA.*C compiler.*/nowhere/Python.h", said)
    assert prepare.what_is_missing("cpu") == []
    needed = {*prepare.needed_beside_torch()}
    assert {"numba", "llvmlite", "typer", "pytest", "hypothesis"} <= needed
    assert not {"torch", "transformers", "numpy", "tokenizers", "lade-decoding"} & needed
    # Only the standard library is needed to begin.
    command = [sys.executable, "-S", "-m", "benchmarks.gpu.prepare", "--help"]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[2])
