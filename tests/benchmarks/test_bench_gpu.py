"""`python -m benchmarks gpu` on a CPU: known models, replayed drafts, stages, what is saved."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import lade
from benchmarks.__main__ import app
from benchmarks.gpu import prepare, work
from benchmarks.gpu.acceptance import MAT
from benchmarks.gpu.drafter import ReplayedDrafter
from benchmarks.gpu.job import GpuJob
from benchmarks.gpu.process import run_in_process
from benchmarks.gpu.run import GROUPS, STAGES
from benchmarks.gpu.shapes import SHAPES, KnownModel, make_model, random_prompt
from benchmarks.gpu.stage import NO_TIME, Stage
from benchmarks.gpu.used import NO_GRAPHS

TINY = SHAPES["tiny"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def known() -> KnownModel:
    return make_model(TINY, CPU)


@pytest.fixture(autouse=True)
def _short_texts_and_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.answers.MAX_ROUNDS", 1)
    monkeypatch.setattr("benchmarks.gpu.steps._MIN_ROUNDS", 3)
    monkeypatch.setattr("benchmarks.gpu.steps._MAX_ROUNDS", 4)
    monkeypatch.setattr("benchmarks.gpu.host._NUM_NEW", 60)
    monkeypatch.setattr("benchmarks.gpu.host._NUM_HELD", 20_000)


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["gpu", *args], catch_exceptions=False, env={"COLUMNS": "150"})


def run_tiny(path: Path, *args: str) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Return what the command did, and the stages that it wrote."""
    done = run("--device", "cpu", "--shapes", "tiny", "--json", str(path), *args)
    assert str(path.parent) not in path.read_text()  # results are published
    return done, {stage["stage"]: stage for stage in json.loads(path.read_text())["stages"]}


def stage_for(name: str) -> Stage:
    return Stage(name, "tiny", perf_counter() + 3600, lambda stage: None)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run stages as their processes would, but here."""

    def run(stage: Stage, job: GpuJob, kill_at: float) -> None:
        received = GpuJob.from_message(json.loads(json.dumps(job.as_message())))
        done = Stage(job.stage, job.shape_name, stage.ends_at, lambda stage: None)
        done.run(lambda stage: work.work(received, stage))
        stage.hear(json.loads(json.dumps(done.as_message())))

    monkeypatch.setattr("benchmarks.gpu.run.run_in_process", run)


# --- models and drafts ------------------------------------------------------------------------


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


# --- stages -----------------------------------------------------------------------------------


@pytest.mark.exhaustive  # whole answers of each method, and steps of eight sizes
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler
@pytest.mark.usefixtures("in_this_process")
def test_all_stages_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of torch's compiler but its last part, which makes machine code for two minutes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    done, stages = run_tiny(tmp_path / "gpu.json")
    assert done.exit_code == 0
    assert [*stages] == list(STAGES)
    assert {name: stage["failure"] for name, stage in stages.items() if stage["failure"]} == {}
    for name in ("plain", "installed", "static", "eager", "graphs", "compiled", "batches"):
        for row in stages[name]["rows"]:
            assert row["share_of_known_text"] == 1.0
            assert row["num_tokens"] == 64 * row["num_rows"]
            assert row["tokens_per_sec"] == pytest.approx(row["num_tokens"] / row["sec"], rel=1e-3)
            assert 0 < row["prefill_sec"] < row["sec"]
    executions = {name: stages[name]["rows"][0]["execution"] for name in ("static", "graphs")}
    # On a CPU transformers compiles nothing, and there is nothing to record with.
    assert executions == {"static": "eager", "graphs": "fixed"}
    assert stages["compiled"]["rows"][0]["execution"] == "compiled"
    assert stages["graphs"]["rows"][0]["mean_accepted_tokens"] == pytest.approx(MAT, rel=0.1)
    assert [row["num_rows"] for row in stages["batches"]["rows"]] == [4, 4, 8, 8]
    mats = [row["mean_accepted_tokens"] for row in stages["host"]["rows"]]
    assert 1.5 < mats[0] < mats[-1]
    assert max(row["largest_difference"] for row in stages["attention"]["rows"]) < 1.6e-2


@pytest.mark.usefixtures("in_this_process")
def test_speed_ups_and_shares_are_the_ratios_that_they_say(tmp_path: Path) -> None:
    done, stages = run_tiny(tmp_path / "gpu.json", "--stages", "bandwidth,plain,steps,graphs")
    assert done.exit_code == 0
    (copied,), (plain,) = (stages[name]["rows"] for name in ("bandwidth", "plain"))
    speed = copied["bytes_per_sec"]
    assert speed == pytest.approx(2 * copied["copied_bytes"] / copied["sec"], 1e-4)
    (graphs,) = stages["graphs"]["rows"]
    assert graphs["speedup_over_plain"] == pytest.approx(plain["sec"] / graphs["sec"], rel=1e-3)
    rows, weights = stages["steps"]["rows"], stages["steps"]["model"]["weight_bytes_of_step"]
    assert [(row["context"], row["num_nodes"]) for row in rows] == [
        (context, size) for context in (64, 128) for size in TINY.tree_sizes
    ]
    assert stages["steps"]["left_out"] == {"context 1024": "the model has 512 positions"}
    for row in rows:
        assert 0 < row["host_sec"] <= row["sec"] <= row["busy_sec"] < 1
        assert row["why_not_recorded"] == NO_GRAPHS
        read = weights + 256 * (row["mean_num_cached"] + row["num_nodes"])
        assert row["read_bytes"] == pytest.approx(read, rel=1e-4)
        share = row["read_bytes"] / row["sec"] / speed
        assert row["share_of_copy_bandwidth"] == pytest.approx(share, rel=1e-3)


# --- processes --------------------------------------------------------------------------------


TELLING = """
import json, os, signal, sys, time
job = json.loads(sys.stdin.readline())
message = dict(model={}, rows=[{"pid": os.getpid()}], left_out={}, warnings=[], failure=None)
print(json.dumps({**message, "doing": "its work", "traceback": ""}), flush=True)
"""


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        ("print(json.dumps({'done': True}), flush=True)", None),
        ("os.kill(os.getpid(), signal.SIGSEGV)", r"was ended by signal 11 \(SIGSEGV\)"),
        ("", "ended too early"),
        ("time.sleep(60)", "was killed past its time"),
    ],
)
def test_every_ending_but_the_right_one_is_a_failure(program: str, failure: str | None) -> None:
    stage = stage_for("steps")
    command = [sys.executable, "-S", "-c", TELLING + program]
    run_in_process(stage, GpuJob("steps", "cpu", 1.0, TINY), perf_counter() + 1.5, command)
    assert len(stage.rows) == 1  # what it found is kept
    told = stage.failure or ""
    assert bool(told) == bool(failure)
    assert re.match(f"its process {failure} after " if failure else "", told)


# --- the command ------------------------------------------------------------------------------


def test_a_stage_that_fails_loses_nothing_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, begun = tmp_path / "gpu.json", list[str]()

    def run(stage: Stage, job: GpuJob, kill_at: float) -> None:
        begun.append(stage.name)
        if stage.name == "eager":
            assert '"graphs"' in path.read_text()  # written before this stage began
            stage.traceback, stage.failure = f"in {tmp_path}", "RuntimeError: broken"

    monkeypatch.setattr("benchmarks.gpu.run.run_in_process", run)
    with pytest.raises(lade.LadeError, match="1 failed: eager tiny: RuntimeError: broken"):
        run_tiny(path)
    assert begun == [name for group in GROUPS for name in group]  # what matters most comes first
    _, stages = run_tiny(path, "--minutes", "0")
    assert all(stage["left_out"] == {"all": NO_TIME} for stage in stages.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", r"expected a CUDA device, got none .*--shapes tiny"),
        ("--device cpu", "expected --shapes 1b_short or tiny with --device cpu"),
        ("--shapes 70b", "expected different ones of 1b, 8b, 1b_short, tiny, got '70b'"),
        ("--stages speed", "expected different ones of bandwidth, attention, host"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        run(*options.split())


# --- getting there ----------------------------------------------------------------------------


def test_what_a_gpu_needs_is_told_at_once_and_what_torch_brings_is_not_carried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    told = "; ".join(prepare.what_is_missing("cuda"))
    assert re.search("was not built for CUDA.*C compiler.*/nowhere/Python.h", told)
    assert prepare.what_is_missing("cpu") == []
    needed = {*prepare.needed_beside_torch()}
    assert {"numba", "llvmlite", "typer", "pytest", "hypothesis"} <= needed
    assert not {"torch", "transformers", "numpy", "tokenizers", "lade-decoding"} & needed
    # Only the standard library is needed to begin.
    command = [sys.executable, "-S", "-m", "benchmarks.gpu.prepare", "--help"]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[2])
