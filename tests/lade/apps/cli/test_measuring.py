"""`lade demo` and `lade bench`: what they print, write, and keep when they are stopped."""

import json
import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lade.apps.chat.screen import Screen
from tests.lade.apps.cli.command import SHORT, Done, run

MORE = ("--max-new-tokens", "60")  # of which some are drafted


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("abcabc\nxyxyxy\nhello\n")
    return path


def measured(folder: str, path: Path, *options: object) -> tuple[Done, Any]:
    done = run("bench", "--model", folder, *SHORT, "--json", path, *options)
    return done, json.loads(path.read_text())


def test_demo_tells_what_lade_does_and_what_that_gains(folder: str) -> None:
    prompt = ["--prompt", "naïve 日本 🙂 abcabc\x1b]0;title\x07", "--prompt", "xyxy"]
    done = run("demo", "--model", folder, *SHORT, *prompt)
    assert done.code == 0
    flat, said = " ".join(done.out.split()), done.err
    assert said.index("Checking how the model") < said.index("Warming up: each method")
    titles = re.findall("^(plain|prompt_lookup|lade)$", done.out, re.MULTILINE)
    plain, lookup, ours = "plain", "prompt_lookup", "lade"
    assert titles == [plain, lookup, ours, lookup, ours, plain]  # each begins once
    texts = re.findall("^(?:plain|lade)\n([^\n]+)\n", done.out, re.MULTILINE)
    assert len(texts) == 4
    assert texts[0] == texts[1]
    for reported in (
        "LlamaForCausalLM",
        "float32, cpu",
        f"torch {metadata.version('torch')}",
        "LlamaForCausalLM verifies drafts by: tree",
    ):
        assert reported in flat
    assert len(re.findall(r"^lade +12 tokens .*x plain, same text$", done.out, re.MULTILINE)) == 2
    assert re.search(r"^prompt_lookup +12 tokens .*x plain, ", done.out, re.MULTILINE)
    assert not re.search("\x1b|drafted by the n-gram pool", done.out)  # no colours
    assert len(re.findall(r"^  lade +.* 100% ", done.out, re.MULTILINE)) == 3  # each, and overall


def test_the_demo_marks_drafted_tokens_in_a_terminal(folder: str) -> None:
    screen = Screen()
    done = run(
        "demo", "--model", folder, *SHORT, "--prompt", "xyxy", *MORE, screen=screen, TERM="xterm"
    )
    assert done.code == 0
    assert "Green: drafted by the n-gram pool and accepted." in screen.shown()
    assert "\x1b[1;32m" in screen.getvalue().split("Plain: ")[1]


def test_bench_prints_a_table_and_writes_everything(
    folder: str, prompts: Path, tmp_path: Path
) -> None:
    done, content = measured(folder, tmp_path / "x.json", "--prompts", prompts)
    assert done.code == 0
    assert "Greedy decoding (answers that loop are listed separately)" in done.out
    assert "verification: tree" in done.out
    settings, summary = content["settings"], content["summary"]
    assert (settings["dtype"], settings["interrupted"]) == ("float32", False)
    assert sum(of["plain"]["num_prompts"] for name, of in summary.items() if name != "overall") == 3
    for of_methods in summary.values():
        assert [*of_methods] == ["plain", "prompt_lookup", "no_drafts", "lade", "lade_fresh"]
        assert all(entry["same_text"] == 1.0 for entry in of_methods.values())


def test_bench_measures_beside_busy_processes(folder: str, prompts: Path, tmp_path: Path) -> None:
    done, results = measured(folder, tmp_path / "busy.json", "--prompts", prompts, "--busy")
    assert done.code == 0
    loads = results["summary"]["overall"]
    assert {*loads} >= {"plain", "lade", "plain, 1 busy", "lade, 1 busy"}
    assert all(each["same_text"] == 1 and each["tokens_per_cpu_sec"] > 0 for each in loads.values())
    assert re.search(r"^ *lade, 1 busy +\d+\.\d +\d+\.\d\dx ", done.out, re.MULTILINE)


def test_bench_has_engines_that_read_the_same_file(
    folder: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, module = list[Any](), "lade.apps.bench.rivals"

    def start(of: Any) -> Any:
        starts.append(of)
        return lambda token_ids, most, tell: token_ids[:1] * most

    def refused(*options: str) -> str:
        given = "--model", folder, *SHORT, "--prompts", prompts, "--rivals"
        return run("bench", *given, *options).err

    assert "--rivals goes with neither --busy nor --temperature" in refused("--busy")
    monkeypatch.setattr(f"{module}.find_spec", lambda _: None)
    why = refused()  # before the model is loaded
    assert "pip install openvino-genai llama-cpp-python" in why
    assert "Loading" not in why
    monkeypatch.setattr(f"{module}.find_spec", lambda _: True)
    assert "--rivals needs a GGUF file" in refused()
    monkeypatch.setattr(f"{module}.gguf_of", lambda _: tmp_path / "model.gguf")
    other = SimpleNamespace(start=start, module="other", package="other")
    monkeypatch.setattr(f"{module}.RIVALS", {"other": other})
    done, results = measured(folder, tmp_path / "x.json", "--prompts", prompts, "--rivals")
    assert done.code == 0
    assert [(each.drafts, each.num_tokens, each.dtype) for each in starts] == [
        (False, starts[0].num_tokens, "float32"),
        (True, starts[0].num_tokens, "float32"),
    ]
    found = results["summary"]["overall"]
    assert {*found} >= {"plain", "lade", "other", "other_lookup"}
    assert found["other"]["same_text"] == 0 < found["other_lookup"]["tokens_per_sec"]
    assert re.search(r"^  other +[\d.]+ +[\d.]+x +[\d.]+ +0% *$", done.out, re.MULTILINE)


def test_what_was_measured_before_ctrl_c_is_kept(
    folder: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    generate, calls = LlamaForCausalLM.generate, 0

    def interrupted(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal calls
        lookup = "prompt_lookup_num_tokens" in options
        calls += lookup  # once to warm up, and once for each prompt
        if lookup and calls > 2:
            raise KeyboardInterrupt
        return generate(self, *args, **options)

    monkeypatch.setattr(LlamaForCausalLM, "generate", interrupted)
    done, content = measured(folder, tmp_path / "x.json", "--prompts", prompts)
    assert done.code == 130
    assert "stopped after 1 of" in done.err
    assert {of["lade"]["num_prompts"] for of in content["summary"].values()} == {1}
    assert content["settings"]["interrupted"] is True


@pytest.mark.parametrize(
    ("content", "reported"),
    [
        (
            b"fine\n\xff\xfe\n",
            "expected prompts.txt in UTF-8: 'utf-8' codec can't decode byte 0xff in position 5",
        ),
        (b'{"question": "x"}', "expected line 1 of prompts.txt to be a prompt"),
        (b'\n{"prompt": 5}', "line 2 of prompts.txt to be a prompt, or a JSON object with"),
        (b'{"turns": []}', 'got {"turns": []}'),
        (b'{"prompt', "its JSON is broken: Unterminated string"),
        (b'{"turns": ' + 10**5 * b"[", "its JSON is broken: maximum recursion depth"),
        (b" \n", "expected prompts in prompts.txt, found none"),
    ],
)
def test_prompts_are_read_before_a_model_is_loaded(
    content: bytes, reported: str, prompts: Path, tmp_path: Path
) -> None:
    prompts.write_bytes(content)
    assert (
        reported in run("bench", "--prompts", prompts, "--model", tmp_path / "no-model").error_line
    )
