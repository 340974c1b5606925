"""Help, and what users do wrong: an error of one line that says what was expected."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import T5Config

from lade import __version__
from ngram_pool import PoolFileError
from tests.lade.apps.cli.command import SHORT, run

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[4]
COMMANDS = ["generate", "chat", "serve", "demo", "bench", "prewarm", "warm-up", "pool build"]


# --- help ---------------------------------------------------------------------------------------


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom lade.apps.cli import main\nsys.argv = ['lade', '--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers', 'numba') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[]")
    for word in {command.split()[0] for command in COMMANDS}:
        assert f" {word} " in done.stdout


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_each_command_has_help_that_fits_a_terminal(command: str) -> None:
    done = run(*command.split(), "--help", columns=80)
    assert done.code == 0
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 40  # a screen
    # Paragraphs flow: a line ends where the next word would not fit.
    for line, after in pairwise(lines):
        is_prose = line.startswith(" ") and after.startswith(" ") and line.strip()
        if is_prose and after.strip() and not after.strip().startswith("•"):
            assert len(line.rstrip()) + 1 + len(after.split()[0]) > 76, line


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "docs/guides/*.md"])
def test_commands_that_pages_print_have_their_options(page: str) -> None:
    text = "".join(path.read_text().replace("\\\n", "") for path in ROOT.glob(page))
    blocks = re.findall(r"^```(\S*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for kind, block in blocks if not kind for line in block.splitlines()]
    commands = [each for line in lines for each in line.split("|") if each.strip()[:5] == "lade "]
    assert commands or page == "README.md"
    for words in (shlex.split(each, comments=True)[1:] for each in commands):
        (name,) = [each for each in COMMANDS if words[: len(each.split())] == each.split()]
        shown = run(*name.split(), "--help", columns=150).out
        for option in (each for each in words if each.startswith("--")):
            assert f" {option} " in shown, f"lade {name}: {option}"


def test_version_and_completion() -> None:
    assert run("--version").out.strip() == __version__
    done = run(COMP_WORDS="lade generate --top", COMP_CWORD="2", _LADE_COMPLETE="complete_bash")
    assert done.out.split() == ["--top-p", "--top-k"]


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "some/model"], "No such command 'check'"),
        (["pool", "merge", "a", "b"], "No such command 'merge'"),
        (["generate", "x", "--max-draft-tokens", "4"], "No such option: --max-draft-tokens"),
        (["--debug", "pool", "build"], "Missing argument"),
        (["serve", "--max-prefix-bytes", "-1"], "greater than or equal to 0"),
        (["serve", "--unknown-fields", "maybe"], "not one of 'refuse', 'ignore'"),
        (["pool", "build", "/", "--out", "a", "--capacity-tokens", "9" * 12], "equal to 536870912"),
    ],
)
def test_unknown_words_are_told_with_what_there_is(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert said in done.err
    assert "--help" in done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "x", "--model", "a b/c d"], "'a b/c d' could not be loaded: Repo id"),
        (["generate", "x", "--model", ""], "got an empty text"),
        (["generate", "x", "--model", "https://h/a"], "the Hub is named as Qwen/Qwen3-0.6B"),
        (["generate", "x", "--dtype", "int8"], "bfloat16, float16, float64, got 'int8'"),
        *(
            (["generate", "x", "--device", name], f"such as cpu, got '{name}' (")
            for name in ("", "cuda:99", "meta", "tpu", "gpu")
        ),
        (["generate", "x", "--threads", "99999"], "expected 1 to 1024 threads, got 99999"),
        *(
            (["generate", "x", "--model", name], f"no such folder: {name}")
            for name in ("./nofolder", "/no/folder", "no/such/folder", "~/nofolder")
        ),
        *(
            (["generate", "x", "--model", name], f"got the file {name}")
            for name in ("some.gguf", "models/Some.GGUF", __file__)
        ),
        (["generate", "x", "--save-pool", "no/such/x.pool"], "no such folder: no/such"),
        (["generate", "x", "--pool", __file__], "it is not a pool file"),
        (["chat", "--save-pool", __file__], "it is not a pool file"),
        (["generate", " \n", "--model", str(HERE)], "the prompt is empty"),
        (["generate", "", "--raw", "--model", str(HERE)], "the prompt is empty"),
        (["generate", "x", "--system", "x", "--raw"], "expected --system or --raw, got both"),
        (["generate", "x", "--stop", ""], "expected each --stop to be a text of one character"),
        (["generate", "x", "--top-p", "0.5"], "expected a temperature above 0 with top_p=0.5"),
        (["generate", "x", "--top-k", "5"], "expected a temperature above 0 with top_k=5"),
        (["generate", "x", "--seed", str(2**63)], "expected a seed below 2**63, got 9223372"),
        (["generate", "x", "--seed", "-1"], "expected seed to be an integer of 0 or more"),
        (["generate", "x", "--max-new-tokens", "0"], "max_new_tokens to be an integer of 1"),
        (["demo", "--max-new-tokens", "0"], "expected max_new_tokens to be an integer of 1"),
        (["bench", "--temperature", "-1"], "expected a finite temperature"),
        (["prewarm", "--threads", "0"], "expected 1 to 1024 threads, got 0"),
        (["generate", "x", "--temperature", "1", "--top-p", "1.5"], "expected top_p above 0"),
        (["generate", "x", "--temperature", "1", "--top-p", "0"], "expected top_p above 0"),
        (
            ["generate", "x", "--temperature", "1", "--top-k", "-1"],
            "expected top_k to be an integer of 0 or more",
        ),
        (["generate", "x", "--system", "\udcff"], "expected UTF-8 as prompt"),
        (["generate", "ab\udcff"], "expected UTF-8 as prompt, got byte 0xff after 2 bytes"),
        (["generate", "-"], "expected UTF-8 on standard input, got byte 0xff after 2 bytes"),
        (["chat"], "expected a terminal to chat in; lade generate - answers a question"),
        (["bench", "--json", "no/such/folder/x.json"], "no such folder: no/such/folder"),
        (["pool", "build", __file__, "--out", "no/a.pool"], "no such folder: no"),
        *(
            (["serve", f"--{name}", value, "--port", "0"], said)
            for name, value, said in (
                ("allowed-host", "", "expected allowed hosts by their names alone, got ''"),
                ("allowed-host", "http://x", "allowed hosts by their names alone, got 'http"),
                ("host", "", "expected an address to listen at, got ''"),
                ("host", "a..b", "cannot listen at a..b"),
                ("api-key", "", "expected API keys of one character or more"),
                ("api-key", "ä", "expected API keys that a header may have, in ASCII"),
                ("max-queue", "-1", "expected max_queue of at least 0, got -1"),
                ("pool-memory-bytes", "-5", "expected pool_memory_bytes of at least 0, got -5"),
                ("grace-sec", "inf", "expected grace_sec of at least 0, got inf"),
                ("timeout", "nan", "expected timeout_sec (--timeout) above 0, got nan"),
                ("pools", "/proc/pools", "cannot keep pools in"),
                ("corpus", "a", "expected --corpus NAME=FILE"),
                ("corpus", "a=/no/such/file", "no such file: /no/such/file"),
                ("corpus", f"a={__file__}", "it is not a pool file"),
            )
        ),
        (["serve", "--host", "192.0.2.1", "--model", "y"], "cannot listen at 192.0.2.1:8000"),
        (["serve", "--port", "70000"], "expected a port of 0 to 65535"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_loaded(arguments: list[str], said: str) -> None:
    assert said.lower() in run(*arguments, given=b"ab\xff").error_line.lower()


def test_a_system_prompt_and_a_question_without_a_place_are_told(
    folder: str, templated: Any
) -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    for model, said in (
        (folder, "has no chat template"),
        (templated(refusing), "refuses it (no system)"),
        (templated("{{ messages[-1]['content'] }}"), "leaves it out"),
    ):
        done = run("generate", "ab", "--model", model, "--system", "be brief", *SHORT)
        assert done.error_line.startswith("error: expected no system prompt: ")
        assert said in done.error_line
    said = run("demo", "--prompt", "", "--model", folder).error_line
    assert "the prompt is empty" in said
    said = run("generate", "-", "--model", folder, *SHORT, given="x" * 600).error_line
    assert "expected a prompt of at most 512 tokens" in said


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_file_of_a_model_is_an_error_of_one_line(
    name: str, folder: str, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    done = run("generate", "x", "--model", tmp_path / "copy")
    assert f"error: the model '{tmp_path / 'copy'}' could not be loaded: " in done.error_line
    assert done.error_line.endswith(" (lade --debug … shows the whole error)")


def test_what_is_missing_in_a_folder_or_machine_is_named(folder: str, tmp_path: Path) -> None:
    copy, empty, other = tmp_path / "copy", tmp_path / "empty", tmp_path / "t5"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("token*"))
    empty.mkdir()
    shutil.copytree(folder, other)
    T5Config(vocab_size=256, d_model=8, d_ff=8, num_layers=1).save_pretrained(other)
    for model, said in (
        (copy, "it has no tokenizer"),
        (empty, "it has no tokenizer"),
        (other, "T5Config"),
    ):
        assert said in run("generate", "x", "--model", model).error_line
    results = tmp_path / "x.json"
    assert run("bench", "--model", "./nofolder", "--json", results).code == 1
    assert not results.exists()


def test_debug_shows_the_traceback(folder: str, tmp_path: Path) -> None:
    (tmp_path / "no.pool").write_text("text")
    command = ["generate", "x", "--pool", str(tmp_path / "no.pool"), "--model", folder]
    assert "no.pool" in run(*command).error_line
    with pytest.raises(PoolFileError):
        run("--debug", *command)


def test_faults_keep_their_traceback(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("of torch")

    monkeypatch.setattr("lade.generate", fail)
    with pytest.raises(ValueError, match="of torch"):
        run("generate", "x", "--model", folder)


def test_a_missing_extra_is_named_with_its_pip_line() -> None:
    program = "import sys; sys.modules['typer'] = None\nfrom lade.apps.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert f'pip install "{ROOT}[cli]"' in done.stderr  # tests run in an editable installation
    assert "Traceback" not in done.stderr


def test_closed_streams_and_the_c_locale_are_no_faults() -> None:
    program = "import sys, lade.apps.cli as it; print(chr(26085), file=it.replacing(sys.stdout))"
    for command, *expected in (
        ("-m lade generate - <&- >&-", 1, "", "error: the prompt is empty\n"),
        (f"-c {shlex.quote(program)}", 0, "?\n", ""),
    ):
        shell = ["sh", "-c", f"exec {sys.executable} {command}"]
        env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        done = subprocess.run(shell, env=env, capture_output=True, text=True)
        assert [done.returncode, done.stdout, done.stderr] == expected


# --- Ctrl-C and warnings ------------------------------------------------------------------------


def ended(body: str) -> "subprocess.CompletedProcess[str]":
    """Run `lade generate` in a process where a function takes the place of loading a model."""
    program = (
        "import os, signal, sys, warnings\nimport lade.apps.cli\n"
        "from lade.apps.cli.options import LoadOptions\n"
        f"def load(*args):\n{body}\n"
        "LoadOptions.load = load\nsys.argv = ['lade', 'generate', 'x']\nlade.apps.cli.main()"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_an_interrupt_is_told_in_a_line_and_a_second_one_leaves_at_once() -> None:
    done = ended("    os.kill(os.getpid(), signal.SIGINT)\n    signal.pause()")
    assert (done.returncode, done.stderr) == (130, "stopped\n")
    again = "os.kill(os.getpid(), signal.SIGINT)"
    done = ended(f"    try:\n        {again}\n    finally:\n        {again}\n        print('on')")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_warnings_of_lade_are_shown_as_notes_once_each() -> None:
    done = ended(
        "    from lade.errors import PlainDecodingWarning, UserError\n"
        "    for _ in range(2):\n"
        "        with warnings.catch_warnings():\n"
        "            warnings.simplefilter('always')\n"
        "            warnings.warn('it is slow', PlainDecodingWarning)\n"
        "    warnings.warn('somebody else')\n"
        "    raise UserError('done')"
    )
    assert done.stderr.count("note: it is slow\n") == done.stderr.count("slow") == 1
    assert "UserWarning: somebody else" in done.stderr
    assert done.stderr.endswith("error: done\n")
