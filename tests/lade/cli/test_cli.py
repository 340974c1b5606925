"""The command line, from help texts to result files, on a tiny local model."""

import functools
import json
import re
import shutil
import signal
import subprocess
import sys
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, T5Config
from typer.testing import CliRunner

from lade.bench.prompts import read_prompts
from lade.cli import prewarm
from lade.cli.app import app
from lade.cli.check import Measured, measure
from lade.cli.demo import Difference, TokenPrinter, find_difference, verdict, why_different
from lade.cli.demo_prompts import DEMO_PROMPTS
from lade.cli.loading import find_model
from lade.cli.options import Verification
from lade.config import VERIFICATIONS
from lade.errors import MissingExtraError, UnsupportedModelError
from lade.prewarming import tables
from lade.probing.report import Probe
from lade.stats import Step
from tests.lade.tiny import byte_tokenizer, tiny_model

LADE = [sys.executable, "-c", "from lade.cli import main; main()"]


def run(*args: str) -> Any:
    wide = {"COLUMNS": "150"}
    return CliRunner().invoke(app, list(args), catch_exceptions=False, env=wide)


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom typer.testing import CliRunner\nfrom lade.cli.app import app\n"
        "result = CliRunner().invoke(app, ['--help'])\nprint(result.output)\n"
        "print([name for name in ('torch', 'transformers', 'numba') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for word in ("generate", "demo", "bench", "check"):
        assert word in done.stdout
    panels = [done.stdout.index(f"─ {panel} ─") for panel in ("Use", "Measure", "Inspect")]
    assert panels == sorted(panels)
    assert done.stdout.strip().endswith("[]")


@pytest.mark.parametrize(
    "command",
    [
        *([], ["generate"], ["chat"], ["prewarm"], ["demo"], ["check"], ["support"], ["bench"]),
        *(["bench", "run"], ["bench", "show"], ["bench", "memory"], ["bench", "pool"]),
        *(["bench", "record"], ["bench", "replay"], ["bench", "project"], ["bench", "gpu"]),
        *(["pool"], ["pool", "build"], ["pool", "info"], ["pool", "merge"], ["pool", "prune"]),
        *(["pool", "forget"], ["pool", "export"]),
        *(["bench", "arena"], ["bench", "fit"], ["bench", "grid"]),
        *(["bench", "turns"], ["bench", "fleet"]),
    ],
)
def test_each_command_has_help_that_fits_a_terminal(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert "Usage" in result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    heights = option_heights(lines)
    assert max(heights) <= 11  # no column so narrow that a sentence goes on and on
    # Paragraphs flow: a line ends where the next word would not fit.
    for line, after in pairwise(lines):
        is_prose = line.startswith(" ") and after.startswith(" ") and line.strip()
        if is_prose and after.strip() and not after.strip().startswith("•"):
            assert len(line.rstrip()) + 1 + len(after.split()[0]) > 76, line


def option_heights(lines: list[str]) -> list[int]:
    """Return how many lines each option takes in a help text."""
    heights: list[int] = []
    for line in lines:
        if re.match(r"│[ *]+--", line):
            heights.append(1)
        elif re.match("│ {20}", line) and heights:
            heights[-1] += 1
    return heights


def test_no_name_or_address_is_cut_in_help_texts() -> None:
    for command in (["generate"], ["bench", "run"]):
        output = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"}).output
        assert "https://ai.google.dev/gemma/terms)." in output
        assert "--max-draft-tokens " in output
    assert "--num-return-sequences " in output


@pytest.fixture(autouse=True)
def learn_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for what is learned after every answer."""
    monkeypatch.setattr(prewarm, "_LEAST_TO_LEARN", 0.02)
    monkeypatch.setattr(prewarm, "_FIRST_TO_LEARN", 0.5)


def test_version() -> None:
    from lade import __version__

    assert run("--version").output.strip() == __version__


def test_generate_streams_the_answer_and_reports_speed(folder: str) -> None:
    options = ["--model", folder, "--max-new-tokens", "12", "--dtype", "float32", "--threads", "2"]
    result = run("generate", "abcabc", *options)
    assert result.exit_code == 0
    assert len(result.stdout) > 3
    assert "12 tokens," in result.stderr
    same = CliRunner().invoke(app, ["generate", "-", *options], input="abcabc")
    assert same.stdout == result.stdout


def test_generate_learns_after_the_answer_unless_it_is_told_not_to(folder: str) -> None:
    command = ["generate", "abcabc", "--model", folder, *SHORT]
    assert "learning" not in run(*command, "--no-learn").stderr
    assert "learning" not in run(*command, "--verification", "plain").stderr
    assert not [*tables.tables_folder().glob("*.safetensors")]
    first = run(*command)
    assert "learning for" in first.stderr
    later = (run(*command) for _ in range(20))  # a slow machine learns nothing in one such moment
    silent = next(result for result in later if "learning for" not in result.stderr)
    assert first.stdout == silent.stdout
    assert len([*tables.tables_folder().glob("*.safetensors")]) == 1


def test_ctrl_c_while_learning_keeps_the_answer(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    command = ["generate", "abcabc", "--model", folder, *SHORT]
    expected = run(*command, "--no-learn").stdout
    monkeypatch.setattr("lade.prewarming.run.prewarm", interrupted)
    result = run(*command)
    assert (result.exit_code, result.stdout) == (0, expected)
    assert "learned no more" in result.stderr


def test_generate_takes_a_way_of_verifying(folder: str) -> None:
    options = ["--model", folder, "--max-new-tokens", "12", "--dtype", "float32"]
    results = [
        run("generate", "abcabc", *options, "--verification", verification)
        for verification in VERIFICATIONS
    ]
    assert len({result.stdout for result in results}) == 1
    assert "1.00 a step" in results[VERIFICATIONS.index("plain")].stderr
    assert run("generate", "abcabc", *options, "--verification", "magic").exit_code == 2


def test_options_name_the_ways_of_verifying_that_there_are() -> None:
    assert [*Verification] == [*VERIFICATIONS]


def test_demo_compares_and_writes_its_table(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    options = ["--model", folder, "--max-new-tokens", "20", "--dtype", "float32"]
    result = run("demo", *options, "--json", str(path))
    assert result.exit_code == 0
    for title, _ in DEMO_PROMPTS:
        assert title in result.stdout
    assert "6 of 6 same" in result.stdout
    content = json.loads(path.read_text())
    assert [row["title"] for row in content["prompts"]] == [title for title, _ in DEMO_PROMPTS]
    assert all(row["text"] == "same text" for row in content["prompts"])
    assert content["settings"]["verification"] == "tree"
    assert folder not in path.read_text()
    options += ["--prompt", "one", "--prompt", "two", "--verification", "rows"]
    result = run("demo", *options, "--json", str(path))
    assert json.loads(path.read_text())["settings"]["verification"] == "rows"
    assert "prompt 2" in result.stdout
    assert DEMO_PROMPTS[0][0] not in result.stdout


def test_bench_run_prints_a_table_and_writes_json(folder: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcabc\nxyxyxy\nhello\n")
    path = tmp_path / "result.json"
    options = ["--prompts", str(prompts), "--model", folder, "--max-new-tokens", "8"]
    options += ["--dtype", "float32", "--limit", "2", "--passes", "2", "--json", str(path)]
    result = run("bench", "run", *options)
    assert result.exit_code == 0
    assert "overall" in result.stdout
    settings = json.loads(path.read_text())["settings"]
    assert settings["prompts"]["name"] == "prompts.txt"
    assert settings["prompts"]["num"] == 2
    assert settings["dtype"] == "float32"
    assert list(settings["methods"]) == ["plain", "prompt_lookup", "lade", "lade_fresh"]
    assert settings["interrupted"] is False
    assert settings["temperature"] == 0.0
    assert settings["batch_size"] == 1
    assert settings["left_out"] == {}
    assert settings["verification"] == "tree"
    assert settings["config"]["verification"] is None
    assert "verification: tree" in result.stdout
    result = run("bench", "show", str(path), str(path))
    assert result.exit_code == 0
    assert result.stdout.count("lade_fresh") == 2


def test_bench_grid_measures_every_setting(folder: str, tmp_path: Path) -> None:
    prompts, path = tmp_path / "prompts.txt", tmp_path / "grid.json"
    prompts.write_text("ab\ncd\n")
    options = ["--lengths", "4", "--batch-sizes", "1,2", "--temperatures", "0,1"]
    options += ["--dtypes", "float32", "--model", folder, "--json", str(path)]
    result = run("bench", "grid", "--prompts", str(prompts), *options)
    assert result.exit_code == 0
    assert "sampling at temperature 1, 8 sequences a prompt" in result.stdout
    content = json.loads(path.read_text())
    assert [(each["batch_size"], each["num_return_sequences"]) for each in content["runs"]] == [
        *((1, 1), (2, 1)),
        *((1, 1), (2, 1), (1, 8)),
    ]
    assert content["settings"]["interrupted"] is False


def test_bench_turns_holds_growing_chats(folder: str, tmp_path: Path) -> None:
    path, markdown = tmp_path / "turns.json", tmp_path / "turns.md"
    options = ["--turns", "4", "--history-tokens", "120", "--max-new-tokens", "4", "--passes", "2"]
    options += ["--dtypes", "float32", "--model", folder, "--json", str(path)]
    result = run("bench", "turns", *options, "--markdown", str(markdown))
    assert result.exit_code == 0
    assert "Time to the first token" in result.stdout
    content = json.loads(path.read_text())
    (measured,) = content["runs"]
    turns = measured["turns"]
    assert [turn["turn"] for turn in turns] == [1, 2, 3, 4]
    assert turns[0]["num_reused_tokens"] == 0
    assert turns[-1]["num_prompt_tokens"] >= 120
    assert all(turn["num_reused_tokens"] > 0 for turn in turns[1:])
    assert all(turn["is_same"] for turn in turns)
    assert all(0 < turn["first_sec"] <= turn["sec"] for turn in turns)
    assert len(measured["chats"]) == 2
    assert content["settings"]["config"]["reuses_prefix"] is True
    assert len(markdown.read_text().splitlines()) > 6


def test_bench_run_keeps_pools_and_writes_markdown_and_plots(folder: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcabc\nxyxyxy\n")
    path, markdown = tmp_path / "result.json", tmp_path / "result.md"
    options = ["--prompts", str(prompts), "--model", folder, "--max-new-tokens", "16"]
    options += [
        "--dtype",
        "float32",
        "--methods",
        "plain,prompt_lookup,lade",
        "--max-draft-tokens",
        "4",
    ]
    options += ["--passes", "2", "--json", str(path), "--markdown", str(markdown)]
    result = run("bench", "run", *options, "--keep", "--plot", str(tmp_path / "plots"))
    assert result.exit_code == 0
    content = json.loads(path.read_text())
    assert content["settings"]["keep"] is True
    assert content["settings"]["config"]["max_draft_tokens"] == 4
    assert all(entry["lade"]["num_draft_tokens"] <= 4 * 15 for entry in content["prompts"])
    assert "all, 2 prompts, lade\n" in result.stdout
    assert "  pass 2 " in result.stdout
    assert "| lade | pass 2 |" in markdown.read_text()
    written = sorted(each.name for each in (tmp_path / "plots").iterdir())
    assert written == ["speedup.png", "speedup.svg"]
    markdown.unlink()
    show = ["bench", "show", str(path), "--markdown", str(markdown), "--plot", str(tmp_path)]
    assert run(*show).exit_code == 0
    assert "| result | greedy | 2 prompts | lade, pass 2 |" in markdown.read_text()
    assert (tmp_path / "result.svg").exists()
    with pytest.raises(ValueError, match="expected --passes of 2 or more with --keep, got 1"):
        run("bench", "run", *options, "--keep", "--passes", "1")
    with pytest.raises(ValueError, match="expected plain and another of the methods to plot"):
        run("bench", "run", *options, "--methods", "lade", "--plot", str(tmp_path))


def test_plots_are_refused_before_any_work_without_their_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    options = ["--prompts", __file__, "--model", "does-not-exist", "--plot", str(tmp_path)]
    with pytest.raises(MissingExtraError, match=r"lade-decoding\[plots\]"):
        run("bench", "run", *options)


def test_bench_records_replays_and_projects(folder: str, tmp_path: Path) -> None:
    prompts, traces = tmp_path / "prompts.txt", tmp_path / "traces.safetensors"
    prompts.write_text("abcabc\nxyxyxy\nhello\n")
    options = ["--prompts", str(prompts), "--model", folder, "--dtype", "float32"]
    options += ["--max-new-tokens", "20", "--out", str(traces), "--num-successors", "8"]
    result = run("bench", "record", *options, "--limit", "2")
    assert result.exit_code == 0
    assert "2 answers, 40 tokens" in result.stderr
    assert folder.encode() not in traces.read_bytes()

    path, markdown = tmp_path / "replay.json", tmp_path / "replay.md"
    options = [str(traces), "--max-draft-tokens", "4,8", "--passes", "2", "--json", str(path)]
    options += ["--markdown", str(markdown), "--plot", str(tmp_path / "plots")]
    result = run("bench", "replay", *options, "--methods", "lade,lade_fresh")
    assert result.exit_code == 0
    assert "lade, pass 2" in result.stdout
    assert "| lade, pass 2 | 8 |" in markdown.read_text()
    assert (tmp_path / "plots" / "mat.svg").exists()
    content = json.loads(path.read_text())
    assert content["settings"]["traces"]["name"] == "traces.safetensors"
    assert content["settings"]["recorded"]["settings"]["num_successors"] == 8
    assert content["settings"]["recorded"]["settings"]["prompts"]["num"] == 2
    assert content["settings"]["interrupted"] is False
    assert len(content["runs"]) % 8 == 0  # two methods, two node counts, two passes a group

    costs, projected = tmp_path / "costs.csv", tmp_path / "projected.json"
    costs.write_text("num_tokens,sec\n1,0.01\n9,0.02\n")
    options = ["--mat", str(path), "--json", str(projected), "--markdown", str(markdown)]
    for run_entry in content["runs"]:  # whether a tiny model's answers loop is not at stake here
        run_entry["group"] = "overall"
    path.write_text(json.dumps(content))
    result = run("bench", "project", "--step-cost", str(costs), *options)
    assert result.exit_code == 0
    assert "best" in result.stdout
    for entry in json.loads(projected.read_text())["runs"]:
        assert entry["step_cost"] == {4: 1.5, 8: 2.0}[entry["max_draft_tokens"]]
        expected = entry["mean_accepted_tokens"] / entry["step_cost"]
        assert entry["speedup"] == pytest.approx(expected, abs=1e-5)
    costs.write_text("1,0.01\n8,0.02\n")
    with pytest.raises(ValueError, match=r"expected costs\.csv to have the step cost of 9 tokens"):
        run("bench", "project", "--step-cost", str(costs), *options)


def test_tables_in_a_file_are_whole_however_narrow_the_terminal() -> None:
    path = Path(__file__).parents[1] / "bench" / "smollm2_cpu_float32.json"
    shown = CliRunner().invoke(app, ["bench", "show", str(path)], env={"COLUMNS": "30"}).stdout
    (row,) = (line for line in shown.splitlines() if line.split()[:1] == ["lade_fresh"])
    assert row.split() == ["lade_fresh", "32.1", "1.42x", "1.87", "3.5", "100%"]


def test_an_interrupted_recording_keeps_what_it_has(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lade.bench import record
    from lade.bench.traces import read_traces

    whole = record.successors_of
    calls: list[int] = []

    def interrupting(model: Any, token_ids: Any, num_successors: int) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(model, token_ids, num_successors)

    monkeypatch.setattr(record, "successors_of", interrupting)
    prompts, traces = tmp_path / "prompts.txt", tmp_path / "traces.safetensors"
    prompts.write_text("a\nb\nc\nd\n")
    options = ["--prompts", str(prompts), "--model", folder, "--max-new-tokens", "4"]
    result = run("bench", "record", *options, "--out", str(traces))
    assert result.exit_code == 130
    assert "stopped after 2 of 4 prompts" in result.stderr
    recorded = read_traces(traces)
    assert [trace.id for trace in recorded.traces] == ["1", "2"]
    assert recorded.settings["interrupted"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "plain"], "those that draft without a model, lade, .* got 'plain'"),
        (["--methods", "lade,lade"], "got 'lade,lade'"),
        (
            ["--max-draft-tokens", "8,x"],
            "expected --max-draft-tokens to be different numbers above 0, got '8,x'",
        ),
        (["--max-draft-tokens", "0"], "above 0, got '0'"),
        (["--max-draft-tokens", "8,8"], "above 0, got '8,8'"),
        ([], r"expected test_cli\.py to hold traces of lade bench record"),
    ],
)
def test_replays_refuse_what_they_cannot_do(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run("bench", "replay", __file__, *options)


def test_bench_run_compares_ways_of_verifying(folder: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcabc\nxyxyxy\n")
    path = tmp_path / "ways.json"
    options = ["--prompts", str(prompts), "--model", folder, "--max-new-tokens", "8"]
    options += ["--dtype", "float32", "--json", str(path)]
    names = ["plain", "lade_tree", "lade_rows", "lade_chain", "lade_snapshot"]
    result = run("bench", "run", *options, "--methods", ",".join(names))
    assert result.exit_code == 0
    content = json.loads(path.read_text())
    assert list(content["summary"]["overall"]) == names
    assert content["settings"]["methods"]["lade_rows"] == "as lade, drafts verified by rows"
    assert content["settings"]["verification"] is None  # each has its own
    for entry in content["prompts"]:
        assert all(entry[name]["same_text"] for name in names[1:])
    shown = run("bench", "show", str(path)).stdout
    assert all(name in result.stdout and name in shown for name in names)
    result = run("bench", "run", *options, "--methods", "plain,lade", "--verification", "chain")
    settings = json.loads(path.read_text())["settings"]
    assert settings["verification"] == settings["config"]["verification"] == "chain"
    assert "verification: chain" in result.stdout
    assert "verification: chain" in " ".join(run("bench", "show", str(path)).stdout.split())


def test_bench_run_says_which_ways_a_model_leaves_out(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_tree(model: Any) -> Any:
        raise UnsupportedModelError("trees do not grow here")

    monkeypatch.setattr("lade.probing.factory.tree_layout", no_tree)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcabc\n")
    path = tmp_path / "ways.json"
    options = ["--prompts", str(prompts), "--model", folder, "--max-new-tokens", "4"]
    options += ["--methods", "plain,lade_tree,lade_chain", "--json", str(path)]
    result = run("bench", "run", *options)
    assert result.exit_code == 0
    reason = "LlamaForCausalLM cannot verify drafts by 'tree': trees do not grow here"
    assert f"lade_tree is left out: {reason}" in " ".join(result.stdout.split())
    settings = json.loads(path.read_text())["settings"]
    assert list(settings["methods"]) == ["plain", "lade_chain"]
    assert settings["left_out"] == {"lade_tree": reason}


def test_bench_run_samples_batches_and_says_what_it_leaves_out(folder: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcabc\nxyxyxy\nhello\n")
    path = tmp_path / "result.json"
    options = ["--prompts", str(prompts), "--model", folder, "--max-new-tokens", "8"]
    options += ["--dtype", "float32", "--temperature", "0.8", "--top-p", "0.95", "--seed", "7"]
    options += ["--batch-size", "2", "--num-return-sequences", "2", "--json", str(path)]
    result = run("bench", "run", *options)
    assert result.exit_code == 0
    assert "Sampling at temperature 0.8, top-p 0.95, batches of 2, 2 sequences a" in result.stdout
    assert "prompt_lookup is left out: transformers runs it on one prompt" in result.stdout
    content = json.loads(path.read_text())
    settings = content["settings"]
    assert settings["temperature"] == 0.8
    assert settings["top_p"] == 0.95
    assert settings["seed"] == 7
    assert settings["batch_size"] == settings["num_return_sequences"] == 2
    assert list(settings["methods"]) == ["plain", "lade", "lade_fresh"]
    assert list(settings["left_out"]) == ["prompt_lookup"]
    assert [entry["plain"]["num_rows"] for entry in content["prompts"]] == [4, 2]
    for entry in content["prompts"]:
        assert entry["lade"]["same_text"]
        assert entry["lade_fresh"]["same_text"]


@pytest.mark.exhaustive
def test_bench_memory_compares_processes_and_writes_json(folder: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcabc\nxyxyxy\nhello\n")
    path = tmp_path / "memory.json"
    options = ["--prompts", str(prompts), "--model", folder, "--max-new-tokens", "8"]
    options += ["--dtype", "float32", "--batch-size", "2", "--json", str(path)]
    result = run("bench", "memory", *options)
    assert result.exit_code == 0
    assert "float32, greedy, batches of 2" in result.stdout
    content = json.loads(path.read_text())
    assert [entry["method"] for entry in content["runs"]] == ["plain", "lade"]
    assert content["summary"]["plain"]["peak_ratio"] == 1.0
    assert content["summary"]["lade"]["peak_ratio"] > 1.0  # numba alone is more than nothing
    assert (
        content["summary"]["lade"]["num_tokens"] == content["summary"]["plain"]["num_tokens"] == 24
    )
    assert content["settings"]["batch_size"] == 2
    assert content["settings"]["interrupted"] is False
    assert folder not in path.read_text()


def test_interrupted_memory_runs_keep_what_they_measured(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lade.bench import memory, peak

    done: list[str] = []

    def interrupting(work: peak.Work, on_batch: Any) -> peak.Peak:
        if done:
            raise KeyboardInterrupt
        done.append(work.method)
        return peak.Peak(2**30, 2**29, 2**30, True, 5, 1)

    monkeypatch.setattr(memory, "measure_in_process", interrupting)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\n")
    path = tmp_path / "memory.json"
    options = ["--prompts", str(prompts), "--model", folder, "--json", str(path)]
    result = run("bench", "memory", *options)
    assert result.exit_code == 130
    assert "1024" in result.stdout
    assert "that of loading the model is included" in " ".join(result.stdout.split())
    assert "stopped after 1 of 2 processes" in result.stderr
    assert list(json.loads(path.read_text())["summary"]) == ["plain"]


def test_an_interrupted_benchmark_keeps_what_it_measured(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lade.bench import baselines, methods

    calls: list[int] = []

    def interrupting(model: Any, inputs: Any, options: Any) -> baselines.Answer:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return baselines.plain(model, inputs, options)

    info = baselines.MethodInfo(lambda config: interrupting, "interrupting")
    monkeypatch.setitem(methods.METHODS, "plain", info)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\nc\nd\n")
    path = tmp_path / "result.json"
    options = ["--prompts", str(prompts), "--model", folder, "--max-new-tokens", "4"]
    result = run("bench", "run", *options, "--methods", "plain", "--json", str(path))
    assert result.exit_code == 130
    content = json.loads(path.read_text())
    assert len(content["prompts"]) == 2
    assert content["settings"]["interrupted"] is True


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"fine\n\xff\xfe\n", r"expected prompts\.txt in UTF-8, got byte 0xff in line 2"),
        (
            b'{"question": "x"}',
            r"line 1 of prompts\.txt .* 'prompt', a text, got {\"question\": \"x\"}",
        ),
        (b'\n{"prompt": 5}', r"line 2 of prompts\.txt .* got {\"prompt\": 5}"),
        (b'{"turns": "one"}', r"'turns', a list of texts, .* got {\"turns\": \"one\"}"),
        (b'{"turns": []}', r"got {\"turns\": \[\]}"),
        (b'{"prompt', r"line 1 of prompts\.txt .* its JSON is broken: Unterminated string"),
        (b" \n", r"expected prompts in prompts\.txt, found none"),
    ],
)
@pytest.mark.parametrize("command", ["run", "record", "memory"])
def test_prompts_are_read_before_a_model_is_loaded(
    command: str, content: bytes, message: str, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes(content)
    options = ["--prompts", str(prompts), "--model", str(tmp_path / "no-model")]
    options += ["--out", str(tmp_path / "traces")] if command == "record" else []
    with pytest.raises(ValueError, match=message):
        run("bench", command, *options)


def test_prompt_files_from_windows_and_of_odd_characters_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes('\ufeff{"prompt": "one\u2028line"}\r\nplain\r\n'.encode())
    assert [prompt.text for prompt in read_prompts(path)] == ["one\u2028line", "plain"]


def test_a_pass_that_was_interrupted_does_not_lose_those_before(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lade.bench import baselines, methods

    calls: list[int] = []

    def interrupting(model: Any, inputs: Any, options: Any) -> baselines.Answer:
        calls.append(1)
        if len(calls) == 5:  # the first one warms up
            raise KeyboardInterrupt
        return baselines.plain(model, inputs, options)

    info = baselines.MethodInfo(lambda config: interrupting, "interrupting")
    monkeypatch.setitem(methods.METHODS, "plain", info)
    prompts, path = tmp_path / "prompts.txt", tmp_path / "result.json"
    prompts.write_text("a\nb\n")
    options = ["--prompts", str(prompts), "--model", folder, "--max-new-tokens", "4"]
    options += ["--methods", "plain", "--passes", "3", "--json", str(path)]
    result = run("bench", "run", *options)
    assert result.exit_code == 130
    assert "stopped after 3 of 6 prompts; the unfinished pass is left out" in result.stderr
    content = json.loads(path.read_text())
    assert len(content["prompts"]) == 2
    assert content["settings"]["interrupted"] is True


def test_an_interrupted_demo_shows_what_it_measured(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lade.bench.baselines import Answer, plain

    calls: list[int] = []

    def interrupting(model: Any, inputs: Any, options: Any) -> Answer:
        calls.append(1)
        if len(calls) == 3:  # the first one warms up
            raise KeyboardInterrupt
        return plain(model, inputs, options)

    monkeypatch.setattr("lade.cli.demo.plain", interrupting)
    path = tmp_path / "demo.json"
    options = ["--model", folder, "--max-new-tokens", "4", "--json", str(path)]
    result = run("demo", *options, "--prompt", "one", "--prompt", "two")
    assert result.exit_code == 130
    assert "overall" in result.stdout
    assert "stopped after 1 of 2 prompts" in result.stderr
    content = json.loads(path.read_text())
    assert content["settings"]["interrupted"] is True
    assert [row["title"] for row in content["prompts"]] == ["prompt 1"]


def test_an_interrupted_bench_of_the_pool_keeps_its_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lade.bench import pool

    whole = pool.time_pool

    def interrupting(num_tokens: int, max_draft_tokens: int) -> pool.PoolTiming:
        if num_tokens > 10_000:
            raise KeyboardInterrupt
        return whole(num_tokens, max_draft_tokens)

    monkeypatch.setattr(pool, "time_pool", interrupting)
    path = tmp_path / "pool.json"
    result = run("bench", "pool", "--max-tokens", "100000", "--json", str(path))
    assert result.exit_code == 130
    assert "stopped after 1 of 2 sizes" in result.stderr
    content = json.loads(path.read_text())
    assert content["settings"]["interrupted"] is True
    assert [row["num_tokens"] for row in content["timings"]] == [10_000]


def test_bench_pool_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "pool.json"
    result = run("bench", "pool", "--max-tokens", "10000", "--json", str(path))
    assert result.exit_code == 0
    assert [row["num_tokens"] for row in json.loads(path.read_text())["timings"]] == [10_000]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["generate", "x", "--model", "does-not-exist-anywhere"], "could not be loaded"),
        (["generate", "x", "--device", "nowhere", "--model", "y"], "expected a torch device"),
        (["bench", "pool", "--json", "no/such/folder/x.json"], "No such file or directory"),
        (["bench", "run", "--prompts", __file__, "--methods", "plain,magic"], "got 'plain,magic'"),
        (
            ["bench", "run", "--prompts", __file__, "--num-return-sequences", "3"],
            "expected a temperature above 0 with 3 sequences of each prompt",
        ),
        (["bench", "show", __file__], "expected test_cli.py to be a result file of lade bench run"),
    ],
)
def test_errors_are_one_line_without_a_traceback(arguments: list[str], text: str) -> None:
    done = subprocess.run(
        [*LADE, *arguments],
        capture_output=True,
        text=True,
        env={"HF_HUB_OFFLINE": "1", "PATH": "", "HOME": "/nonexistent"},
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 1
    assert f"{text}" in done.stderr
    assert "Traceback" not in done.stderr


def test_benchmarks_refuse_at_the_start_what_a_method_or_device_cannot_do() -> None:
    options = ["--prompts", __file__, "--batch-size", "4"]
    for command in (["bench", "run"], ["bench", "memory"]):
        with pytest.raises(ValueError, match=r"without prompt_lookup for greedy, batches of 4: tr"):
            run(*command, *options, "--methods", "plain,prompt_lookup")
    with pytest.raises(ValueError, match=r"expected --device cpu or cuda .* got 'meta'"):
        run("bench", "memory", *options, "--device", "meta")


def test_a_missing_extra_is_named_with_its_pip_line() -> None:
    program = "import sys; sys.modules['typer'] = None\nfrom lade.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert 'pip install "lade-decoding[cli]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_python_runs_the_package_as_the_command() -> None:
    from lade import __version__

    command = [sys.executable, "-m", "lade", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.stdout.strip() == __version__, done.stderr


# --- options of generate --------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_template(folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model, with a chat template that has a place for a system prompt."""
    return templated(
        folder,
        tmp_path_factory.mktemp("chat"),
        "{% for message in messages %}<{{ message['role'][0] }}>{{ message['content'] }}"
        "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}",
    )


def templated(folder: str, path: Path, template: str) -> str:
    shutil.copytree(folder, path, dirs_exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return str(path)


def plain_text(folder: str, prompt: str, **options: Any) -> str:
    """Return what plain generate makes of a prompt, without any template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, tokenizer=tokenizer, max_new_tokens=12, **options)
    text: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    return text


SHORT = ["--dtype", "float32", "--max-new-tokens", "12"]


def test_generate_samples_the_text_of_plain_generate_with_the_same_seed(folder: str) -> None:
    options = ["--temperature", "1.5", "--top-p", "0.9", "--seed", "7"]
    result = run("generate", "abcabc", "--model", folder, *SHORT, *options)
    torch.manual_seed(7)
    expected = plain_text(folder, "abcabc", do_sample=True, temperature=1.5, top_p=0.9, top_k=0)
    assert result.stdout == expected + "\n"
    assert "a step, seed 7\n" in result.stderr
    assert run("generate", "abcabc", "--model", folder, *SHORT).stdout != result.stdout


def test_generate_tells_the_seed_that_it_has_drawn(folder: str) -> None:
    options = ["generate", "abcabc", "--model", folder, *SHORT, "--temperature", "2"]
    first, second = run(*options), run(*options)
    assert first.stdout != second.stdout
    (seed,) = re.findall(r"seed (\d+)\n", first.stderr)
    assert run(*options, "--seed", seed).stdout == first.stdout
    assert "seed" not in run("generate", "abcabc", "--model", folder, *SHORT).stderr


def test_generate_puts_prompts_into_the_chat_template_unless_they_are_raw(
    folder: str, with_template: str
) -> None:
    command = ["generate", "ab", "--model", with_template, *SHORT]
    for options, prompt in (
        ([], "<u>ab<a>"),
        (["--system", "be brief"], "<s>be brief<u>ab<a>"),
        (["--raw"], "ab"),
    ):
        expected = plain_text(folder, prompt, do_sample=False)
        assert run(*command, *options).stdout == expected + "\n"


def test_generate_ends_with_the_first_of_several_stops(folder: str) -> None:
    command = ["generate", "abcabc", "--model", folder, *SHORT]
    whole = run(*command).stdout.rstrip("\n")
    stop = next(letter for letter in whole[2:] if letter.isascii())
    result = run(*command, "--stop", "never there", "--stop", stop)
    assert result.stdout == whole[: whole.index(stop) + 1] + "\n"
    assert "12 tokens" not in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--system", "x", "--raw"], "expected --system or --raw, got both"),
        (["--stop", ""], "expected each --stop to be a text of one character or more"),
        (["--top-p", "0.5"], "expected a temperature above 0 with top_p=0.5"),
        (["--temperature", "1", "--top-p", "0"], "expected top_p above 0"),
        (["--system", "\udcff"], "expected UTF-8 as prompt"),
    ],
)
def test_generate_refuses_options_before_a_model_is_loaded(
    options: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run("generate", "x", "--model", "./nofolder", *options)


def test_a_system_prompt_that_has_no_place_is_refused(folder: str, tmp_path: Path) -> None:
    refusing = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    )
    for model, message in (
        (folder, "has no chat template$"),
        (templated(folder, tmp_path / "refusing", refusing), r"refuses it \(no system\)"),
        (templated(folder, tmp_path / "deaf", "{{ messages[-1]['content'] }}"), "leaves it out"),
    ):
        with pytest.raises(ValueError, match=f"expected no system prompt: .*{message}"):
            run("generate", "ab", "--model", model, "--system", "be brief", *SHORT)


@pytest.mark.usefixtures("own_remote_code")
def test_code_of_a_model_runs_only_when_it_is_trusted(folder: str, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "own")
    (tmp_path / "own" / "modeling_own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    path = tmp_path / "own" / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "own"}
    classes = {"AutoConfig": "OwnConfig", "AutoModelForCausalLM": "OwnForCausalLM"}
    config["auto_map"] = {name: f"modeling_own.{each}" for name, each in classes.items()}
    path.write_text(json.dumps(config))
    options = ["--model", str(tmp_path / "own"), *SHORT]
    with pytest.raises(ValueError, match="own comes with code of its own; --trust-remote-code"):
        run("generate", "ab", *options)
    result = run("generate", "ab", *options, "--trust-remote-code")
    assert result.stdout == run("generate", "ab", "--model", folder, *SHORT).stdout
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ab\n")
    options += ["--prompts", str(prompts), "--methods", "plain"]
    assert run("bench", "run", *options, "--trust-remote-code").exit_code == 0


# --- check ----------------------------------------------------------------------------------


@pytest.fixture
def quick_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check with two short prompts and answers."""
    monkeypatch.setattr("lade.cli.check.DEMO_PROMPTS", [("one", "abcabc"), ("two", "xyxy")])
    monkeypatch.setattr("lade.cli.check._MAX_TOKENS", 12)


@pytest.mark.usefixtures("quick_check")
def test_check_tells_verification_and_speed(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    options = [folder, "--seconds", "0.01", "--dtype", "float32", "--json", str(path)]
    result = CliRunner().invoke(app, ["check", *options], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert "LlamaForCausalLM" in result.stdout
    assert "float32, cpu" in " ".join(result.stdout.split())
    assert f"torch {metadata.version('torch')}" in " ".join(result.stdout.split())
    assert "Verification by tree: all candidates in one forward" in result.stdout
    assert re.search(
        r"Speed-up \d+\.\d\dx over plain generate: [\d.]+ → [\d.]+ tokens/s", result.stdout
    )
    assert "  one         " in result.stdout
    assert "Text the same for 1 of 1 prompt\n" in result.stdout
    content = json.loads(path.read_text())
    assert content["verification"] == "tree"
    assert content["settings"]["interrupted"] is False
    assert [entry["title"] for entry in content["prompts"]] == ["one"]  # always one, however slow
    assert content["speedup"] == pytest.approx(content["prompts"][0]["speedup"], abs=1e-4)
    assert folder not in path.read_text()


@pytest.mark.usefixtures("quick_check")
def test_check_measures_every_prompt_in_turn(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr("lade.cli.check.perf_counter", lambda: float(next(ticks)))
    measured: list[Measured] = []
    from lade.models.loading import load

    assert measure(load(folder, dtype="float32"), 9.0, measured) is None
    assert [(each.title, len(each.speedups)) for each in measured] == [("one", 3), ("two", 2)]
    assert all(each.difference is None for each in measured)
    assert measured[0].speedup == sorted(measured[0].speedups)[1]


def test_check_says_why_nothing_better_and_measures_no_plain_model(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: Any = {"tree": "trees do not grow here", "rows": "rows [1, 2] neither"}
    found = Probe("LlamaForCausalLM", "plain", "sdpa", reasons)
    monkeypatch.setattr("lade.cli.check.probe", lambda model: found)
    result = run("check", folder)
    assert result.exit_code == 0
    assert "Verification by plain" in result.stdout
    assert "  not by tree: trees do not grow here" in result.stdout
    assert "  not by rows: rows [1, 2] neither" in result.stdout
    assert "Speed-up not measured: lade decodes the model plainly" in result.stdout


def test_check_needs_no_speed_and_no_long_positions(folder: str, of_learned_positions: str) -> None:
    assert "not measured: not asked for" in run("check", folder, "--seconds", "0").stdout
    result = run("check", of_learned_positions)
    assert result.exit_code == 0
    assert "not measured: the model has positions for none of the prompts" in result.stdout


@pytest.mark.usefixtures("quick_check")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no memory\nat all")])
def test_a_check_that_ends_early_shows_what_it_has(
    error: BaseException, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lade.bench.baselines import Answer, plain

    calls: list[int] = []

    def ending(model: Any, inputs: Any, options: Any) -> Answer:
        calls.append(1)
        if len(calls) == 4:  # two warm up
            raise error
        return plain(model, inputs, options)

    monkeypatch.setattr("lade.cli.check.plain", ending)
    path = tmp_path / "check.json"
    result = run("check", folder, "--dtype", "float32", "--json", str(path))
    is_interrupt = isinstance(error, KeyboardInterrupt)
    assert result.exit_code == (130 if is_interrupt else 0)
    assert re.search(r"Speed-up \d", result.stdout)
    assert ("stopped early: RuntimeError: no memory\n" in result.stdout) != is_interrupt
    content = json.loads(path.read_text())
    assert content["settings"]["interrupted"] is True
    assert len(content["prompts"]) == 1


# --- tables ---------------------------------------------------------------------------------


def test_tables_of_results_fit_a_terminal() -> None:
    root = Path(__file__).parents[3] / "docs"
    for command in (
        ["bench", "show", *map(str, sorted((root / "results" / "new_pools").glob("*.json")))],
        ["support", "--results", str(root / "support" / "transformers-5.23.0.json")],
    ):
        result = CliRunner().invoke(app, command, env={"COLUMNS": "80"})
        assert result.exit_code == 0
        lines = [line.rstrip() for line in result.stdout.splitlines()]
        assert max(map(len, lines)) <= 80
        assert len(lines) > 10


def test_verdicts_of_the_demo_are_short(folder: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    assert verdict(find_difference(model, inputs, [1, 2], [1, 2])) == "same"
    found = find_difference(model, inputs, [1, 2, 3], [1, 2, 4])
    assert found is not None
    assert (found.place, found.is_tie) == (3, False)
    assert verdict(found) == f"differs at 3 (gap {found.gap:.3g})"
    assert verdict(Difference(105, 1e-6, is_tie=True)) == "differs at 105 (tie)"
    assert "a fault of lade" in why_different(model)
    assert "bfloat16" in why_different(model.to(torch.bfloat16))


# --- what is wrong with a prompt or a model -------------------------------------------------


@pytest.mark.parametrize("prompt", ["-", "ab\udcff"])
def test_a_prompt_that_is_not_utf_8_is_refused_before_a_model_is_loaded(prompt: str) -> None:
    arguments = ["generate", prompt, "--model", "./nofolder"]
    with pytest.raises(ValueError, match=r"expected UTF-8 .*, got byte 0xff after 2 bytes"):
        CliRunner().invoke(app, arguments, input=b"ab\xff", catch_exceptions=False)


@pytest.mark.parametrize("command", [["generate", ""], ["demo", "--prompt", ""]])
def test_a_prompt_without_a_token_is_refused(command: list[str], folder: str) -> None:
    with pytest.raises(ValueError, match=r"one token or more, got none: .* has no chat template"):
        run(*command, "--model", folder)


@pytest.fixture(scope="module")
def of_learned_positions(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved tiny model with positions for 64 tokens, and none beyond."""
    path = tmp_path_factory.mktemp("learned")
    byte_tokenizer().save_pretrained(path)
    model = tiny_model("opt", dtype=torch.float32, vocab_size=256, max_position_embeddings=64)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    return str(path)


def test_a_text_ends_where_learned_positions_do(of_learned_positions: str, tmp_path: Path) -> None:
    options = ["--model", of_learned_positions, "--dtype", "float32", "--max-new-tokens", "100"]
    result = run("generate", "abcabc", *options)
    assert result.exit_code == 0
    assert "note: OPTForCausalLM has positions for 64 tokens: the answer ends" in result.stderr
    assert "59 tokens," in result.stderr  # the last of 6 + 59 is never fed
    with pytest.raises(ValueError, match=r"a prompt of at most 64 tokens, .*; got 65"):
        run("generate", 65 * "a", *options)
    assert "1 token," in run("generate", 64 * "a", *options).stderr
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcabc\nabcabcabc\n")
    with pytest.raises(ValueError, match=r"--max-new-tokens of at most 56 after the longest pro"):
        run("bench", "run", "--prompts", str(prompts), *options)


def test_a_text_beyond_computed_positions_is_only_noted(folder: str, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "short")
    config = tmp_path / "short" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 9}))
    options = ["--model", str(tmp_path / "short"), "--dtype", "float32", "--max-new-tokens"]
    result = run("generate", "abcabc", *options, "8")
    assert "8 tokens," in result.stderr
    assert "note: LlamaForCausalLM was made for texts of 9 tokens; 6 of the" in result.stderr
    assert "note" not in run("generate", "abcabc", *options, "4").stderr


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_file_of_a_model_is_named(name: str, folder: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=rf"the file {name} in {copy} is incomplete or damaged"):
        run("generate", "x", "--model", str(copy))


def test_what_is_missing_in_a_folder_is_named(folder: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("token*"))
    with pytest.raises(ValueError, match=rf"the folder {copy} has a model, but no tokenizer"):
        run("generate", "x", "--model", str(copy))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=rf"the folder {tmp_path}/empty has no model"):
        run("generate", "x", "--model", str(tmp_path / "empty"))


@pytest.mark.parametrize("model", ["./nofolder", "/no/folder", "no/such/folder", "~/nofolder"])
def test_a_folder_that_is_not_there_is_no_name_for_the_hub(model: str) -> None:
    with pytest.raises(ValueError, match=f"no such folder: {model}"):
        run("generate", "x", "--model", model)


def test_an_embedded_model_may_be_written_in_any_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_model("SmolLM2-135M-Instruct") == "smollm2-135m-instruct"
    assert find_model("Gemma-3-270m") == "gemma-3-270m"
    assert (
        find_model("HuggingFaceTB/SmolLM2-135M-Instruct") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    )
    assert find_model(None) is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    assert find_model("SmolLM2-135M-Instruct") == "SmolLM2-135M-Instruct"


def test_a_model_that_is_no_causal_lm_is_named_in_a_line(folder: str, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "t5")
    T5Config(vocab_size=256, d_model=8, d_ff=8, num_layers=1).save_pretrained(tmp_path / "t5")
    with pytest.raises(
        ValueError, match=r"no causal LM, it has a T5Config; lade decodes causal LMs$"
    ):
        run("generate", "x", "--model", str(tmp_path / "t5"))


def test_the_rate_shown_is_that_of_the_answer_alone(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_forwards = 0
    counted: list[int] = []
    forward = LlamaForCausalLM.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_forwards
        num_forwards += 1
        return forward(*args, **kwargs)

    def clock() -> float:
        counted.append(num_forwards)
        return float(len(counted))

    monkeypatch.setattr(LlamaForCausalLM, "forward", functools.wraps(forward)(counting))
    monkeypatch.setattr("lade.cli.generate.perf_counter", clock)
    result = run("generate", "abcabc", "--model", folder, "--max-new-tokens", "5")
    before, after = counted
    assert before > 5  # those of the check
    assert after - before <= 5
    assert "Checking how the model verifies drafts" in result.stderr


def test_no_table_is_made_for_a_model_that_would_not_use_it(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Probe("LlamaForCausalLM", "plain", None, {"tree": "trees do not grow here"})
    monkeypatch.setattr("lade.prewarming.run.probe", lambda model: found)
    with pytest.raises(
        UnsupportedModelError,
        match=r"LlamaForCausalLM plainly, so it would not use a table\. tree: trees do not grow",
    ):
        run("prewarm", "--model", folder)


# --- Ctrl-C and warnings --------------------------------------------------------------------


def ended(body: str) -> "subprocess.CompletedProcess[str]":
    """Run `lade generate` in a process where a function takes the place of loading a model."""
    program = (
        "import os, signal, sys, warnings\nimport lade.cli\nfrom lade.cli import app\n"
        f"def load(*args):\n{body}\n"
        "app.load = load\nsys.argv = ['lade', 'generate', 'x']\nlade.cli.main()"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_an_interrupt_is_told_in_a_line() -> None:
    done = ended("    os.kill(os.getpid(), signal.SIGINT)\n    signal.pause()")
    assert (done.returncode, done.stderr) == (130, "stopped\n")


def test_a_second_interrupt_leaves_at_once() -> None:
    again = "os.kill(os.getpid(), signal.SIGINT)"
    done = ended(f"    try:\n        {again}\n    finally:\n        {again}\n        print('on')")
    assert done.returncode == -signal.SIGINT
    assert done.stdout == done.stderr == ""


def test_warnings_of_lade_are_shown_as_notes_once_each() -> None:
    done = ended(
        "    from lade.errors import PlainDecodingWarning\n"
        "    for _ in range(2):\n"
        "        with warnings.catch_warnings():\n"
        "            warnings.simplefilter('always')\n"
        "            warnings.warn('it is slow', PlainDecodingWarning)\n"
        "    warnings.warn('somebody else')\n"
        "    raise ValueError('done')"
    )
    assert done.stderr.count("note: it is slow\n") == 1
    assert "<string>:10: UserWarning: somebody else" in done.stderr
    assert done.stderr.endswith("error: done\n")
    assert done.stderr.count("slow") == 1


def test_streamed_text_is_whole_and_drafted_tokens_are_marked(folder: str) -> None:
    from rich.console import Console

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "naïve 日本 🙂 ok"
    token_ids = tokenizer(text)["input_ids"]
    assert len(token_ids) > len(text)  # letters of several bytes come in pieces
    out = Console(force_terminal=True, color_system="standard", width=200)
    with out.capture() as capture:
        printer = TokenPrinter(tokenizer, out)
        for start in range(0, len(token_ids), 3):
            printer.show(Step(token_ids[start : start + 3], 4, num_accepted=2))
    shown = capture.get()
    assert "\x1b[1;32m" in shown
    plain = shown.replace("\x1b[1;32m", "").replace("\x1b[0m", "")
    assert plain == text
