"""`python -m benchmarks gpu` on a CPU: known models, replayed drafts, stages, what is saved."""

import json
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

import lade
from benchmarks.__main__ import app
from benchmarks.gpu import work
from benchmarks.gpu.acceptance import MAT, counts_for
from benchmarks.gpu.answers import SAMPLED, Replayed, measure_answers, measure_side_by_side
from benchmarks.gpu.attention import measure_attention
from benchmarks.gpu.chat import measure_chat
from benchmarks.gpu.command import choose_device
from benchmarks.gpu.device import forget_peak, peak_bytes
from benchmarks.gpu.drafter import ReplayedDrafter
from benchmarks.gpu.host import measure_host
from benchmarks.gpu.job import GpuJob
from benchmarks.gpu.kernels import Kernel, measure_kernels, rows_of
from benchmarks.gpu.process import INTERRUPTED, run_in_process
from benchmarks.gpu.report import compare
from benchmarks.gpu.run import GROUPS, STAGES, GpuPlan, run_stages
from benchmarks.gpu.shapes import SHAPES, KnownModel, make_model, random_prompt
from benchmarks.gpu.stage import NO_TIME, Stage
from benchmarks.gpu.steps import measure_steps
from benchmarks.gpu.used import NO_GRAPHS
from benchmarks.process import last_words
from lade.bench.baselines import plain
from lade.compat import is_compiled_by_generate
from lade.errors import EagerExecutionWarning, LadeError, PlainDecodingWarning
from lade.stats import Step
from tests.lade.recorder import CpuRecorder, RecordingPolicy

TINY = SHAPES["tiny"]
CPU = torch.device("cpu")
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of …"


@pytest.fixture(scope="module")
def known() -> KnownModel:
    return make_model(TINY, CPU)


def run(*args: str) -> Any:
    command = ["gpu", *args]
    return CliRunner().invoke(app, command, catch_exceptions=False, env={"COLUMNS": "150"})


@pytest.fixture(autouse=True)
def _short_texts_and_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.answers.MAX_ROUNDS", 1)
    monkeypatch.setattr("benchmarks.gpu.steps._MIN_ROUNDS", 3)
    monkeypatch.setattr("benchmarks.gpu.steps._MAX_ROUNDS", 4)
    monkeypatch.setattr("benchmarks.gpu.host._NUM_NEW", 60)
    monkeypatch.setattr("benchmarks.gpu.host._NUM_HELD", 20_000)


def run_tiny(*args: str) -> Any:
    return run("--device", "cpu", "--shapes", "tiny", *args)


def stage_for(name: str, ends_at: float = float("inf")) -> Stage:
    return Stage(name, "tiny", ends_at, lambda stage: None)


def ends_with_the_first_part(name: str) -> Stage:
    """Return a stage whose time is up once the first part has begun."""

    def tell(stage: Stage) -> None:
        stage.ends_at = 0.0

    return Stage(name, "tiny", perf_counter() + 3600, tell)


def stages_in(path: Path) -> dict[str, dict[str, Any]]:
    return {stage["stage"]: stage for stage in json.loads(path.read_text())["stages"]}


# --- the host ---------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_the_host_drafts_accepts_and_puts_off_with_a_model_that_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.gpu.host._NUM_NODES", (4, 64))
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


# --- attention --------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_attention_of_new_shapes_is_timed_and_held_against_an_exact_one() -> None:
    stage = stage_for("attention")
    measure_attention(CPU, stage)
    assert [(row["dtype"], row["attention"]) for row in stage.rows] == [
        (dtype, name)
        for dtype in ("bfloat16", "float16")
        for name in ("sdpa", "sdpa without cuDNN", "lade")
    ]
    for row in stage.rows:
        assert 0 < row["same_shape_sec"] < 1
        assert 0 < row["new_shape_sec"] <= row["longest_sec"]
        assert 0 < row["largest_difference"] < {"bfloat16": 1.6e-2, "float16": 2e-3}[row["dtype"]]


@pytest.mark.exhaustive
def test_no_two_answers_have_prompts_of_one_length(
    known: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what is built for each shape would not show."""
    monkeypatch.setattr("benchmarks.gpu.answers.MAX_ROUNDS", 3)
    lengths: list[int] = []

    def note(model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> Any:
        lengths.append(inputs["input_ids"].shape[1])
        return plain(model, inputs, options)

    monkeypatch.setattr("benchmarks.gpu.answers._static", note)
    stage = stage_for("static")
    measure_answers(known, TINY, "static", Replayed([1, 2], 8), stage)
    assert stage.rows[0]["share_of_known_text"] == 1.0
    first, again, *measured = lengths
    assert first == again
    assert len({first, *measured}) == 1 + len(measured) == 7


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


# --- stages ---------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_steps_of_every_size_are_timed_at_every_context(known: KnownModel) -> None:
    stage = stage_for("steps")
    measure_steps(known, TINY, 1e9, stage)
    check_steps(stage.as_json(), 1e9, known.weight_bytes)
    # What is measured on a GPU is recorded; a CPU has nothing to record with.
    assert {row["execution"] for row in stage.rows} == {"fixed"}
    assert {row["why_not_recorded"] for row in stage.rows} == {NO_GRAPHS}
    assert {row["attention"] for row in stage.rows} == {"lade_packed_sdpa"}
    assert {row["share_replayed"] for row in stage.rows} == {0}
    assert {row["recording_bytes"] for row in stage.rows} == {0}


def check_steps(stage: dict[str, Any], bytes_per_sec: float, weight_bytes: int) -> None:
    rows = stage["rows"]
    sizes = [1, 2, 4, 8, 16, 32, 64, 128]
    assert [(row["context"], row["num_nodes"]) for row in rows] == [
        (context, size) for context in (64, 128) for size in sizes
    ]
    assert stage["left_out"] == {"context 1024": "the model has 512 positions"}
    for row in rows:
        assert 0 < row["host_sec"] <= row["sec"] <= row["busy_sec"] < 1
        assert row["least_sec"] <= row["sec"]
        assert row["num_repeats"] >= 3
        cached = row["mean_num_cached"]
        if row["context"] == 128:  # half of the steps lie before it and half of them behind
            assert cached == pytest.approx(128, abs=20)
        read = weight_bytes + 256 * (cached + row["num_nodes"])
        assert row["read_bytes"] == pytest.approx(read, rel=1e-4)
        share = row["read_bytes"] / row["sec"] / bytes_per_sec
        assert row["share_of_copy_bandwidth"] == pytest.approx(share, rel=1e-3)
        one = next(r for r in rows if r["context"] == row["context"] and r["num_nodes"] == 1)
        assert row["ratio_to_one_node"] == pytest.approx(row["sec"] / one["sec"], rel=1e-3)


@pytest.mark.parametrize("fails", [False, True])
def test_recorded_steps_are_told_from_others(fails: bool) -> None:
    """Where the second of three sizes cannot be recorded, the first one's recording goes, too."""
    recorder = CpuRecorder(failures=[None, RuntimeError("no capture")] if fails else [])
    stage = stage_for("steps")
    # The second one runs in the memory of the first, as all contexts do on a GPU.
    shape = replace(TINY, contexts=(284, 96), tree_sizes=(1, 4, 8))
    measure_steps(make_model(TINY, CPU), shape, None, stage, RecordingPolicy(recorder))
    assert [row["execution"] for row in stage.rows] == ["fixed" if fails else "graphs"] * 6
    assert [row["share_replayed"] for row in stage.rows] == [0 if fails else 1] * 6
    reason = "a step cannot be recorded (RuntimeError: no capture)" if fails else None
    assert [row["why_not_recorded"] for row in stage.rows] == [reason] * 6
    assert stage.rows[-1]["num_kept"] == (0 if fails else recorder.num_recorded)
    if not fails:
        # The recorder counts a byte for each; root and first children share a width.
        assert sum(row["recording_bytes"] for row in stage.rows) == recorder.num_recorded > 1
        assert all((row["recording_sec"] > 0) == row["recording_bytes"] for row in stage.rows)


def test_a_crash_while_a_size_is_recorded_keeps_what_is_known_of_the_others() -> None:
    class CrashError(BaseException):
        pass

    class CrashingRecorder(CpuRecorder):
        def record(self, run: Any) -> Any:
            if self.num_recorded == 2:
                raise CrashError
            return super().record(run)

    stage = stage_for("steps")
    shape = replace(TINY, contexts=(96,), tree_sizes=(1, 4, 8))
    policy = RecordingPolicy(CrashingRecorder())
    with pytest.raises(CrashError):
        measure_steps(make_model(TINY, CPU), shape, None, stage, policy)
    assert [(row["num_nodes"], row["num_repeats"]) for row in stage.rows] == [(1, 1), (4, 1)]
    assert {row["execution"] for row in stage.rows} == {"graphs"}
    assert stage.doing == "steps tiny: context 96, 8 nodes"


@pytest.mark.exhaustive
def test_methods_answer_one_after_the_other_and_say_what_they_used(known: KnownModel) -> None:
    stage = stage_for("graphs")
    names = ("plain", "installed", "static", "eager", "graphs")
    counts = counts_for(TINY.max_new_tokens)
    for name in names:
        measure_answers(known, TINY, name, Replayed(counts, 32), stage)
    compare([stage])
    rows = {row["method"]: row for row in stage.rows}
    assert list(rows) == list(names)
    for row in rows.values():
        check_answers(row)
        for other in ("plain", "static"):
            speedup = rows[other]["sec"] / row["sec"]
            assert row[f"speedup_over_{other}"] == pytest.approx(speedup)
    for name in ("eager", "graphs"):
        assert rows[name]["mean_accepted_tokens"] == pytest.approx(MAT, rel=0.1)
        assert rows[name]["draft_tokens_per_step"] > 25  # 31, but for the ends of answers
    assert "mean_accepted_tokens" not in rows["plain"]
    executions = {name: row["execution"] for name, row in rows.items()}
    # On a CPU, transformers does not compile, and there is nothing to record with.
    assert executions == {**dict.fromkeys(names, "eager"), "graphs": "fixed"}
    assert rows["graphs"]["why_not_recorded"] == NO_GRAPHS
    assert rows["plain"]["attention"] == "sdpa"


def check_answers(row: dict[str, Any]) -> None:
    assert row["share_of_known_text"] == 1.0
    assert 2 <= row["num_repeats"] <= 6
    assert row["num_tokens"] == 64 * row["num_rows"]
    assert row["tokens_per_sec"] == pytest.approx(row["num_tokens"] / row["sec"], rel=1e-3)
    assert 0 < row["prefill_sec"] < row["sec"]
    assert row["warm_up_sec"] > 0


@pytest.mark.exhaustive
def test_answers_of_recorded_steps_count_what_was_recorded() -> None:
    known, recorder = make_model(TINY, CPU), CpuRecorder()
    stage = stage_for("sampled")
    policy = RecordingPolicy(recorder)
    measure_answers(known, TINY, "graphs", Replayed([1, 2], 8), stage, SAMPLED, policy)
    (row,) = stage.rows
    assert (row["execution"], row["why_not_recorded"]) == ("graphs", None)
    assert row["decoding"] == "sampling at temperature 0.7, top-p 0.9"
    # By so wide a margin that sampling seldom finds another; weights are others by transformers.
    assert row["share_of_known_text"] >= 0.5
    assert row["num_recorded"] == recorder.num_recorded > 0
    assert row["num_replayed"] == recorder.num_replayed > row["num_steps"]
    assert row["recording_sec"] > 0
    assert row["recording_bytes"] == recorder.num_recorded


@pytest.mark.exhaustive
def test_batches_are_held_against_plain_ones_of_the_same_size(known: KnownModel) -> None:
    stage, recorder = stage_for("batches"), CpuRecorder()
    policy = RecordingPolicy(recorder)
    measure_side_by_side(known, TINY, Replayed([0, 3, 1], 8), stage, policy=policy, nums_rows=(2,))
    compare([stage])
    sizes = [(row["method"], row["num_rows"]) for row in stage.rows]
    assert sizes == [("plain", 2), ("graphs", 2)]
    plain, graphs = stage.rows
    check_answers(plain)
    check_answers(graphs)
    assert graphs["execution"] == "graphs"
    assert graphs["mean_accepted_tokens"] == pytest.approx(1 + 4 / 3, rel=0.1)  # of each row
    assert graphs["speedup_over_plain"] == pytest.approx(plain["sec"] / graphs["sec"])
    assert graphs["speedup_over_static"] is None


@pytest.mark.parametrize("records", [False, True])
def test_kernels_of_a_step_add_up(known: KnownModel, records: bool) -> None:
    stage = stage_for("kernels")
    policy = RecordingPolicy(CpuRecorder()) if records else None
    measure_kernels(known, TINY, stage, policy)
    for size in (1, 32):
        rows = {row["what"]: row for row in stage.rows if row["num_nodes"] == size}
        *parts, gaps, everything = (row for row in rows.values() if not row["is_kernel"])
        assert (gaps["what"], everything["what"]) == ("gaps", "all")
        # One after the other, on a CPU.
        assert sum(row["sec"] for row in (*parts, gaps)) == pytest.approx(everything["sec"])
        assert sum(row["num_kernels"] for row in parts) == everything["num_kernels"] > 50
        assert everything["share"] == 1.0
        assert rows["products"]["num_kernels"] >= 2 * 7 + 1  # of two layers, and the logits
        assert rows["attention"]["num_kernels"] >= (2 if records else 0)
        assert {row["execution"] for row in rows.values()} == {"graphs" if records else "fixed"}
        longest = [row["sec"] for row in rows.values() if row["is_kernel"]]
        assert len(longest) == 8
        assert longest == sorted(longest, reverse=True)


def test_kernels_are_told_apart_by_their_names() -> None:
    names = (
        *("nvjet_tst_64x8_64x16_2x1_v_bz_TNT", "gemvx::kernel<int, int>", "_attend_to_split"),
        *("_rms_norm", "Memcpy HtoD (Pinned -> Device)", "vectorized_elementwise_kernel"),
        *("ampere_bf16_s16816gemm_bf16_64x64", "cutlass_80_wmma", "flash_fwd_splitkv_kernel"),
    )
    # Of 2 s each, begun every 1.5 s and overlapping, but for a gap of 3 s before the last.
    kernels = [Kernel(name, 1.5 * i, 1.5 * i + 2) for i, name in enumerate(names)]
    kernels[-1] = kernels[-1]._replace(start=15.5, end=17.5)
    rows = {row["what"]: row for row in rows_of(kernels)}
    assert [rows[name]["num_kernels"] for name in ("products", "attention", "copies")] == [4, 2, 1]
    assert rows["other operations"]["num_kernels"] == 2
    assert rows["products"]["sec"] == pytest.approx(8)
    assert rows["all"]["sec"] == pytest.approx(17.5)
    assert rows["gaps"]["sec"] == pytest.approx(3)
    assert rows["gaps"]["share"] == pytest.approx(3 / 17.5)
    assert [row["share"] for row in rows_of([])] == [None] * 6


def test_memory_is_that_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def note(name: str) -> int:
        done.append(name)
        return 7

    for name in ("empty_cache", "reset_peak_memory_stats", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: note(name))
    forget_peak(CPU)
    assert peak_bytes(CPU) is None
    assert done == []
    forget_peak(torch.device("cuda"))
    assert peak_bytes(torch.device("cuda")) == 7
    assert done == ["empty_cache", "reset_peak_memory_stats", "max_memory_reserved"]


@pytest.mark.exhaustive
def test_a_chat_counts_what_each_turn_records() -> None:
    known, recorder = make_model(TINY, CPU), CpuRecorder()
    stage = stage_for("chat")
    measure_chat(known, TINY, [1, 2], 8, stage, RecordingPolicy(recorder))
    assert [row["turn"] for row in stage.rows] == [*range(1, 11)]
    assert [row["prompt_length"] for row in stage.rows] == [40 + 32 * turn for turn in range(10)]
    assert all(row["is_known_text"] for row in stage.rows)
    assert sum(row["num_recorded"] for row in stage.rows) == recorder.num_recorded > 0
    # A CPU takes no room for texts to come: when the text has grown out of it, recordings go.
    lost = [row["num_lost"] for row in stage.rows]
    assert lost == sorted(lost)
    assert lost[0] == 0 < lost[-1] == recorder.num_recorded - stage.rows[-1]["num_kept"]
    for row in stage.rows:
        assert row["execution"] == ("graphs" if row["num_replayed"] else "fixed")
        assert row["workspace_bytes"] > 0


def test_a_model_that_decodes_plainly_is_told_with_the_reason(
    known: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no target")

    monkeypatch.setattr("lade.hf.generation.make_target", fail)
    stage = stage_for("eager")
    with pytest.warns(PlainDecodingWarning):
        measure_answers(known, TINY, "eager", Replayed([1, 2], 8), stage)
    (row,) = stage.rows
    assert (row["verification"], row["execution"]) == ("plain", "plain")
    assert row["why_not_recorded"] == "tree: RuntimeError: no target"
    assert row["share_of_known_text"] == 1.0


def test_whatever_ends_a_stage_early_is_told(tmp_path: Path) -> None:
    def fail(stage: Stage) -> None:
        raise RuntimeError(f"broken\nin {tmp_path}")

    def no_memory(stage: Stage) -> None:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    failed = stage_for("graphs").run(fail)
    assert failed.failure == "RuntimeError: broken"
    assert str(tmp_path) in failed.traceback  # printed, not saved
    assert str(tmp_path) not in json.dumps(failed.as_json())
    why = "CUDA out of memory. Tried to allocate 20.00 MiB"
    assert stage_for("graphs").run(no_memory).left_out == {"the rest": why}
    assert stage_for("graphs", ends_at=0.0).run(fail).left_out == {"all": NO_TIME}


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

    monkeypatch.setattr("benchmarks.gpu.answers._static", fail)
    stage = stage_for("static")
    measure_answers(known, TINY, "static", Replayed([1, 2], 8), stage)
    assert stage.left_out == {"static": "RuntimeError: no compiler"}
    assert stage.rows == []


def test_a_cache_that_generate_compiles_is_told(
    known: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attribute is the one that transformers keeps what it compiled in."""
    assert not is_compiled_by_generate(known.model)
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)
    model = make_model(TINY, CPU).model
    model.get_compiled_call(None)
    assert is_compiled_by_generate(model)


def test_parts_begin_only_while_there_is_time(known: KnownModel) -> None:
    stage = ends_with_the_first_part("steps")
    measure_steps(known, replace(TINY, contexts=(64, 128)), 1e9, stage)
    assert {row["context"] for row in stage.rows} == {64}
    assert {row["num_repeats"] for row in stage.rows} == {3}  # the least that means something
    assert stage.left_out == {"context 128": NO_TIME}


def test_methods_there_is_no_time_for_are_left_out_and_the_others_answer_every_prompt(
    known: KnownModel,
) -> None:
    stage = ends_with_the_first_part("sampled")
    measure_side_by_side(known, TINY, Replayed([1, 2], 8), stage)
    assert stage.left_out == {"warming graphs up": NO_TIME}
    (row,) = stage.rows
    assert (row["method"], row["num_repeats"]) == ("plain", 2)


def test_turns_there_is_no_time_for_are_left_out(known: KnownModel) -> None:
    stage = ends_with_the_first_part("chat")
    measure_chat(known, TINY, [1, 2], 8, stage)
    assert [row["turn"] for row in stage.rows] == [1]
    assert stage.left_out == {"turn 2": NO_TIME}


# --- processes ------------------------------------------------------------------------------

# Tells one row, as `work.py` does, and then goes on as each test says.
TELLING = """
import json, os, signal, sys, time
job = json.loads(sys.stdin.readline())
def tell(*rows, failure=None):
    message = dict(model={}, rows=rows, left_out={}, warnings=[], failure=failure)
    print(json.dumps({**message, "doing": "its work", "traceback": ""}), flush=True)
tell({"stage": job["stage"]})
"""
DONE_LINE = "print(json.dumps({'done': True}), flush=True)\n"


def run_child(
    program: str, kill_after: float = 30.0, tell: Callable[[Stage], None] = lambda stage: None
) -> Stage:
    stage = Stage("steps", "tiny", perf_counter() + 1, tell)
    job = GpuJob("steps", "cpu", 1.0, TINY)
    command = [sys.executable, "-S", "-c", TELLING + program]
    run_in_process(stage, job, perf_counter() + kill_after, command)
    return stage


def test_a_process_that_ends_in_order_has_no_failure() -> None:
    stage = run_child("tell({'a': 1}, {'b': 2})\n" + DONE_LINE)
    assert stage.rows == [{"a": 1}, {"b": 2}]
    assert (stage.failure, stage.last_words, stage.traceback) == (None, [], "")


def test_a_crash_is_the_failure_of_its_stage_and_keeps_what_it_found() -> None:
    said = "print('noise\\n/usr/lib/x y.py: CUDA error: /opt/driver.so', file=sys.stderr)\n"
    stage = run_child(said + "sys.stderr.flush(); os.kill(os.getpid(), signal.SIGSEGV)")
    assert stage.rows == [{"stage": "steps"}]
    assert stage.failure is not None
    assert re.fullmatch(
        r"its process was ended by signal 11 \(SIGSEGV\) after \d+ s, in 'its work'", stage.failure
    )
    assert stage.last_words == ["noise", "x y.py: CUDA error: driver.so"]
    assert "/opt/driver.so" in stage.traceback  # printed, not saved
    assert "/opt" not in json.dumps(stage.as_json())


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        ("sys.exit(3)", "ended with status 3"),
        ("", "ended too early"),
        (DONE_LINE + "os._exit(5)", "ended with status 5"),  # as its context is torn down
        ("time.sleep(60)", "was killed past its time"),
    ],
)
def test_every_ending_but_the_right_one_is_a_failure(program: str, failure: str) -> None:
    stage = run_child(program, kill_after=1.0)
    assert stage.failure is not None
    assert stage.failure.startswith(f"its process {failure} after ")
    assert stage.rows == [{"stage": "steps"}]


def test_a_failure_that_a_process_tells_itself_is_kept_when_it_crashes_then() -> None:
    stage = run_child("tell(failure='AcceleratorError: illegal access')\nos.abort()")
    assert stage.failure == "AcceleratorError: illegal access"


def test_a_process_that_is_done_and_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.process._GRACE_SEC", 0.3)
    stage = run_child(DONE_LINE + "time.sleep(60)")
    assert stage.failure is None
    assert stage.sec < 10


def test_children_of_a_process_end_with_it() -> None:
    program = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        "tell({'pid': child.pid})\n" + DONE_LINE
    )
    (row,) = run_child(program).rows
    assert has_ended(row["pid"])


def has_ended(pid: int) -> bool:
    for _ in range(50):
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True
        if status.rpartition(")")[2].split()[0] == "Z":  # nobody waits for it
            return True
        time.sleep(0.1)
    return False


def test_an_interruption_ends_the_process_and_keeps_what_it_found() -> None:
    stages: list[Stage] = []

    def interrupt(stage: Stage) -> None:
        if not stages and "pid" in stage.rows[0]:
            stages.append(stage)
            raise KeyboardInterrupt

    program = "tell({'pid': os.getpid()})\ntime.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        run_child(program, tell=interrupt)
    (stage,) = stages
    assert has_ended(stage.rows[0]["pid"])
    assert stage.left_out == {"the rest": INTERRUPTED}
    assert stage.failure is None


def test_a_process_ends_when_the_one_that_started_it_is_gone() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.work"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(GpuJob("host", "cpu", 60.0).as_message()) + "\n")
    process.stdin.close()
    assert process.wait(30) == -signal.SIGKILL


def test_warnings_of_lade_are_findings_and_others_are_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed: list[str] = []
    usual = lambda message, *rest: printed.append(str(message))  # noqa: E731
    monkeypatch.setattr(warnings, "showwarning", usual)
    stage = stage_for("graphs")
    work._note_warnings(stage)
    show: Any = warnings.showwarning
    for _ in range(2):
        show(EagerExecutionWarning("not recorded"), EagerExecutionWarning, "elsewhere.py", 1)
        show(UserWarning("no table"), UserWarning, str(Path(lade.__file__).parent / "x.py"), 1)
        show(UserWarning("deprecated"), UserWarning, "torch.py", 1)
    assert stage.warnings == ["not recorded", "no table"]
    assert printed == ["deprecated"] * 2


def test_last_words_are_where_python_was() -> None:
    frames = "\n".join(f'  File "/home/me/lade/{name}.py", line 3 in run' for name in "abcdefgh")
    said = f"noise\nFatal Python error: Aborted\n\n{frames}\nExtension modules: numpy (total: 1)\n"
    assert last_words(said)[:2] == ["Fatal Python error: Aborted", 'File "a.py", line 3 in run']
    assert len(last_words(said)) == 6
    assert last_words("a 1/2 b\nlade/x.py\nat C:\\Users\\me\\y.py") == [
        *("a 1/2 b", "lade/x.py", "at y.py")
    ]
    assert last_words("") == []


# --- the command ----------------------------------------------------------------------------


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run stages as their processes would, but here."""

    def run(stage: Stage, job: GpuJob, kill_at: float) -> None:
        received = GpuJob.from_message(json.loads(json.dumps(job.as_message())))
        done = Stage(job.stage, job.shape_name, stage.ends_at, lambda stage: None)
        done.run(lambda stage: work.work(received, stage))
        stage.hear(json.loads(json.dumps(done.as_message())))

    monkeypatch.setattr("benchmarks.gpu.run.run_in_process", run)


SOME = "bandwidth,plain,steps,graphs,sampled"


@pytest.mark.usefixtures("in_this_process")
def test_stages_run_and_are_written(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    result = run_tiny("--json", str(path), "--stages", SOME)
    assert result.exit_code == 0
    for words in (
        "Copy bandwidth",
        "Steps, tiny",
        "Whole answers, tiny, all methods",
        "not run: context 1024",
        "not recorded: this device has no CUDA graphs",
    ):
        assert words in result.stdout
    content = json.loads(path.read_text())
    assert str(tmp_path) not in path.read_text()
    assert content["settings"]["complete"] is True
    assert content["settings"]["mat"] == 3.08
    assert content["environment"]["torch"] == metadata.version("torch")
    stages = stages_in(path)
    assert ",".join(stages) == SOME
    assert all(stage["failure"] is None for stage in stages.values())
    (copied,) = stages["bandwidth"]["rows"]
    assert copied["bytes_per_sec"] == pytest.approx(
        2 * copied["copied_bytes"] / copied["sec"], 1e-4
    )
    assert 1e8 < copied["bytes_per_sec"] < 1e13
    check_steps(
        stages["steps"], copied["bytes_per_sec"], stages["steps"]["model"]["weight_bytes_of_step"]
    )
    (plain,) = stages["plain"]["rows"]
    for name in ("plain", "graphs"):
        (row,) = stages[name]["rows"]
        check_answers(row)
        assert row["speedup_over_plain"] == pytest.approx(plain["sec"] / row["sec"], rel=1e-3)
    assert [row["method"] for row in stages["sampled"]["rows"]] == ["plain", "graphs"]


@pytest.mark.exhaustive
def test_stages_run_in_processes_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert run_tiny("--json", str(path), "--stages", "plain").exit_code == 0
    (stage,) = stages_in(path).values()
    assert stage["rows"]
    assert stage["failure"] is None
    assert stage["model"]["num_parameters"] > 0


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler
@pytest.mark.usefixtures("in_this_process")
def test_all_stages_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of torch's compiler but its last part, which makes machine code for two minutes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    path = tmp_path / "gpu.json"
    assert run_tiny("--json", str(path)).exit_code == 0
    stages = stages_in(path)
    assert [*stages] == list(STAGES)
    for name, stage in stages.items():
        assert stage["failure"] is None
        assert stage["rows"]
        assert name in GROUPS[0] or stage["model"]["num_parameters"] > 0
    assert stages["eager"]["rows"][0]["speedup_over_static"] is not None
    assert [row["num_rows"] for row in stages["batches"]["rows"]] == [4, 4, 8, 8]
    assert {row["num_nodes"] for row in stages["kernels"]["rows"]} == {1, 32}
    assert len(stages["chat"]["rows"]) == 10
    (row,) = stages["compiled"]["rows"]
    check_answers(row)
    assert row["execution"] == "compiled"


def test_a_stage_that_fails_loses_nothing_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpu.json"

    def run(stage: Stage, job: GpuJob, kill_at: float) -> None:
        if stage.name == "eager":
            assert stages_in(path)["graphs"]  # written before this stage began
            stage.traceback, stage.failure = f"in {tmp_path}", "RuntimeError: broken"

    monkeypatch.setattr("benchmarks.gpu.run.run_in_process", run)
    with pytest.raises(LadeError, match="1 failed: eager tiny: RuntimeError: broken"):
        run_tiny("--json", str(path))
    stages = stages_in(path)
    assert [*stages] == list(STAGES)
    assert stages["eager"]["failure"] == "RuntimeError: broken"
    assert str(tmp_path) not in path.read_text()


def test_an_interruption_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpu.json"

    def run(stage: Stage, job: GpuJob, kill_at: float) -> None:
        stage.add(
            {
                "method": "plain",
                "execution": "eager",
                "decoding": "greedy",
                "num_rows": 1,
                "sec": 1.0,
            }
        )
        if stage.name == "graphs":
            raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.gpu.run.run_in_process", run)
    result = run_tiny("--json", str(path), "--stages", "plain,graphs,eager")
    assert result.exit_code != 0
    assert "Whole answers, lade, drafts replayed, tiny" in result.stdout
    stages = stages_in(path)
    assert [*stages] == ["plain", "graphs"]
    assert stages["graphs"]["rows"]  # as far as it came
    assert json.loads(path.read_text())["settings"]["complete"] is False


def test_without_time_every_stage_is_left_out_and_said(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert run_tiny("--minutes", "0", "--json", str(path)).exit_code == 0
    for stage in stages_in(path).values():
        assert stage["rows"] == []
        assert stage["left_out"] == {"all": NO_TIME}


def test_what_matters_most_comes_first_and_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, begun = 100.0, []

    def run(stage: Stage, job: GpuJob, kill_at: float) -> None:
        """Take all the time there is."""
        nonlocal now
        begun.append((stage.title, job.bytes_per_sec))
        assert kill_at == pytest.approx(now + job.sec + 12)
        now += job.sec
        if stage.name == "bandwidth":
            stage.add({"bytes_per_sec": 7e9})

    monkeypatch.setattr("benchmarks.gpu.run.run_in_process", run)
    monkeypatch.setattr("benchmarks.gpu.run.perf_counter", lambda: now)
    shapes = [SHAPES["8b"], SHAPES["1b"]]
    plan = GpuPlan(CPU, shapes, 7.5)
    stages: list[Stage] = []
    done = [stage.title for stage in run_stages(plan, stages, lambda stage: None)]
    assert done == [stage.title for stage in stages]
    assert [title for title, _ in begun[:4]] == [*GROUPS[0], "plain 8b"]
    assert [given for _, given in begun] == [None, *[7e9] * (len(begun) - 1)]
    assert done[3:11] == [f"{name} {of}" for of in ("8b", "1b") for name in GROUPS[1]]
    assert now == pytest.approx(100 + 7.5 * 60, abs=10)
    assert all(stage.left_out == {"all": NO_TIME} for stage in stages[-1:])


# --- refusals ---------------------------------------------------------------------------------


def test_without_a_gpu_the_command_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"expected a CUDA device, got none .*--shapes tiny"):
        run()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cpu"], "expected --shapes 1b_short or tiny with --device cpu"),
        (["--device", "meta", "--shapes", "tiny"], "expected a CUDA device or cpu, got 'meta'"),
        (["--shapes", "70b"], "expected different ones of 1b, 8b, 1b_short, tiny, got '70b'"),
        (["--shapes", "tiny,tiny"], "expected different ones"),
        (["--shapes", ","], "expected different ones"),
        (["--stages", "speed"], "expected different ones of bandwidth, attention, host"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(*options)


def test_a_cuda_device_is_chosen_without_touching_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    shapes = [SHAPES["8b"]]
    for name, index in ((None, 0), ("cuda", 0), ("cuda:1", 1)):
        assert choose_device(name, shapes) == torch.device("cuda", index)
    with pytest.raises(ValueError, match="expected one of 2 CUDA devices, got 'cuda:2'"):
        choose_device("cuda:2", shapes)
    with pytest.raises(ValueError, match="expected a CUDA device or cpu, got 'gpu'"):
        choose_device("gpu", shapes)


def test_counts_of_an_answer_have_the_recorded_mean() -> None:
    assert pytest.approx(3.08, abs=0.005) == MAT
    for num_new_tokens in (64, 256, 1024):
        counts = counts_for(num_new_tokens)
        assert 1 + sum(counts) / len(counts) == pytest.approx(MAT, rel=0.07)
        assert counts != sorted(counts)
        assert counts == counts_for(num_new_tokens)
