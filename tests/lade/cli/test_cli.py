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
from urllib.error import URLError

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, T5Config
from typer.testing import CliRunner

from lade import errors
from lade.cli.app import app
from lade.cli.check import measure
from lade.cli.comparison import BothAnswers, Difference, find_difference, verdict, why_different
from lade.cli.demo import TokenPrinter
from lade.cli.demo_prompts import DEMO_PROMPTS
from lade.cli.failures import line_of
from lade.cli.generate import show_text
from lade.cli.options import Verification
from lade.cli.results import ResultFiles
from lade.config import VERIFICATIONS
from lade.errors import UnsupportedModelError
from lade.models.loading import check_reachable, find_model
from lade.prewarming import tables
from lade.probing.report import Probe
from lade.stats import Step
from ngram_pool import PoolFileError
from tests.lade.tiny import byte_tokenizer, tiny_model

LADE = [sys.executable, "-c", "from lade.cli import main; main()"]


def run(*args: str, **env: str) -> Any:
    wide = {"COLUMNS": "150", **env}
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
        *([], ["generate"], ["chat"], ["prewarm"], ["compile"], ["demo"], ["check"], ["bench"]),
        *(["pool"], ["pool", "build"], ["pool", "info"], ["pool", "merge"], ["pool", "prune"]),
        *(["pool", "forget"], ["pool", "export"]),
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
    for command in (["generate"], ["bench"]):
        output = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"}).output
        assert "https://ai.google.dev/gemma/terms)." in output
        assert "--max-draft-tokens " in output


def test_a_prediction_is_read_from_a_file(folder: str, tmp_path: Path) -> None:
    options = ["--model", folder, "--dtype", "float32", *SHORT]
    without = run("generate", "abcabc", *options)
    path = tmp_path / "predicted.txt"
    path.write_bytes(without.stdout.removesuffix("\n").encode() + b"\r\n")
    predicted = run("generate", "abcabc", *options, "--prediction", str(path))
    assert predicted.stdout == without.stdout
    assert "prediction" in predicted.stderr
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="expected UTF-8 in"):
        run("generate", "abcabc", *options, "--prediction", str(path))
    path.write_bytes(b"\n")
    with pytest.raises(ValueError, match=r"expected a prediction in .*, got no text"):
        run("generate", "abcabc", *options, "--prediction", str(path))
    plain = ("--prediction", str(path), "--verification", "plain")
    with pytest.raises(ValueError, match="expected no --prediction with --verification plain"):
        run("generate", "abcabc", *options, *plain)
    with pytest.raises(ValueError, match="got an empty text"):
        run("generate", "abcabc", "--model", "")


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


def test_generate_ends_with_the_answer(folder: str) -> None:
    assert run("generate", "abcabc", "--model", folder, *SHORT).exit_code == 0
    assert not [*tables.tables_folder().glob("*.safetensors")]  # nothing is learned behind it


def test_a_command_says_what_it_waits_for(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ngram_pool.compiling.cache_folder", lambda module: tmp_path)
    first = run("generate", "abcabc", "--model", folder, *SHORT).stderr
    assert first.startswith("Loading torch and transformers …\n")
    assert "The first run compiles kernels, for up to a minute …\nChecking how" in first
    (tmp_path / "a.nbi").touch()
    assert "compiles" not in run("generate", "abcabc", "--model", folder, *SHORT).stderr


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_is_shown_no_control_characters(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\x1b]0;title\x07\tb\x9b31m\r\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    show_text(text)
    assert capsys.readouterr().out == ("a]0;title\tb31m\n" if is_terminal else text)


@pytest.mark.exhaustive
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
    options += ["--prompt", "one", "--prompt", "two", "--verification", "chain"]
    result = run("demo", *options, "--json", str(path))
    assert json.loads(path.read_text())["settings"]["verification"] == "chain"
    assert "prompt 2" in result.stdout
    assert DEMO_PROMPTS[0][0] not in result.stdout


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


def test_shells_complete_commands_and_options() -> None:
    typed = {"COMP_WORDS": "lade generate --top", "COMP_CWORD": "2"}
    assert run(**typed, _LADE_COMPLETE="complete_bash").stdout.split() == ["--top-p", "--top-k"]
    assert "--install-completion" in run("--help").stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["generate", "x", "--model", "does-not-exist-anywhere"], "could not be loaded"),
        (
            ["generate", "x", "--model", "a b/c d"],
            "'a b/c d' could not be loaded: Repo id",
        ),
        (["generate", "x", "--device", "nowhere", "--model", "y"], "expected a torch device"),
        (["bench", "--json", "no/such/folder/x.json"], "no such folder: no/such/folder"),
        (["generate", "x", "--save-pool", "no/such/x.pool"], "no such folder: no/such"),
        (["generate", "x", "--pool", __file__], "expected a file that NGramPool.save wrote"),
        (["chat", "--save-pool", __file__], "expected a file that NGramPool.save wrote"),
        (["serve", "--host", "192.0.2.1", "--model", "y"], "cannot listen at 192.0.2.1:8000"),
        (["bench", "--top-p", "0.5"], "expected a temperature above 0 with top_p=0.5"),
    ],
)
def test_errors_are_one_line_without_a_traceback(
    arguments: list[str], text: str, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, told = command(*arguments)
    assert code == 1
    assert text in told
    assert "Traceback" not in told


def test_a_model_that_is_not_loaded_leaves_no_empty_results(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(ValueError, match="no such folder"):
        run("bench", "--model", "./nofolder", "--json", str(path))
    assert not path.exists()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        ResultFiles(path).check()


@pytest.mark.parametrize(
    ("module", "body", "cause", "is_told"),
    [
        ("lade.config", "raise ValueError('expected 1, got 2')", None, True),
        ("ngram_pool.pool", "raise TypeError('expected a pool, got 2')", None, True),
        ("lade.config", "raise OSError('expected a free port, got 1')", None, True),
        ("lade.cli.pool", "open('/nowhere/a.pool')", None, True),
        ("lade.cli.pool", "import pathlib; pathlib.Path('/nowhere/b').read_text()", None, True),
        ("torch", "raise errors.UnsupportedOptionError('no beams')", None, True),
        ("lade.models", "raise ValueError('not loaded') from KeyError()", KeyError, True),
        ("lade.decoder", "raise RuntimeError('a fault')", None, False),
        ("lade.decoder", "list(zip([1], [], strict=True))", None, False),
        ("lade.decoder", "raise ValueError(int('x'))", None, False),
        ("lade.decoder", "import json; json.loads('{')", None, False),
        ("torch.nn", "raise ValueError('a tensor')", None, False),
        ("transformers", "raise OSError('a model')", None, False),
        ("torch._inductor", "open('/nowhere/cache')", None, False),
        ("lade_of_somebody", "raise ValueError('a tensor')", None, False),
    ],
)
def test_an_error_is_one_line_where_it_was_written_for_users(
    module: str, body: str, cause: type[Exception] | None, is_told: bool
) -> None:
    try:
        exec(body, {"__name__": module, "errors": errors})
    except Exception as raised:
        error = raised
    assert (line_of(error) is not None) == is_told
    if is_told:
        hint = " (--debug shows the whole error)" if cause else ""
        assert line_of(error) == f"error: {error}{hint}"
    with pytest.raises(type(error)) as again:  # as benchmarks do that keep what they measured
        raise error
    assert (line_of(again.value) is not None) == is_told


@pytest.mark.parametrize(
    "arguments",
    [
        ["--debug", "pool", "info", __file__],
        ["pool", "--debug", "info", __file__],
        ["pool", "info", __file__, "--debug"],
    ],
)
def test_debug_shows_the_traceback_wherever_it_stands(arguments: list[str], command: Any) -> None:
    code, told = command("pool", "info", __file__)
    assert (code, len(told.splitlines())) == (1, 1)
    with pytest.raises(PoolFileError) as error:
        command(*arguments)
    assert told == f"error: {error.value}\n"


def test_debug_behind_two_dashes_is_no_option_and_alone_no_command() -> None:
    assert "Missing argument 'FILE" in run("pool", "info", "--debug").stderr
    assert "'--debug'" in run("pool", "info", "--", "--debug").stderr
    assert "Usage" in run("--debug").output


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


def test_generate_samples_from_the_likeliest_and_minds_what_was_said(folder: str) -> None:
    options = ["--temperature", "1.5", "--top-k", "3", "--repetition-penalty", "0.1"]
    result = run("generate", "abcabc", "--model", folder, *SHORT, *options, "--seed", "7")
    torch.manual_seed(7)
    sampling = {"do_sample": True, "temperature": 1.5, "top_k": 3}
    assert result.stdout == plain_text(folder, "abcabc", **sampling, repetition_penalty=0.1) + "\n"
    result = run("generate", "abcabc", "--model", folder, *SHORT, *options[-2:])
    assert result.stdout == plain_text(folder, "abcabc", repetition_penalty=0.1) + "\n"
    assert result.stdout != run("generate", "abcabc", "--model", folder, *SHORT).stdout


@pytest.mark.exhaustive
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
        (["--top-k", "5"], "expected a temperature above 0 with top_k=5"),
        (["--temperature", "1", "--top-p", "0"], "expected top_p above 0"),
        (["--temperature", "1", "--top-k", "-1"], "expected top_k of 0 or more"),
        (["--repetition-penalty", "0"], "expected a finite repetition_penalty above 0"),
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
    assert re.search(r"Speed-up \d+\.\d\dx over plain generate", result.stdout)
    assert re.search(r"^one +\d+ .* same$", result.stdout, re.MULTILINE)
    assert "1 of 1 same" in result.stdout
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
    rows: list[BothAnswers] = []
    from lade.models.loading import load

    assert measure(load(folder, dtype="float32"), 9.0, rows) is None
    assert [(row.title, row.num_plain) for row in rows] == [("one", 36), ("two", 24)]
    assert all(row.difference is None for row in rows)


def test_check_says_why_nothing_better_and_measures_no_plain_model(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: Any = {"tree": "trees do not grow here", "chain": "chains [1, 2] neither"}
    found = Probe("LlamaForCausalLM", "plain", "sdpa", reasons)
    monkeypatch.setattr("lade.cli.check.probe", lambda model: found)
    result = run("check", folder)
    assert result.exit_code == 0
    assert "Verification by plain" in result.stdout
    assert "  not by tree: trees do not grow here" in result.stdout
    assert "  not by chain: chains [1, 2] neither" in result.stdout
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


@pytest.mark.parametrize(
    "command",
    [["generate", ""], ["generate", " \n"], ["generate", "", "--raw"], ["demo", "--prompt", ""]],
)
def test_a_prompt_without_a_token_is_refused(
    command: list[str], folder: str, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "chats")
    (tmp_path / "chats" / "chat_template.jinja").write_text("<{{ messages[-1].content }}>")
    for model in (folder, tmp_path / "chats"):
        with pytest.raises(ValueError, match="expected a prompt of one token or more, got none"):
            run(*command, "--model", str(model))


@pytest.fixture(scope="module")
def of_learned_positions(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved tiny model with positions for 64 tokens, and none beyond."""
    path = tmp_path_factory.mktemp("learned")
    byte_tokenizer().save_pretrained(path)
    model = tiny_model("opt", dtype=torch.float32, vocab_size=256, max_position_embeddings=64)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    return str(path)


@pytest.mark.exhaustive
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
        run("bench", "--prompts", str(prompts), *options)


@pytest.mark.exhaustive
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


@pytest.mark.parametrize("model", ["some.gguf", "models/Some.GGUF", __file__])
def test_a_file_is_no_model(model: str) -> None:
    with pytest.raises(ValueError, match=rf"or a folder with .*, got the file {model}$"):
        run("generate", "x", "--model", model)


def test_what_is_meant_is_guessed_where_the_hub_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise URLError("no network")

    monkeypatch.setattr("lade.models.loading.urlopen", refuse)
    monkeypatch.setattr("lade.models.loading.getproxies", dict)
    with pytest.raises(ValueError, match=r"no folder of that name, and .* \(no network\)$"):
        check_reachable("nobody/nothing")
    with pytest.raises(ValueError, match=r"\); smollm2-135m-instruct is meant, perhaps$"):
        check_reachable("SmolLM2-135M-Instuct")


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
        "import os, signal, sys, warnings\nimport lade.cli\n"
        "from lade.cli.options import LoadOptions\n"
        f"def load(*args):\n{body}\n"
        "LoadOptions.load = load\nsys.argv = ['lade', 'generate', 'x']\nlade.cli.main()"
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
        "    raise ValueError('done')  # which is none of lade's own errors"
    )
    assert done.stderr.count("note: it is slow\n") == 1
    assert "<string>:10: UserWarning: somebody else" in done.stderr
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("ValueError: done\n")
    assert done.stderr.count("slow") == 1


def test_streamed_text_is_whole_and_drafted_tokens_are_marked(folder: str) -> None:
    from rich.console import Console

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "naïve 日本 🙂 ok"
    token_ids = tokenizer(f"{text}\x1b]0;title\x07")["input_ids"]
    assert len(token_ids) > len(text)  # letters of several bytes come in pieces
    out = Console(force_terminal=True, color_system="standard", width=200)
    with out.capture() as capture:
        printer = TokenPrinter(tokenizer, out)
        for start in range(0, len(token_ids), 3):
            printer.show(Step(token_ids[start : start + 3], 4, num_accepted=2))
    shown = capture.get()
    assert "\x1b[1;32m" in shown
    plain = shown.replace("\x1b[1;32m", "").replace("\x1b[0m", "")
    assert plain == f"{text}]0;title"  # without what would change the terminal
