"""`lade bench gpu` on a CPU: known models, replayed drafts, stages, and what is saved of them."""

import json
import weakref
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

import lade
from lade.bench.gpu.acceptance import RECORDED, counts_at, recorded_in
from lade.bench.gpu.drafter import ReplayedDrafter
from lade.bench.gpu.host import measure_host
from lade.bench.gpu.real import measure_real
from lade.bench.gpu.run import Plan, run_stages
from lade.bench.gpu.shapes import SHAPES, KnownModel, Shape, make_model, random_prompt
from lade.bench.gpu.speed import measure_speed
from lade.bench.gpu.stage import NO_MODEL, NO_TIME, Stage
from lade.bench.gpu.steps import measure_steps
from lade.bench.prompts import Prompt
from lade.bench.traces import Trace, Traces, write_traces
from lade.cli.app import app
from lade.drafting.successors import Successors
from lade.errors import LadeError, ModelFetchError
from lade.models.loading import LoadedModel
from lade.stats import Step
from tests.lade.tiny import byte_tokenizer, tiny_model

TINY = SHAPES["tiny"]
CPU = torch.device("cpu")
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of …"


@pytest.fixture(scope="module")
def known() -> KnownModel:
    return make_model(TINY, CPU)


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model in place of the default one, which would have to be fetched."""
    model = tiny_model("llama", seed=2, dtype=torch.float32, vocab_size=256)
    model.generation_config.eos_token_id = None
    loaded = LoadedModel(model, byte_tokenizer(), "tiny")
    monkeypatch.setattr("lade.cli.bench_gpu.load_with_progress", lambda *args: loaded)
    monkeypatch.setattr("lade.cli.bench_gpu.DEMO_PROMPTS", [("a", "abcabc"), ("b", "xyxyxy")])


def run(*args: str) -> Any:
    command = ["bench", "gpu", *args]
    return CliRunner().invoke(app, command, catch_exceptions=False, env={"COLUMNS": "150"})


@pytest.fixture(autouse=True)
def _short_texts_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lade.bench.gpu.host._NUM_NEW", 60)
    monkeypatch.setattr("lade.bench.gpu.host._NUM_HELD", 20_000)


def run_tiny(*args: str) -> Any:
    return run("--device", "cpu", "--shapes", "tiny", *args)


def stage_for(name: str, ends_at: float = float("inf")) -> Stage:
    return Stage(name, "tiny", ends_at, lambda what: None)


def stages_in(path: Path) -> dict[str, dict[str, Any]]:
    return {stage["stage"]: stage for stage in json.loads(path.read_text())["stages"]}


# --- the host ---------------------------------------------------------------------------------


def test_the_host_drafts_accepts_and_puts_off_with_a_model_that_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lade.bench.gpu.host._NUM_NODES", (4, 64))
    stage = stage_for("host")
    measure_host(CPU, stage)
    few, many = stage.rows
    assert (few["num_nodes"], many["num_nodes"]) == (4, 64)
    assert few["draft_tokens_per_step"] <= 3
    assert 30 < many["draft_tokens_per_step"] <= 63
    assert 1.5 < few["mean_accepted_tokens"] < many["mean_accepted_tokens"]
    for row in stage.rows:
        assert 0 < row["deferred_sec"] < 0.1
        assert 0 < row["waited_for_sec"] < 0.1


# --- models -----------------------------------------------------------------------------------


def test_real_shapes_are_those_of_the_models_they_are_named_for() -> None:
    """The numbers of parameters are those that the model cards give."""
    with torch.device("meta"):
        small = AutoModelForCausalLM.from_config(
            LlamaConfig(**SHAPES["1b"].config, tie_word_embeddings=True)
        )
        large = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES["8b"].config))
    assert small.num_parameters() == 1_235_814_400
    assert large.num_parameters() == 8_030_261_248


def test_plain_text_goes_from_token_to_token_by_a_wide_margin(known: KnownModel) -> None:
    prompt = random_prompt(TINY, 20, seed=1)
    output = known.model.generate(prompt, max_new_tokens=40, do_sample=False)
    assert output[0, 20:].tolist() == known.answer(int(prompt[0, -1]), 40)
    with torch.no_grad():
        logits = known.model(prompt).logits[0].double()
    best = logits.topk(2, dim=-1)
    assert best.indices[:, 0].tolist() == [known.successors[token] for token in prompt[0].tolist()]
    # Half precision is off by 0.05 or so.
    assert float((best.values[:, 0] - best.values[:, 1]).min()) > 1.0


def test_the_text_comes_back_to_a_token_only_after_all_others(known: KnownModel) -> None:
    assert sorted(known.answer(7, 512)) == list(range(512))


def test_making_a_model_draws_nothing_from_the_random_state_and_repeats(known: KnownModel) -> None:
    before = torch.get_rng_state()
    again = make_model(TINY, CPU)
    assert torch.equal(before, torch.get_rng_state())
    assert again.successors == known.successors
    assert again.model.dtype == torch.bfloat16
    # Two layers of 64 wide: 4 x 64 x 64 less the narrower keys and values, three of 64 x 128, two
    # norms; a norm and the output layer; 2 bytes each.
    in_layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
    assert again.weight_bytes == 2 * (2 * in_layer + 64 + 64 * 512)
    assert again.bytes_per_cached_token == 2 * 2 * 2 * 16 * 2


def test_positions_scaled_as_in_llama_3_change_nothing_of_it() -> None:
    shape = replace(SHAPES["8b"], config={**TINY.config, "max_position_embeddings": 131_072})
    known = make_model(shape, CPU)
    assert known.model.config.rope_parameters["rope_type"] == "llama3"
    prompt = random_prompt(shape, 12, seed=0)
    output = known.model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert output[0, 12:].tolist() == known.answer(int(prompt[0, -1]), 8)


# --- acceptance and drafts --------------------------------------------------------------------


def test_what_was_recorded_is_what_its_comment_says() -> None:
    num_steps = sum(RECORDED)
    assert num_steps == 279
    mat = 1 + sum(count * times for count, times in enumerate(RECORDED)) / num_steps
    assert mat == pytest.approx(3.08, abs=0.005)


@pytest.mark.parametrize("mat", [1.5, 2.5, 4.0])
@pytest.mark.parametrize("num_draft_tokens", [7, 31])
def test_counts_have_the_mean_asked_for(mat: float, num_draft_tokens: int) -> None:
    counts = counts_at(RECORDED, mat, num_draft_tokens, 102)
    assert len(counts) == 102
    assert 1 + fmean(counts) == pytest.approx(mat, rel=0.02)
    assert max(counts) <= num_draft_tokens
    assert {*counts} <= {count for count, times in enumerate(RECORDED) if times} | {7}
    assert counts != sorted(counts)
    assert counts == counts_at(RECORDED, mat, num_draft_tokens, 102)


def test_counts_at_the_recorded_mean_are_the_recorded_ones() -> None:
    histogram = [5, 3, 0, 2]
    mat = 1 + (3 + 2 * 3) / 10
    counts = counts_at(histogram, mat, 31, 10)
    assert [counts.count(count) for count in range(4)] == histogram


def test_a_mean_that_was_never_recorded_is_refused() -> None:
    for mat in (1.0, 4.0, 9.0):
        with pytest.raises(ValueError, match="expected a MAT between 1 and 4"):
            counts_at(RECORDED, mat, 3, 10)


def trace(name: str, token_ids: list[int], loops: bool = False) -> Trace:
    shape = (len(token_ids), 8)
    successors = Successors(np.zeros(shape, np.int32), np.zeros(shape, np.float32))
    return Trace(name, "all", loops, token_ids, 10, successors)


def test_counts_come_from_traces_by_replay(tmp_path: Path) -> None:
    path = tmp_path / "traces.safetensors"
    settings = {"vocab_size": 64, "max_new_tokens": 64}
    period = list(range(10, 20))
    traces = [trace("copies", period * 5), trace("loops", [1, 2] * 20, loops=True)]
    write_traces(path, Traces(traces, settings, {}))
    histogram = recorded_in(path, 3)
    # The prompt is copied over and over: once that is seen, all three draft tokens come.
    assert len(histogram) == 4
    assert histogram[3] >= 6
    assert sum(histogram) <= 1 + 39 // 3
    write_traces(path, Traces([traces[1]], settings, {}))
    with pytest.raises(ValueError, match=r"in no loop in traces.safetensors, got none"):
        recorded_in(path, 3)


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 31, 127])
def test_trees_have_their_size_and_accept_what_they_are_told(num_nodes: int) -> None:
    successors = [(7 * token + 3) % 512 for token in range(512)]
    for num_accepted in {0, 1, 2, num_nodes // 2, num_nodes}:
        if num_accepted > num_nodes:
            continue
        drafter = ReplayedDrafter(successors, [num_accepted], num_nodes)
        sequence = drafter.open([1, 2, 3])
        drafter.observe(sequence, [5])
        draft = drafter.draft(sequence, [1, 2, 3, 5], num_nodes)
        assert len(draft) == num_nodes
        children: dict[tuple[int, int], int] = {}
        depths = draft.depths.tolist()
        for node, parent in enumerate(draft.parents.tolist()):
            assert -1 <= parent < node
            assert depths[node] == (1 if parent < 0 else depths[parent] + 1)
            children[parent, int(draft.token_ids[node])] = node
        assert len(children) == num_nodes  # no two siblings are the same
        assert (np.diff(draft.probs) <= 0).all()
        node, token_id, accepted = -1, successors[5], 0
        while (node, token_id) in children:
            node = children[node, token_id]
            token_id, accepted = successors[token_id], accepted + 1
        assert accepted == num_accepted
        drafter.close(sequence)


def test_steps_of_lade_accept_the_counts_in_turn_and_say_the_known_text(known: KnownModel) -> None:
    counts = [0, 3, 1, 0, 7, 2]
    drafter = ReplayedDrafter(known.successors, counts, 7)
    prompt = random_prompt(TINY, 20, seed=3)
    for _ in range(2):  # a second sequence begins with the first count
        steps: list[Step] = []
        output = lade.generate(
            known.model,
            prompt,
            drafter=drafter,
            config=lade.Config(max_draft_tokens=7),
            on_step=steps.append,
            max_new_tokens=60,
            do_sample=False,
        )
        accepted = [step.num_accepted for step in steps[1:-1]]
        assert accepted == (counts * 4)[: len(accepted)]
        assert len(accepted) > len(counts)
        assert [step.num_draft_tokens for step in steps[1:-2]] == [7] * (len(steps) - 3)
        assert output[0, 20:].tolist() == known.answer(int(prompt[0, -1]), 60)


# --- stages -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("real")
def test_all_stages_run_and_are_written(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    result = run_tiny("--json", str(path), "--mat", "2.5")
    assert result.exit_code == 0
    for words in (
        "Copy bandwidth",
        "Steps, tiny",
        "Whole answers",
        "SmolLM2",
        "not run: context 1024",
    ):
        assert words in result.stdout
    content = json.loads(path.read_text())
    assert str(tmp_path) not in path.read_text()
    assert content["settings"]["complete"] is True
    assert content["settings"]["mat"] == 2.5
    assert content["environment"]["torch"] == metadata.version("torch")
    names = [stage["stage"] for stage in content["stages"]]
    assert names == ["bandwidth", "host", "model", "steps", "speed", "real"]
    assert all(stage["failure"] is None for stage in content["stages"])
    bandwidth, _, model, steps, speed, real = content["stages"]
    (copied,) = bandwidth["rows"]
    assert copied["bytes_per_sec"] == pytest.approx(
        2 * copied["copied_bytes"] / copied["sec"], 1e-4
    )
    assert 1e8 < copied["bytes_per_sec"] < 1e13
    assert model["rows"][0]["verification"] == "tree"
    check_steps(steps, copied["bytes_per_sec"], model["rows"][0])
    check_speed(speed)
    assert [(row["decoding"], row["method"]) for row in real["rows"] if row["method"] == "plain"]
    decodings = {row["decoding"] for row in real["rows"]}
    assert decodings == {"greedy", "sampling at temperature 0.7"}
    assert all(row["same_text"] == 1.0 for row in real["rows"])  # in float32


def check_steps(stage: dict[str, Any], bytes_per_sec: float, model: dict[str, Any]) -> None:
    rows = stage["rows"]
    sizes = [1, 2, 4, 8, 16, 32, 64, 128]
    assert [(row["context"], row["num_nodes"]) for row in rows] == [
        (context, size) for context in (64, 128) for size in sizes
    ]
    assert stage["left_out"] == {"context 1024": "the model has 512 positions"}
    for row in rows:
        assert 0 < row["host_sec"] <= row["sec"] < 1
        assert row["least_sec"] <= row["sec"]
        assert row["num_repeats"] >= 5
        cached = row["mean_num_cached"]
        if row["context"] == 128:  # half of the steps lie before it and half of them behind
            assert cached == pytest.approx(128, abs=20)
        read = model["weight_bytes_of_step"] + 256 * (cached + row["num_nodes"])
        assert row["read_bytes"] == pytest.approx(read, rel=1e-4)
        share = row["read_bytes"] / row["sec"] / bytes_per_sec
        assert row["share_of_copy_bandwidth"] == pytest.approx(share, rel=1e-3)
        one = next(r for r in rows if r["context"] == row["context"] and r["num_nodes"] == 1)
        assert row["ratio_to_one_node"] == pytest.approx(row["sec"] / one["sec"], rel=1e-3)


def check_speed(stage: dict[str, Any]) -> None:
    rows = {row["method"]: row for row in stage["rows"]}
    assert list(rows) == ["plain", "static", "lade"]
    for row in rows.values():
        assert row["share_of_known_text"] == 1.0
        assert row["num_repeats"] == 6
        assert row["num_tokens"] == 64
        assert row["tokens_per_sec"] == pytest.approx(64 / row["sec"], rel=1e-3)
        for other in ("plain", "static"):
            speedup = rows[other]["sec"] / row["sec"]
            assert row[f"speedup_over_{other}"] == pytest.approx(speedup, rel=1e-3)
        assert 0 < row["prefill_sec"] < row["sec"]
        assert row["warm_up_sec"] > 0
    assert rows["lade"]["mean_accepted_tokens"] == pytest.approx(2.5, rel=0.05)
    assert rows["lade"]["draft_tokens_per_step"] > 25  # 31, but for the ends of answers
    assert "mean_accepted_tokens" not in rows["plain"]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("real")
def test_a_trace_and_a_number_of_nodes_are_used(tmp_path: Path) -> None:
    traces, path = tmp_path / "traces.safetensors", tmp_path / "gpu.json"
    mixed = trace("mixed", [*range(10, 20), *range(10, 20), *range(10, 20), *range(30, 50)])
    write_traces(traces, Traces([mixed], {"vocab_size": 64, "max_new_tokens": 64}, {}))
    options = ["--trace", str(traces), "--max-draft-tokens", "3", "--mat", "3", "--json", str(path)]
    assert run_tiny(*options).exit_code == 0
    settings = json.loads(path.read_text())["settings"]
    assert settings["traces"]["name"] == "traces.safetensors"
    assert settings["recorded_steps_by_accepted_tokens"] == recorded_in(traces, 3)
    (row,) = [row for row in stages_in(path)["speed"]["rows"] if row["method"] == "lade"]
    assert row["mean_accepted_tokens"] == pytest.approx(3, rel=0.07)
    assert 2.5 < row["draft_tokens_per_step"] <= 3


@pytest.mark.exhaustive
@pytest.mark.usefixtures("real")
def test_a_stage_that_fails_loses_nothing_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpu.json"

    def fail(*args: Any) -> None:
        assert stages_in(path)["steps"]["rows"]  # written before this stage began
        raise RuntimeError(f"broken\nin {tmp_path}")

    monkeypatch.setattr("lade.bench.gpu.run.measure_speed", fail)
    with pytest.raises(LadeError, match="1 failed: speed tiny: RuntimeError: broken"):
        run_tiny("--json", str(path))
    stages = stages_in(path)
    assert list(stages) == ["bandwidth", "host", "model", "steps", "speed", "real"]
    assert stages["speed"]["failure"] == "RuntimeError: broken"
    assert stages["real"]["rows"]
    assert "Traceback" not in path.read_text()
    assert str(tmp_path) not in path.read_text()


def test_an_interruption_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpu.json"

    def interrupt(*args: Any) -> None:
        args[-1].rows.append({"method": "plain", "tokens_per_sec": 1.0})
        raise KeyboardInterrupt

    monkeypatch.setattr("lade.bench.gpu.run.measure_speed", interrupt)
    assert run_tiny("--json", str(path)).exit_code != 0
    stages = stages_in(path)
    assert list(stages) == ["bandwidth", "host", "model", "steps", "speed"]
    assert len(stages["steps"]["rows"]) == 16
    assert stages["speed"]["rows"]  # as far as it came
    assert json.loads(path.read_text())["settings"]["complete"] is False


def test_what_there_is_no_memory_and_no_way_for_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpu.json"

    def no_memory(*args: Any) -> KnownModel:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    def no_network(*args: Any) -> LoadedModel:
        raise ModelFetchError("the package index cannot be reached")

    monkeypatch.setattr("lade.bench.gpu.run.make_model", no_memory)
    monkeypatch.setattr("lade.cli.bench_gpu.load_with_progress", no_network)
    result = run_tiny("--json", str(path))
    assert result.exit_code == 0
    stages = stages_in(path)
    why = "CUDA out of memory. Tried to allocate 20.00 MiB"
    assert stages["model"]["left_out"] == {"the rest": why}
    assert stages["steps"]["left_out"] == stages["speed"]["left_out"] == {"all": NO_MODEL}
    assert stages["real"]["left_out"] == {
        "all": "ModelFetchError: the package index cannot be reached"
    }
    said = " ".join(result.stdout.split())
    assert "not run: all: ModelFetchError: the package index cannot be reached" in said


def test_tree_sizes_there_is_no_memory_for_are_left_out_and_the_others_timed(
    known: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = type(known.model).forward

    def limited(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        ids = kwargs["input_ids"]
        if 16 < ids.shape[1] <= 128:  # not the prompt
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return output

    shape = replace(TINY, contexts=(300,), tree_sizes=(1, 4, 32, 64))
    stage = stage_for("steps")
    monkeypatch.setattr(type(known.model), "forward", limited)
    measure_steps(known, shape, None, stage)
    assert [row["num_nodes"] for row in stage.rows] == [1, 4]
    assert [*stage.left_out] == ["context 300, 32 nodes or more"]
    assert all(row["share_of_copy_bandwidth"] is None for row in stage.rows)
    nothing = stage_for("steps")
    measure_steps(known, replace(shape, tree_sizes=(32, 64)), None, nothing)
    assert nothing.rows == []
    assert [*nothing.left_out] == ["context 300, 32 nodes or more"]


def test_a_static_cache_that_cannot_be_compiled_is_left_out(
    known: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("lade.bench.gpu.speed._static", fail)
    stage = stage_for("speed")
    measure_speed(known, TINY, [1, 2], 8, stage)
    assert stage.left_out == {"static": "RuntimeError: no compiler"}
    assert [row["method"] for row in stage.rows] == ["plain", "lade"]
    assert all(row["speedup_over_static"] is None for row in stage.rows)


def test_a_model_is_gone_before_the_next_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []

    def make(shape: Shape, device: torch.device) -> KnownModel:
        assert [model() for model in made] == [None] * len(made)
        known = make_model(shape, device)
        made.append(weakref.ref(known.model))
        return known

    def no_network() -> LoadedModel:
        raise ModelFetchError("offline")

    monkeypatch.setattr("lade.bench.gpu.run.make_model", make)
    small = replace(TINY, contexts=(160,), tree_sizes=(1, 4), max_new_tokens=16)
    plan = Plan(CPU, [small, replace(small, name="again")], 8.0, RECORDED, 2.5, 8, no_network, [])
    stages: list[Stage] = []
    done = [stage.title for stage in run_stages(plan, stages, lambda what: None)]
    assert done == [stage.title for stage in stages]
    assert done[2:] == [
        *("model tiny", "steps tiny", "speed tiny"),
        *("model again", "steps again", "speed again"),
        "real",
    ]
    assert all(stage.failure is None for stage in stages)
    ends = [stage.ends_at for stage in stages]
    assert ends == sorted(ends)
    assert ends[-1] - ends[0] < 8 * 60
    assert len(made) == 2
    assert made[1]() is None


def test_without_time_every_stage_is_left_out_and_said(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert run_tiny("--minutes", "0", "--json", str(path)).exit_code == 0
    for stage in stages_in(path).values():
        assert stage["rows"] == []
        assert stage["left_out"] == {"all": NO_TIME}


def test_parts_begin_only_while_there_is_time(known: KnownModel) -> None:
    stage = stage_for("steps", perf_counter() + 3600)
    begun: list[str] = []

    def say(what: str) -> None:
        begun.append(what)
        stage.ends_at = 0.0  # the time is up once the first part has begun

    stage.say = say
    measure_steps(known, replace(TINY, contexts=(64, 128)), 1e9, stage)
    assert begun == ["steps tiny: context 64"]
    assert {row["context"] for row in stage.rows} == {64}
    assert {row["num_repeats"] for row in stage.rows} == {5}  # the least that means something
    assert stage.left_out == {"context 128": NO_TIME}


def test_methods_there_is_no_time_for_are_left_out_and_the_others_answer_every_prompt(
    known: KnownModel,
) -> None:
    stage = stage_for("speed", perf_counter() + 3600)

    def say(what: str) -> None:
        stage.ends_at = 0.0

    stage.say = say
    measure_speed(known, replace(TINY, max_new_tokens=16), [1, 2], 8, stage)
    assert stage.left_out == {"static": NO_TIME, "lade": NO_TIME}
    (row,) = stage.rows
    assert (row["method"], row["num_repeats"]) == ("plain", 2)


def test_a_real_model_stops_between_answers_when_the_time_is_up() -> None:
    stage = stage_for("real", perf_counter() + 3600)

    def say(what: str) -> None:
        stage.ends_at = 0.0

    stage.say = say
    model = tiny_model("llama", seed=2, dtype=torch.float32, vocab_size=256)
    loaded = LoadedModel(model, byte_tokenizer(), "tiny")
    prompts = [Prompt("a", "a", "abc"), Prompt("b", "b", "xyz")]
    measure_real(lambda: loaded, prompts, 8, stage)
    assert stage.rows == []
    assert stage.left_out == {
        "greedy, 2 of 2 prompts": NO_TIME,
        "sampling at temperature 0.7": NO_TIME,
    }


# --- refusals ---------------------------------------------------------------------------------


def test_without_a_gpu_the_command_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"expected a CUDA device, got none .*--shapes tiny"):
        run()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cpu"], "expected --shapes tiny with --device cpu"),
        (["--device", "meta", "--shapes", "tiny"], "expected a CUDA device or cpu, got 'meta'"),
        (["--shapes", "70b"], "expected --shapes to be different ones of 1b, 8b, tiny, got '70b'"),
        (["--shapes", "tiny,tiny"], "expected --shapes to be different ones"),
        (["--shapes", ","], "expected --shapes to be different ones"),
        (["--device", "cpu", "--shapes", "tiny", "--mat", "40"], "expected a MAT between 1 and 31"),
        (["--device", "cpu", "--shapes", "tiny", "--mat", "1"], "expected a MAT between 1 and 31"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(*options)


def test_wrong_numbers_are_errors_of_use() -> None:
    for options in (["--max-draft-tokens", "0"], ["--minutes", "-1"], ["--mat", "0.5"]):
        assert run_tiny(*options).exit_code == 2


def test_help_names_what_is_measured() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for word in ("--shapes", "--minutes", "--mat", "bandwidth"):
        assert word in result.output
