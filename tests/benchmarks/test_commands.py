"""`python -m benchmarks`: each command runs on a tiny model, and its numbers are what it says."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lade
from benchmarks import arena, cpu_engines, forwards, pool
from benchmarks.__main__ import app, main
from benchmarks.gguf_engines import Continuation, write_gguf
from benchmarks.methods import METHODS, Given
from benchmarks.predictions import EDITS, measured
from benchmarks.prompts import Half
from benchmarks.rivals.catalogue import RIVALS
from tests.lade.tiny import byte_tokenizer, tiny_model

RESULTS = Path(__file__).parents[2] / "docs" / "results"
DRAFTING = "plain,pool+assistant,hf_assistant,hf_early_exit"


def run(*args: Any) -> Any:
    wide = {"COLUMNS": "150"}
    return CliRunner().invoke(app, [*map(str, args)], catch_exceptions=False, env=wide)


@pytest.fixture
def options(folder: str, tmp_path: Path) -> list[Any]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcabc\nxyxyxy\nhello\n")
    options = ["--prompts", prompts, "--model", folder, "--dtype", "float32"]
    return [*options, "--max-new-tokens", 8]


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., Any]:
    """Run a command and return what it wrote."""

    def read(*args: Any) -> Any:
        path = tmp_path / "result.json"
        done = run(*args, "--json", path)
        content = json.loads(path.read_text())
        assert str(tmp_path) not in path.read_text()  # results are published
        return {**content, "exit_code": done.exit_code, "shown": done.output}

    return read


def interrupt(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, nth: int) -> None:
    """Have a function interrupt when it is called for the nth time."""
    whole, calls = getattr(place, name), list[int]()

    def call(*args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == nth:
            raise KeyboardInterrupt
        return whole(*args, **named)

    monkeypatch.setattr(place, name, call)


def test_every_command_has_help_and_names_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for command in app.registered_commands:
        assert "Usage" in run(command.name, "--help").stdout
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello")
    wrong = ["benchmarks", "arena", "--prompts", str(prompts), "--methods", "wrong"]
    monkeypatch.setattr("sys.argv", wrong)
    with pytest.raises(SystemExit, match="1"):
        main()
    said = capsys.readouterr().err
    assert said.startswith("error: expected different ones of lade, ")
    assert said.count("\n") == 1


# --- run ------------------------------------------------------------------------------------


def test_speed_ups_are_ratios_to_plain_and_the_median_of_passes_counts(
    options: list[Any], results: Callable[..., Any]
) -> None:
    names = ["plain", "prompt_lookup", "lade", "lade_fresh", "rival_goose"]
    found = results("run", *options, "--methods", ",".join(names), "--passes", 3, "--limit", 1)
    assert [*found["settings"]["methods"]] == names
    assert (found["settings"]["prompts"]["num"], found["settings"]["left_out"]) == (1, {})
    overall = found["summary"].pop("overall")
    for name, entry in overall.items():
        passes = entry["speedup_of_each_pass"]
        assert len(passes) == 3
        assert entry["speedup"] == pytest.approx(median(passes), rel=1e-4), name
        assert entry["same_text"] == entry["share_repeated"] == 1.0
    assert overall["plain"]["speedup_of_each_pass"] == [1.0, 1.0, 1.0]
    assert overall["plain"]["mean_accepted_tokens"] == 1.0
    assert overall["lade"]["mean_accepted_tokens"] >= 1.0
    assert overall["lade"]["overhead"] > 0
    for of_methods in found["summary"].values():  # of categories, the speeds alone
        assert {(*entry,) for entry in of_methods.values()} == {("num_prompts", "speedup")}


def test_samples_and_batches_leave_out_what_has_one_row(
    options: list[Any], results: Callable[..., Any]
) -> None:
    options += ["--temperature", 0.8, "--top-p", 0.95, "--seed", 7]
    found = results("run", *options, "--batch-size", 2, "--num-return-sequences", 2)
    assert "prompt_lookup is left out: transformers runs it on one prompt" in found["shown"]
    names = ["no_drafts", "lade", "lade_fresh"]
    assert [*found["settings"]["methods"]] == ["plain", *names]
    assert {entry["same_text"] for entry in found["summary"]["overall"].values()} == {1.0}


def test_draft_models_are_compared(
    options: list[Any], results: Callable[..., Any], tmp_path: Path
) -> None:
    options += ["--methods", DRAFTING, "--limit", 1]
    found = results("run", *options, "--first-layers", 1)
    assert found["settings"]["assistant"] == "self:int8"
    (overall,) = (of for group, of in found["summary"].items() if group == "overall")
    assert all(overall[name]["same_text"] == 1 for name in DRAFTING.split(","))
    assisted = overall["hf_assistant"]
    # As lade counts: steps without the prompt's, tokens of a step the accepted ones and one more.
    assert assisted["mean_accepted_tokens"] > 1
    assert assisted["acceptance_rate"] <= 1


def test_what_was_measured_before_an_interruption_is_kept(
    options: list[Any], results: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, type(tiny_model("llama")), "generate", 5)  # the first one warms up
    options += ["--methods", "plain", "--passes", 3, "--limit", 2]
    found = results("run", *options)
    assert found["exit_code"] == 130
    assert "stopped after 3 of 6" in found["shown"]
    assert "speedup_of_each_pass" not in found["summary"]["overall"]["plain"]  # a pass is left out
    assert found["settings"]["interrupted"] is True


# --- arena and fit --------------------------------------------------------------------------


def test_the_arena_counts_the_steps_that_calls_take(
    options: list[Any], results: Callable[..., Any], folder: str
) -> None:
    names, sizes = ["lade", *RIVALS], [2, 8]
    options += ["--methods", ",".join(names), "--max-draft-tokens", "2,8", "--limit", 1]
    options[options.index("--max-new-tokens") + 1] = 20
    found = results("arena", *options)
    runs = {(each["method"], each["max_draft_tokens"]): each for each in found["runs"]}
    assert {size for _, size in runs} == {*sizes, *found["settings"]["curves"]}
    loaded = lade.models.load(folder, dtype="float32")
    inputs = [lade.models.encode(loaded.tokenizer, "abcabc", "cpu")]
    for name in names:
        for size in sizes:
            given = Given(lade.Config(max_draft_tokens=size))
            method = METHODS["lade_fresh" if name == "lade" else name].make(given)
            answers = [method(loaded.model, each, {"max_new_tokens": 20}) for each in inputs]
            of_size = runs[name, size]
            assert sum(of_size["steps"].values()) == sum(
                each.stats.num_steps for each in answers
            ), name
            assert max(map(int, of_size["steps"])) <= size
            for curve, speed in of_size["speeds"].items():
                cost = sum(arena.cost(curve, 1 + int(n)) * t for n, t in of_size["steps"].items())
                num_tokens = sum(each.stats.num_committed_tokens for each in answers)
                assert speed == pytest.approx(num_tokens * arena.cost(curve, 1) / cost, rel=1e-4)
    assert arena.cost("16-bit weights", 12) == pytest.approx(2.125)
    assert arena.cost("16-bit weights", 24) == pytest.approx(2.7 + 8 * 0.14375)
    with pytest.raises(ValueError, match="expected a table of the model for lade_prewarmed"):
        run("arena", *options[:-6], "--methods", "lade_prewarmed")


def test_weights_are_fitted_to_one_half_of_the_prompts(
    options: list[Any], results: Callable[..., Any]
) -> None:
    halves = [Half.of(prompt_id) for prompt_id in ("81", "84", "560", "translation-1")]
    assert halves == ["fit", "publish", "fit", "fit"]  # in any file
    found = results("fit", *options, "--half", "publish")
    published = json.loads((RESULTS / "weights.json").read_text())
    assert {*map(len, found["weights"])} == {*map(len, published["weights"])}
    assert "\n    (" in found["shown"]  # as in ngram_pool/weights.py


# --- engines ------------------------------------------------------------------------------


def test_engines_that_are_not_installed_are_left_out(
    options: list[Any], results: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_engines, "find_spec", lambda name: None)
    found = results("cpu-engines", *options, "--limit", 2)
    reported = " ".join(found["shown"].split())
    assert "is left out: it is not installed: pip install openvino-genai " in reported
    (rows,) = found["runs"].values()
    assert [*rows] == ["plain", "prompt_lookup", "no_drafts", "lade_fresh"]
    assert all(row[2] > 0 < row[3] and row[4] == 1.0 for row in rows.values())


def test_engines_are_compared_answer_by_answer() -> None:
    """Speeds are of what comes after the first tokens; medians, of ratios and of first tokens."""
    plain = [Continuation([1, 2, 3, 4, 5], 1, sec, 2.0, 4.0) for sec in (0.1, 0.2, 0.6)]
    ours = [Continuation([1, 2, 3, 4, 5], 1, 0.3, rest, 1.0) for rest in (1.0, 0.5, 0.25)]
    ours[2] = ours[2]._replace(token_ids=[1, 2, 3, 4, 6])
    found = cpu_engines.summarise({"plain": plain, "lade_fresh": ours})
    assert found["plain"] == [2.0, 1.0, 1.0, 0.2, 1.0]
    assert found["lade_fresh"] == [6.86, 4.0, 4.0, 0.3, 0.667]


def test_a_file_for_engines_has_the_weights_of_the_model(folder: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = lade.models.load(folder, dtype="float32")
    write_gguf(loaded.model, loaded.tokenizer, tmp_path / "model.gguf", "float32")
    weights = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").state_dict()
    for name, weight in loaded.model.state_dict().items():
        assert torch.equal(weights[name], weight), name
    with pytest.raises(ValueError, match=r"expected weights that are the same in float16, got "):
        write_gguf(loaded.model, loaded.tokenizer, tmp_path / "half.gguf", "float16")


# --- parts ----------------------------------------------------------------------------------


def test_forwards_are_timed_with_both_products(
    results: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwards, "_NUM_ROUNDS", 1)
    load = "benchmarks.__main__.load_model"

    def loaded(width: int) -> Any:
        model = tiny_model("llama", hidden_size=width, dtype=torch.float32)
        return lambda *_, **__: lade.models.LoadedModel(model, None, "x")

    monkeypatch.setattr(load, loaded(256))
    found = results("forwards", "--context", "20")
    assert {*found["seconds"]} == {"torch", "lade"}
    assert all(min(each["20"].values()) > 0 for each in found["seconds"].values())
    monkeypatch.setattr(load, loaded(16))
    with pytest.raises(ValueError, match="expected a model on a CPU with large layers"):
        run("forwards", "--context", 20)


def test_a_table_is_measured_as_it_grows(options: list[Any], results: Callable[..., Any]) -> None:
    found = results("prewarming", *options, "--minutes", "0.002,0.01", "--max-draft-tokens", 4)
    without, first, second = found["rows"]
    assert (without["minutes"], second["minutes"]) == (0.0, 0.01)
    assert 0 < first["num_contexts"] < second["num_contexts"]
    assert "num_contexts" not in without
    for row in found["rows"]:
        assert row["4"]["mean_accepted_tokens"] >= 1 <= row["auto"]["mean_accepted_tokens"]


@pytest.mark.exhaustive  # processes that begin anew
def test_the_budget_is_held_against_the_best_fixed_number_of_each_process(
    options: list[Any], results: Callable[..., Any]
) -> None:
    given = [each for each in options if each not in ("--dtype", "float32")]
    more = ["--processes", 1, "--max-draft-tokens", "0,3", "--threads", 1]
    found = results("budget", *given, *more, "--minutes", 0)
    assert {*found["summary"]} == {"float32, a job", "float32, torch alone"}
    for (only,) in found["processes"].values():
        assert only["num_prompts"] == 1  # no other begins where no time is left
        rates = only["tokens_per_sec"]
        assert {*rates} == {"auto", "0", "3"}
        best = max(rates["0"], rates["3"])
        assert only["ratio"] == pytest.approx(rates["auto"] / best, rel=1e-5)  # six digits each
        assert only["ratio_of_first"] > 0


@pytest.mark.exhaustive  # processes that begin anew
def test_busy_machines_are_measured_in_processes(
    options: list[Any], results: Callable[..., Any]
) -> None:
    given = [each for each in options if each not in ("--dtype", "float32")]
    more = ["--processes", 1, "--dtypes", "float32", "--max-new-tokens", 4]
    found = results("busy", *given, *more)
    (rates,) = found["summary"].values()
    assert {"plain", "plain, 1 busy", "lade", "lade, 1 busy"} <= {*rates}
    assert "plain, 1 busy, one thread" not in rates
    assert min(rates.values()) > 0


def test_a_full_pool_is_timed_and_an_interruption_keeps_its_sizes(
    results: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, pool, "time_pool", 3)  # the first one compiles
    found = results("pool", "--max-tokens", 100_000)
    assert (found["exit_code"], found["settings"]["interrupted"]) == (130, True)
    (timing,) = found["timings"]
    assert timing["num_tokens"] == 10_000
    assert 0 < timing["nodes_per_draft"] <= pool.MAX_DRAFT_TOKENS
    assert 0 < timing["draft_us"] <= timing["draft_p95_us"]
    assert min(timing.values()) > 0


def test_an_edit_takes_fewest_steps_with_the_text_as_the_prediction() -> None:
    model = tiny_model(vocab_size=256, dtype=torch.float32)
    short = EDITS[1]._replace(answer=EDITS[1].answer[:80])
    found = measured(lade.models.LoadedModel(model, byte_tokenizer(), "tiny"), short, 1)
    assert found["num_tokens"] == 80
    assert found["text"].keys() == {"lade", "prediction", "prompt_lookup"}
    for methods in (found["request"], found["text"]):
        assert methods["prediction"]["num_steps"] <= methods["lade"]["num_steps"] < 80
