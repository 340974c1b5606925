"""Loading models, and prompts as tokens."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils.tqdm import are_progress_bars_disabled

from lade.models import load, tool_calls
from tests.lade.tiny import byte_tokenizer, tiny_model

TEMPLATE = """\
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}\
<call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</call>\
{%- endfor %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"name": "now"},
]


def save(path: Path) -> Path:
    byte_tokenizer().save_pretrained(path)
    tiny_model("llama", dtype=torch.float32, vocab_size=256).save_pretrained(path)
    return path


def test_the_embedded_model_is_loaded_by_name_in_any_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", None)
    save(tmp_path / "lade" / "models" / "smollm2-135m-instruct-q4_1")
    said: list[str] = []
    for asked in (None, "SmolLM2-135M-Instruct"):
        said.clear()
        loaded = load(asked, device="cpu", progress=said.append)
        assert loaded.name == "smollm2-135m-instruct"
        assert said[-1] == f"Loading {loaded.name}"
    monkeypatch.chdir(save(tmp_path / "SmolLM2-135M-Instruct").parent)
    assert load("SmolLM2-135M-Instruct", device="cpu").name == "SmolLM2-135M-Instruct"  # a folder
    monkeypatch.chdir("SmolLM2-135M-Instruct")
    for here in (".", str(Path.cwd())):
        load(here, device="cpu", progress=said.append)
        assert said[-1] == "Loading SmolLM2-135M-Instruct"


def test_a_model_that_is_not_here_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other way to ask the Hub tries for a minute."""
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    asked: list[str] = []

    def unreachable(name: str, timeout: float) -> Any:
        assert timeout <= 5
        asked.append(name)
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.model_info", unreachable)
    reported = (
        r"'a/b' could not be loaded: .* be reached \(no route\); .* for smollm2-135m-instruct"
    )
    with pytest.raises(ValueError, match=reported):
        load("a/b")
    assert asked == ["a/b"]


# --- prompts ------------------------------------------------------------------------------------


def test_downloads_show_their_bars_and_a_quota_of_cores_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, num_threads = str(save(tmp_path)), torch.get_num_threads()
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr("lade.machine.threads._QUOTA", tmp_path / "cpu.max")
    torch.set_num_threads(4)
    try:
        load(folder, progress=print)
        assert torch.get_num_threads() == 2
        load(folder, threads=3)
        assert torch.get_num_threads() == 3
        (tmp_path / "cpu.max").write_text("max 100000\n")
        load(folder)
        assert torch.get_num_threads() == 3
        (tmp_path / "cpu.max").unlink()  # as in control groups of version 1
        (tmp_path / "quota").write_text("110000\n")
        (tmp_path / "period").write_text("100000\n")
        of_first = [tmp_path / "quota", tmp_path / "period"]
        monkeypatch.setattr("lade.machine.threads._FIRST_QUOTA", of_first)
        load(folder)
        assert torch.get_num_threads() == 2
        (tmp_path / "quota").write_text("-1\n")
        load(folder, threads=3)
        load(folder)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(num_threads)
    assert not are_progress_bars_disabled()


def test_tool_calls_are_written_by_the_chat_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    assert tool_calls(tokenizer, TOOLS) == (
        '<assistant><call>{"name": "weather", "arguments": {"city": ""}}</call>'
        '<assistant><call>{"name": "now", "arguments": {}}</call>'
    )
    assert tool_calls(tokenizer, []) == ""
