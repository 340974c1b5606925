"""`python -m benchmarks`, from help texts to result files, on a tiny local model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from benchmarks import cpu_engines, forwards, memory, methods, pool
from benchmarks.__main__ import app, main
from benchmarks.gguf_engines import write_gguf
from benchmarks.memory import Peak
from benchmarks.traces import read_traces
from lade.bench.baselines import Answer, MethodInfo, plain
from lade.cli.results import ResultFiles
from lade.models.loading import LoadedModel, load
from ngram_pool import NGramPool
from tests.lade.tiny import tiny_model


def run(*args: Any) -> Any:
    wide = {"COLUMNS": "150"}
    return CliRunner().invoke(app, [*map(str, args)], catch_exceptions=False, env=wide)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("abcabc\nxyxyxy\nhello\n")
    return path


@pytest.fixture
def options(folder: str, prompts: Path) -> list[Any]:
    options = ["--prompts", prompts, "--model", folder, "--dtype", "float32"]
    return [*options, "--max-new-tokens", 8]


def test_every_command_has_help() -> None:
    names = [command.name for command in app.registered_commands]
    assert len(names) == 18
    for name in names:
        assert "Usage" in run(name, "--help").stdout


def test_what_is_wrong_with_an_option_is_told_in_one_line(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["benchmarks", "arena", "--prompts", str(prompts), "--methods", "wrong"]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: expected different ones of lade, ")
    assert said.count("\n") == 1


@pytest.mark.exhaustive
def test_methods_are_compared_in_several_passes(options: list[Any], tmp_path: Path) -> None:
    path, markdown = tmp_path / "result.json", tmp_path / "result.md"
    names = ["plain", "prompt_lookup", "lade_tree", "lade_rows", "rival_sam"]
    files = ["--json", path, "--markdown", markdown, "--plot", tmp_path / "plots"]
    run("run", *options, "--methods", ",".join(names), "--passes", 2, "--limit", 2, *files)
    content = json.loads(path.read_text())
    settings = content["settings"]
    assert (settings["prompts"]["name"], settings["prompts"]["num"]) == ("prompts.txt", 2)
    assert list(settings["methods"]) == names
    assert settings["methods"]["lade_rows"] == "as lade, drafts verified by rows"
    assert (settings["interrupted"], settings["left_out"]) == (False, {})
    for of_methods in content["summary"].values():
        for entry in of_methods.values():
            assert entry["share_repeated"] == 1.0
            assert len(entry["speedup_of_each_pass"]) == 2
    assert len(content["prompts"]) == 4
    for entry in content["prompts"]:
        assert all(entry[name]["same_text"] for name in names[1:])
    assert "| rival_sam |" in markdown.read_text()
    assert (tmp_path / "plots" / "speedup.svg").exists()


def test_samples_and_batches_leave_out_what_has_one_row(options: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    options += ["--temperature", 0.8, "--top-p", 0.95, "--seed", 7, "--verification", "chain"]
    options += ["--batch-size", 2, "--num-return-sequences", 2, "--json", path]
    result = run("run", *options)
    assert "Sampling at temperature 0.8, top-p 0.95, batches of 2, 2 sequences a" in result.stdout
    assert "prompt_lookup is left out: transformers runs it on one prompt" in result.stdout
    assert "verification: chain" in result.stdout
    content = json.loads(path.read_text())
    names = ["no_drafts", "lade", "lade_fresh"]
    assert list(content["settings"]["methods"]) == ["plain", *names]
    assert [entry["plain"]["num_rows"] for entry in content["prompts"]] == [4, 2]
    for entry in content["prompts"]:
        assert all(entry[name]["same_text"] for name in names)


def test_pools_are_learned_saved_and_read(options: list[Any], tmp_path: Path) -> None:
    mine, more, path = tmp_path / "mine.pool", tmp_path / "more.pool", tmp_path / "result.json"
    options += ["--max-new-tokens", 24, "--max-draft-tokens", 4, "--limit", 2]
    run("run", *options, "--methods", "lade", "--save-pool", mine)
    assert len(NGramPool.load(mine)) == 2 * 30
    run("run", *options, "--pool", mine, "--json", path)
    content = json.loads(path.read_text())
    assert content["settings"]["pools"] == {"names": ["mine.pool"], "num_tokens": 60}
    for of_methods in content["summary"].values():
        for name in ("lade", "lade_fresh"):
            with_pool = of_methods[name.replace("lade", "lade_pool")]["mean_accepted_tokens"]
            assert with_pool > of_methods[name]["mean_accepted_tokens"]
    run("run", *options, "--methods", "lade_pool", "--pool", mine, "--save-pool", more)
    assert len(NGramPool.load(more)) == len(NGramPool.load(mine)) == 60
    with pytest.raises(ValueError, match="expected lade or lade_pool in --methods with --save-po"):
        run("run", *options, "--methods", "lade_fresh", "--save-pool", mine)


def test_draft_models_are_compared_and_held_against_the_formula(
    options: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    names = "plain,pool,assistant,first_layers,pool+assistant,hf_assistant,hf_early_exit"
    options += ["--methods", names, "--json", path, "--limit", 1]
    result = run("run", *options, "--assistant", "self:int8", "--first-layers", 1)
    assert "Sources of drafts" in result.stdout
    content = json.loads(path.read_text())
    assert content["settings"]["assistant"] == "self:int8"
    assert content["settings"]["first_layers"] == 1
    for entry in content["prompts"]:
        assert all(entry[name]["same_text"] for name in names.split(",")[1:])
    assert "The formula against a real run" in run("formula", path).stdout


def test_what_was_measured_before_an_interruption_is_kept(
    options: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def interrupting(model: Any, inputs: Any, options: Any) -> Answer:
        calls.append(1)
        if len(calls) == 5:  # the first one warms up
            raise KeyboardInterrupt
        return plain(model, inputs, options)

    info = MethodInfo(lambda given: interrupting, "interrupting")
    monkeypatch.setitem(methods.METHODS, "plain", info)
    path = tmp_path / "result.json"
    options += ["--methods", "plain", "--passes", "3", "--limit", 2, "--json", path]
    result = run("run", *options)
    assert result.exit_code == 130
    assert "stopped after 3 of 6" in result.stderr
    content = json.loads(path.read_text())
    assert len(content["prompts"]) == 2  # an unfinished second pass is left out
    assert content["settings"]["interrupted"] is True


@pytest.mark.exhaustive
def test_the_arena_writes_its_points(options: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "arena.json"
    options += ["--methods", "lade,rival_sam", "--max-draft-tokens", "4", "--limit", 1]
    run("arena", *options, "--json", path, "--plot", tmp_path)
    content = json.loads(path.read_text())
    assert {run["method"] for run in content["runs"]} == {"lade", "rival_sam"}
    assert content["prompts"][0]["num_steps"]["lade"]["4"] <= 7
    assert (tmp_path / "arena.png").exists()
    with pytest.raises(ValueError, match="expected different ones of lade, lade_untabled"):
        run("arena", *options, "--methods", "plain")


def test_answers_are_recorded_and_replayed(options: list[Any], tmp_path: Path) -> None:
    traces, path, markdown = (tmp_path / name for name in ("traces", "replay.json", "replay.md"))
    result = run("record", *options, "--out", traces, "--limit", 2)
    assert "2 answers, 16 tokens" in result.stderr
    files = ["--json", path, "--markdown", markdown, "--plot", tmp_path]
    asked = ["--max-draft-tokens", "4,8", "--passes", 2, "--methods", "lade,lade_fresh"]
    assert "lade, pass 2" in run("replay", traces, *asked, *files).stdout
    assert "| lade, pass 2 | 8 |" in markdown.read_text()
    assert (tmp_path / "mat.svg").exists()
    content = json.loads(path.read_text())
    assert content["settings"]["traces"]["name"] == "traces"
    assert content["settings"]["recorded"]["settings"]["num_successors"] == 16
    assert len(content["runs"]) % 8 == 0  # two methods, two sizes, two passes a group
    with pytest.raises(ValueError, match=r"expected different ones of lade, .* got 'plain'"):
        run("replay", traces, "--methods", "plain")


def test_an_interrupted_recording_keeps_what_it_has(
    options: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import record

    whole, calls = record.successors_of, list[int]()

    def interrupting(model: Any, token_ids: Any, num_successors: int) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(model, token_ids, num_successors)

    monkeypatch.setattr(record, "successors_of", interrupting)
    result = run("record", *options, "--out", tmp_path / "traces")
    assert result.exit_code == 130
    assert "stopped after 2 of 3 prompts" in result.stderr
    recorded = read_traces(tmp_path / "traces")
    assert [trace.id for trace in recorded.traces] == ["1", "2"]
    assert recorded.settings["interrupted"] is True


def test_weights_are_fitted_and_printed(options: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "weights.json"
    result = run("fit", *options, "--half", "publish", "--json", path)
    assert result.stdout.startswith("    (")
    assert json.loads(path.read_text())["weights"]


def test_forwards_are_timed_with_both_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", hidden_size=256, dtype=torch.float32)
    loaded = LoadedModel(model, None, "x")
    monkeypatch.setattr("lade.cli.options.LoadOptions.load", lambda *_: loaded)
    monkeypatch.setattr(forwards, "_NUM_ROUNDS", 1)
    path = tmp_path / "forwards.json"
    result = run("forwards", "--context", 20, "--json", path)
    assert result.exit_code == 0, result.output
    content = json.loads(path.read_text())
    assert {*content["seconds"]} == {"torch", "lade"}
    for of_contexts in content["seconds"].values():
        assert {*of_contexts} == {"20"}
        assert min(of_contexts["20"].values()) > 0
    assert "reading the weights once" in result.output


def test_engines_that_are_not_installed_are_left_out(
    options: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_engines, "find_spec", lambda name: None)
    path = tmp_path / "engines.json"
    result = run("cpu-engines", *options, "--limit", 2, "--json", path)
    for package in ("openvino-genai", "llama-cpp-python"):
        assert f"is left out: it is not installed: pip install {package}\n" in result.stdout
    content = json.loads(path.read_text())
    assert content["columns"] == [*cpu_engines.COLUMNS]
    assert len(cpu_engines.HEADINGS) == len(cpu_engines.COLUMNS)
    ((key, rows),) = content["runs"].items()
    assert key.startswith("float32, ")
    assert [*rows] == ["plain", "prompt_lookup", "no_drafts", "lade_fresh"]
    for _, _, ratio, first_sec, same_text in rows.values():
        assert ratio > 0 < first_sec
        assert same_text == 1.0
    assert rows["plain"][2] == 1.0
    run("cpu-engines", *options, "--limit", 2, "--dtype", "bfloat16", "--json", path)
    assert [key.split(",")[0] for key in json.loads(path.read_text())["runs"]] == [
        *("float32", "bfloat16")
    ]


def test_a_file_for_engines_has_the_weights_of_the_model(folder: str, tmp_path: Path) -> None:
    loaded = load(folder, dtype="float32")
    write_gguf(loaded.model, loaded.tokenizer, tmp_path / "model.gguf", "float32")
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    weights = read.state_dict()
    for name, weight in loaded.model.state_dict().items():
        assert torch.equal(weights[name], weight), name
    with pytest.raises(ValueError, match=r"expected weights that are the same in float16, got "):
        write_gguf(loaded.model, loaded.tokenizer, tmp_path / "half.gguf", "float16")


def test_a_model_without_large_layers_has_nothing_to_time() -> None:
    small = LoadedModel(tiny_model("llama", dtype=torch.float32), None, "x")
    with pytest.raises(ValueError, match="expected a model on a CPU with large layers"):
        forwards.run(small, [9], ResultFiles())


def test_interrupted_measurements_of_memory_keep_what_they_have(
    options: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def interrupting(work: memory.Work) -> Peak:
        if done:
            raise KeyboardInterrupt
        done.append(work.method)
        return Peak(work.method, 2**30, 2**29, 2**30, True, 5, 1)

    monkeypatch.setattr(memory, "measure_in_process", interrupting)
    path = tmp_path / "memory.json"
    result = run("memory", *options, "--json", path)
    assert result.exit_code == 130
    assert "1024" in result.stdout
    assert "that of loading the model is included" in " ".join(result.stdout.split())
    assert "stopped after 1 of 2 processes" in result.stderr
    assert list(json.loads(path.read_text())["summary"]) == ["plain"]


def test_an_interrupted_bench_of_the_pool_keeps_its_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pool.time_pool

    def interrupting(num_tokens: int, max_draft_tokens: int) -> pool.PoolTiming:
        if num_tokens > 10_000:
            raise KeyboardInterrupt
        return whole(num_tokens, max_draft_tokens)

    monkeypatch.setattr(pool, "time_pool", interrupting)
    path = tmp_path / "pool.json"
    result = run("pool", "--max-tokens", 100_000, "--json", path)
    assert result.exit_code == 130
    assert "10,000" in result.stdout
    content = json.loads(path.read_text())
    assert content["settings"]["interrupted"] is True
    assert [row["num_tokens"] for row in content["timings"]] == [10_000]
