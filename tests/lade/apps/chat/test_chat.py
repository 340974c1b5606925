"""`lade chat` in a terminal: keys, commands, what is shown and what is kept."""

import json
import os
import re
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lade.models
from tests.lade.apps.chat.conftest import TEMPLATE, Chat, saved
from tests.lade.apps.chat.screen import Screen

CTRL_C, CTRL_D, ALT_ENTER = "\x03", "\x04", "\x1b\r"
Begin = Callable[..., Chat]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "my chat.json"


def of_generate(folder: Path, texts: list[str], **options: Any) -> str:
    """Return what the model's own generate answers to a conversation of some texts."""
    loaded = lade.models.load(str(folder), dtype="float32", device="cpu")
    messages = [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]
    inputs = loaded.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    output = loaded.model.generate(**inputs, max_new_tokens=10, **options)
    text: str = loaded.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    return text.rstrip("\N{REPLACEMENT CHARACTER}")  # what the limit left incomplete


# --- keys ---------------------------------------------------------------------------------------


def test_questions_are_answered_as_generate_does_until_ctrl_d(
    chat: Begin, saved_with: Callable[..., Path], path: Path
) -> None:
    pasted = "\x1b[200~one\ntwo\r\nthree\x1b[201~\r"
    got = chat("abc\r", "\r", "de", ALT_ENTER, "f\r", pasted, f"/save {path}\r", CTRL_D)
    texts = saved(path)
    assert texts[::2] == ["abc", "de\nf", "one\ntwo\nthree"]
    for place in (1, 3, 5):
        assert texts[place] == of_generate(saved_with(), texts[:place], do_sample=False)
    assert got.done.code == 0
    assert "tiny. /help lists commands" in got.shown
    assert got.shown.count("10 tokens, ") == 3
    assert " ".join(got.shown.split()).count("not run again") == 2
    history = got.data / "lade" / "history"
    assert "+abc\n" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("data", ["/dev/null/x", "full"])
def test_a_chat_goes_on_where_its_history_cannot_be_kept(
    data: str, chat: Begin, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("full")

    monkeypatch.setattr("prompt_toolkit.history.FileHistory.store_string", fail)
    got = chat("abc\r", f"/save {path}\r", CTRL_D, XDG_DATA_HOME=str(tmp_path / data))
    assert (got.done.code, saved(path)[0]) == (0, "abc")
    assert ("note: typed lines are not kept" in got.done.err) is (data != "full")


def test_samples_are_those_of_generate_with_seeds_that_are_told(
    chat: Begin, saved_with: Callable[..., Path], path: Path
) -> None:
    options = ("--temperature", 0.9, "--top-p", 0.95, "--seed", 3)
    got = chat("abc\r", "def\r", f"/save {path}\r", CTRL_D, options=options)
    assert re.findall(r"seed\s+(\d+)", got.shown) == ["3", "4"]
    texts = saved(path)
    for place, seed in ((1, 3), (3, 4)):
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 0}
        assert texts[place] == of_generate(saved_with(), texts[:place], **sampling)


def test_ctrl_c_clears_what_is_typed(chat: Begin, path: Path) -> None:
    got = chat("not this", CTRL_C, CTRL_C, "this\r", f"/save {path}\r", CTRL_D)
    assert saved(path)[::2] == ["this"]
    assert got.shown.count("Ctrl-D leaves.\n") == 1 + 1  # at the start, and of an empty line
    for leave in ("/bye", "EXIT"):
        assert "10 tokens" not in chat(f"{leave}\r", "never\r").shown


def test_commands_are_completed(chat: Begin) -> None:
    assert "Temperature 0.5." in chat("/tempe", "\t", " 0.5\r", CTRL_D, pause=0.3).shown


@pytest.mark.parametrize("num_times", [1, 2])
def test_ctrl_c_stops_an_answer_and_a_second_one_leaves(
    chat: Begin, path: Path, num_times: int
) -> None:
    pressed: list[int] = []

    def press(screen: Screen) -> None:  # at the first sign of an answer
        if not pressed and "Ctrl-D leaves" in screen.shown() and "…" in screen.lines[-2:]:
            pressed.append(1)
            for _ in range(num_times):
                os.kill(os.getpid(), signal.SIGINT)

    keys = ("abc\r", f"\x15/save {path}\r", CTRL_D)  # in place of what was taken back
    got = chat(*keys, options=("--max-new-tokens", 400, "--temperature", 0), watch=press)
    if num_times == 1:
        assert "stopped" in got.shown
        assert got.done.code == 0
        assert saved(path)[:1] in ([], ["abc"])  # if not a word was said
    else:
        assert got.done.code == 130
        assert not path.exists()


# --- what goes wrong ----------------------------------------------------------------------------


def test_a_question_that_is_too_long_can_be_made_shorter(chat: Begin, path: Path) -> None:
    keys = ["x" * 600, "\r", *["\x7f"] * 590, "\r", f"/save {path}\r", CTRL_D]
    got = chat(*keys)
    assert "expected a prompt of at most 512 tokens" in got.shown
    assert "/undo or /clear makes room" in got.shown.replace("\n", " ")
    assert saved(path)[0] == "x" * 10


def test_an_error_in_the_model_is_shown_and_the_chat_goes_on(
    chat: Begin, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, calls = lade.generate, 0

    def fail(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("out of memory\nand more")
        return generate(*args, **options)

    monkeypatch.setattr("lade.apps.chat.conversation.generate", fail)
    # The question stands there again.
    got = chat("abc\r", "d\r", f"/save {path}\r", CTRL_D)
    assert "RuntimeError: out of memory\n" in got.shown
    assert saved(path)[0] == "abcd"


def test_models_without_a_template_and_templates_that_refuse_are_told(chat: Begin) -> None:
    got = chat("abc\r", CTRL_D, template=None)
    assert "tiny has no chat template: it goes on with the text" in got.shown
    assert "10 tokens, " in got.shown
    refusing = (
        "{% if messages | length > 1 %}{{ raise_exception('not today') }}{% endif %}" + TEMPLATE
    )
    got = chat("abc\r", "def\r", "\x15/system x\r", CTRL_D, template=refusing)
    assert "refuses the messages (not today)" in got.shown.replace("\n", " ")
    assert "expected no system prompt" in got.shown


def test_wrong_commands_are_told_and_nothing_is_asked(chat: Begin) -> None:
    told = [
        ("/hlp", "which /help lists, got /hlp; a space before it makes it a question"),
        ("/load", "expected /load FILE"),
        ("/undo twice", "expected /undo alone, got 'twice' behind it"),
        ("/undo", "expected a question to take back"),
        ("/retry", "expected a question to answer again"),
        ("/plain", "expected a question to answer again"),
        ("/save", "expected /save FILE"),
        ("/save /no/such/a.json", "no such folder: /no/such"),
        ("/load /no/such/a.json", "no such file"),
        ("/temperature hot", "expected a number as temperature, got 'hot'"),
        ("/temperature -1", "expected a finite temperature"),
    ]
    got = chat(*(f"{line}\r" for line, _ in told), CTRL_D)
    shown, place = " ".join(got.shown.split()), 0
    for _, reported in told:
        place = shown.index(reported, place) + 1
    assert " tokens, " not in got.shown
    assert "plain generate ─" not in got.shown


# --- commands -----------------------------------------------------------------------------------


def test_plain_answers_both_ways_and_compares(
    chat: Begin, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither side knows an earlier answer, nor has it a part of the prompt in its KV cache."""
    generate, calls = lade.generate, []

    def noting(*args: Any, **options: Any) -> Any:
        output = generate(*args, **options)
        calls.append((options["pool"] is None, output.stats.num_reused_tokens > 0))
        return output

    monkeypatch.setattr("lade.apps.chat.conversation.generate", noting)
    keys = ("abc\r", "/plain\r", "def\r", "/plain ghi\r", f"/save {path}\r", CTRL_D)
    shown = chat(*keys, options=("--temperature", 1)).shown
    assert calls == [(False, False), (True, False), (False, True), (True, False)]
    assert shown.count("plain generate ──") == shown.count("lade ──") == 2
    assert shown.index("plain generate ──") < shown.index("lade ──")
    assert "plain, 10 tokens" in shown
    lines = re.findall(
        r"^lade +10 tokens in .* a second, [\d.]+x plain, (.*)$", shown, re.MULTILINE
    )
    assert lines == ["same text", "same text"]  # with the same seed
    assert saved(path)[::2] == ["abc", "def", "ghi"]


def test_an_answer_that_only_repeats_itself_is_ended_with_a_word(
    chat: Begin, saved_with: Callable[..., Path], tmp_path: Path
) -> None:
    loaded = lade.models.load(str(saved_with()), dtype="float32", device="cpu")
    with torch.no_grad():  # each token depends on the one before alone, so that they go round
        for name, weights in loaded.model.named_parameters():
            weights.mul_(not name.endswith(("o_proj.weight", "down_proj.weight")))
    for each in (loaded.model, loaded.tokenizer):
        each.save_pretrained(tmp_path / "looping")
    options = ("--model", tmp_path / "looping", "--max-new-tokens", 450, "--temperature", 0)
    shown = " ".join(chat("abc\r", "/plain\r", CTRL_D, options=options).shown.split())
    lengths = re.findall(r"ended, as it repeats itself, (?:plain, )?(\d+) tokens", shown)
    assert len(lengths) == 3
    assert len({*lengths}) == 1
    assert 320 <= int(lengths[0]) < 450
    assert "plain, same text" in shown


def test_retry_undo_and_clear(chat: Begin, path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    keys = ("abc\r", f"/save {path}\r", "/retry\r", f"/save {other}\r")
    back = ("/undo\r", "d\r", f"/save {other}\r", "/clear\r", f"/save {path}x\r", CTRL_D)
    chat(*keys, *back, options=("--temperature", 1))
    first, second = saved(path), saved(other)
    assert first[0] == "abc"
    assert second[0] == "abcd"  # the question stood there again
    assert first[1] != second[1]  # another seed
    assert saved(Path(f"{path}x")) == []


def test_system_and_temperature_are_shown_and_set(chat: Begin, path: Path) -> None:
    keys = ("/system\r", "/system be\x1b\rbrief\r", "/temperature 0.7\r", "/temperature\r")
    shown = chat(*keys, "abc\r", f"/save {path}\r", "/system off\r", CTRL_D).shown
    assert shown.count("There is no system prompt.") == 2
    assert shown.count("Temperature 0.7.") == 2
    content = json.loads(path.read_text())
    assert (content["system"], content["settings"]["temperature"]) == ("be\nbrief", 0.7)


def test_a_chat_samples_unless_told(chat: Begin) -> None:
    assert "Temperature 0.7." in chat("/temperature\r", CTRL_D, options=()).shown


def test_a_chat_prewarms_while_it_waits_where_that_is_asked_for(chat: Begin) -> None:
    reported = chat("/exit\r", options=("--prewarm",)).done.err
    assert "While it waits, the model writes its table of likely tokens, for 30 minutes" in reported


def test_show_tells_drafted_tokens_apart_and_begins_with_the_last_answer(chat: Begin) -> None:
    keys = ("abcabc\r", "/show\r", "/show\r", CTRL_D)
    options = ("--max-new-tokens", 100, "--temperature", 0)
    shown = chat(*keys, options=options, TERM="dumb").shown
    assert "drafted by the n-gram pool and accepted, or the model's own token" in shown
    assert shown.endswith("Drafted tokens are no longer shown.")
    coloured = chat(*keys, options=options).screen.getvalue()
    assert "\x1b[1;32mdrafted by the n-gram pool and accepted" in coloured
    assert coloured.count("\x1b[1;32m") > 1


def test_help_lists_all_commands(chat: Begin) -> None:
    assert "/temperature [T]" in chat("/help\r", CTRL_D).shown


def test_a_space_or_a_path_makes_a_question(chat: Begin, path: Path) -> None:
    chat(" /help\r", "/etc/hosts is what?\r", f"/save {path}\r", CTRL_D)
    assert saved(path)[::2] == ["/help", "/etc/hosts is what?"]


# --- files --------------------------------------------------------------------------------------


def test_a_conversation_is_saved_and_goes_on_elsewhere(chat: Begin, path: Path) -> None:
    options = ("--temperature", 0.8, "--seed", 5, "--system", "é")
    chat("abc\r", f"/save {path}\r", "def\r", f"/save {path}2\r", CTRL_D, options=options)
    shown = chat(f"/load {path}\r", "def\r", f"/save {path}3\r", CTRL_D).shown
    assert "Loaded 1 question from" in shown
    assert "> abc\n" in shown
    assert Path(f"{path}3").read_text() == Path(f"{path}2").read_text()


def test_a_file_of_something_else_is_refused_and_changes_nothing(chat: Begin, path: Path) -> None:
    told: list[tuple[dict[str, Any], str]] = [
        ({"system": 3}, "not all of it is text"),
        ({"settings": {"top_p": 7}}, "expected top_p"),
        ({"settings": {"top_k": 0.5}}, "expected top_k to be an integer"),
        ({"settings": {"beams": 7}}, "beams"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "in turn"),
        ({"messages": [{"role": "user", "content": "a"}]}, "in turn"),
        (
            {"messages": [{"role": "user", "content": []}, {"role": "assistant", "content": ""}]},
            "not all of it is text",
        ),
        ({"messages": [3]}, "not subscriptable"),
    ]
    content: Any = {"system": None, "settings": {"max_new_tokens": 5}, "messages": []}
    for number, (change, _) in enumerate(told):
        Path(f"{path}{number}").write_text(json.dumps(content | change))
    shown = chat(*(f"/load {path}{each}\r" for each in range(len(told))), "abc\r", CTRL_D).shown
    flat, place = " ".join(shown.split()), 0
    for _, reported in told:
        place = flat.index("expected a saved conversation in", place)
        place = flat.index(reported, place)
    assert "10 tokens, " in shown


def test_a_loaded_conversation_changes_nothing_in_the_terminal(chat: Begin, path: Path) -> None:
    messages = [
        {"role": "user", "content": "a\x1b]0;b"},
        {"role": "assistant", "content": "c\x9bd **bold**"},
    ]
    content = {"system": "e\x07f", "settings": {}}
    path.write_text(json.dumps(content | {"messages": messages}))
    shown = chat(f"/load {path}\r", "/system\r", CTRL_D).shown
    assert "> a]0;b\n\ncd **bold**\n" in shown
    assert "System prompt: ef" in shown


def test_thinking_is_shown_and_not_sent_again(chat: Begin, path: Path) -> None:
    thinks = TEMPLATE.replace("[assistant]{% e", "[assistant]<think>{% e")
    got = chat("abc\r", f"/save {path}\r", CTRL_D, template=thinks)
    assert saved(path) == ["abc", ""]
    assert "10 tokens, " in got.shown


def test_nothing_is_wider_than_the_window(chat: Begin) -> None:
    keys = ("/help\r", "/plain abc\r", "/show\r", "/hlp\r", "def\r", CTRL_D)
    got = chat(*keys, size=(20, 400))
    assert all(len(line) <= 20 for line in got.screen.lines)
