"""Conversations: exact text, seeds, ends of all kinds, what is kept and what is taken back."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lade.batcher import Batcher
from lade.chat.conversation import Conversation
from lade.chat.settings import Settings
from lade.config import Config
from lade.errors import ContextLengthError
from lade.models.loading import LoadedModel
from lade.models.prompts import encode_messages
from lade.stats import DecodeStats, Step
from ngram_pool import NGramPool
from tests.grids import thinned
from tests.lade.chat.conftest import TEMPLATE

Make = Callable[..., LoadedModel]
SHORT = Settings(max_new_tokens=24)


def said(conversation: Conversation, text: str | None, **options: Any) -> str:
    return "".join(piece.text for piece in conversation.answer(text, **options))


def of_generate(loaded: LoadedModel, messages: list[dict[str, str]], settings: Settings) -> str:
    """Return what the model's own generate answers."""
    inputs = encode_messages(loaded, messages)
    torch.manual_seed(settings.seed)
    ids = loaded.model.generate(**inputs, **settings.options())[0, inputs["input_ids"].shape[1] :]
    text: str = loaded.tokenizer.decode(ids, skip_special_tokens=True)
    # A chat does not show a character that the limit left incomplete.
    return text.rstrip("\N{REPLACEMENT CHARACTER}") if len(ids) == settings.max_new_tokens else text


@pytest.mark.parametrize("temperature", thinned([0.0, 0.9], 0.9))
@pytest.mark.parametrize("is_plain", [False, True])
def test_the_answer_is_that_of_generate(
    loaded: LoadedModel, temperature: float, is_plain: bool
) -> None:
    settings = Settings(max_new_tokens=40, temperature=temperature, top_p=0.95, seed=3)
    conversation = Conversation(loaded, settings=settings)
    first = said(conversation, "abcabc", is_plain=is_plain)
    assert first == of_generate(loaded, conversation.messages[:1], settings)
    second = said(conversation, "and so on", is_plain=is_plain)
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert [turn.text for turn in conversation.turns] == [first, second]
    assert conversation.messages[1]["content"] == first
    assert conversation.turns[1].seed == 4
    later = Settings(max_new_tokens=40, temperature=temperature, top_p=0.95, seed=4)
    assert second == of_generate(loaded, conversation.messages[:3], later)


def test_a_turn_has_the_figures_of_its_answer(loaded: LoadedModel) -> None:
    drafting = Config(max_draft_tokens=6)  # whatever the machine's costs are
    conversation = Conversation(loaded, settings=Settings(max_new_tokens=60), config=drafting)
    pieces = [*conversation.answer("abcabcabc")]
    turn = conversation.turn
    assert turn is not None
    assert turn.stats is not None
    assert turn.num_tokens == turn.stats.num_tokens == 60
    assert turn.num_prompt_tokens == len("[user]abcabcabc\n[assistant]")
    assert sum(len(step.token_ids) for step in turn.steps) == 60
    assert turn.mean_accepted_tokens == pytest.approx(turn.stats.mean_accepted_tokens)
    assert turn.mean_accepted_tokens > 1
    assert turn.token_times == sorted(turn.token_times)
    assert turn.first_token_sec is not None
    assert 0 < turn.first_token_sec <= turn.token_times[-1] <= turn.sec
    assert turn.tokens_per_sec == pytest.approx(60 / turn.sec)
    assert not turn.is_interrupted
    assert turn.pieces == pieces
    # Of some bytes made of several tokens, one alone was drafted.
    num_drafted = sum(piece.is_drafted for piece in pieces)
    assert 0 < num_drafted <= turn.stats.num_accepted_tokens
    assert conversation.plain_tokens_per_sec is None


def test_what_was_run_once_is_not_run_again(loaded: LoadedModel) -> None:
    conversation = Conversation(loaded, settings=SHORT)
    said(conversation, "abc")
    said(conversation, "def")
    first, second = conversation.turns
    assert first.num_reused_tokens == 0
    assert second.num_reused_tokens >= first.num_prompt_tokens
    each_anew = Conversation(loaded, settings=SHORT, config=Config())
    said(each_anew, "abc")
    said(each_anew, "def")
    assert each_anew.turns[1].num_reused_tokens == 0
    assert each_anew.messages == conversation.messages


def test_a_plain_answer_has_one_token_a_step_and_tells_plains_speed(loaded: LoadedModel) -> None:
    conversation = Conversation(loaded, settings=SHORT)
    pieces = [*conversation.answer("abc", is_plain=True)]
    turn = conversation.turn
    assert turn is not None
    assert turn.is_plain
    assert turn.stats is None
    assert (turn.num_tokens, len(turn.steps), turn.mean_accepted_tokens) == (24, 24, 1.0)
    assert not any(piece.is_drafted for piece in pieces)
    assert conversation.plain_tokens_per_sec == turn.tokens_per_sec


def test_the_pool_learns(loaded: LoadedModel) -> None:
    pool = NGramPool(2**12)
    conversation = Conversation(loaded, settings=SHORT, pool=[pool])
    assert conversation.pool is pool
    assert len(pool) == 0
    said(conversation, "abc")
    assert len(pool) == len("[user]abc\n[assistant]") + 24
    read_only = Conversation(loaded, pool=pool.as_read_only())
    assert read_only.pool is None


def test_the_context_is_counted(loaded_with: Make) -> None:
    conversation = Conversation(loaded_with(), settings=SHORT)
    assert [*conversation.context] == [0, 512]
    said(conversation, "abc")
    again = loaded_with().tokenizer(conversation.messages[1]["content"])["input_ids"]
    assert conversation.context.num_tokens == len("[user]abc\n[assistant]\n") + len(again)


# --- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_plain", [False, True])
def test_an_event_ends_the_answer_and_what_was_said_is_kept(
    loaded: LoadedModel, is_plain: bool
) -> None:
    conversation = Conversation(loaded, settings=Settings(max_new_tokens=400))
    cancelled = threading.Event()
    shown = ""
    for piece in conversation.answer("abc", is_plain=is_plain, cancelled=cancelled):
        shown += piece.text
        cancelled.set()
    turn = conversation.turn
    assert turn is not None
    assert turn.is_interrupted
    assert conversation.plain_tokens_per_sec is None  # of whole answers alone
    assert 0 < turn.num_tokens < 400
    assert shown == turn.text == conversation.messages[-1]["content"]
    assert (turn.stats is None) == is_plain
    assert conversation.settings.max_new_tokens == 400
    conversation.settings = SHORT
    assert said(conversation, "go on", cancelled=None)
    assert len(conversation.messages) == 4


def test_closing_the_iterator_ends_the_answer_and_keeps_what_was_said(loaded: LoadedModel) -> None:
    conversation = Conversation(loaded, settings=Settings(max_new_tokens=400))
    pieces: Any = conversation.answer("abc")
    first = next(pieces)
    pieces.close()
    turn = conversation.turn
    assert turn is not None
    assert turn.is_interrupted
    assert turn.num_tokens < 400
    assert turn.text.startswith(first.text)
    assert conversation.messages[-1] == {"role": "assistant", "content": turn.text}
    whole = Conversation(loaded, settings=Settings(max_new_tokens=turn.num_tokens))
    assert said(whole, "abc") == turn.text  # nothing is lost or doubled


def test_an_answer_that_had_ended_before_it_was_closed_is_whole(loaded: LoadedModel) -> None:
    conversation = Conversation(loaded, settings=Settings(max_new_tokens=6))
    cancelled = threading.Event()
    for _ in conversation.answer("abc", cancelled=cancelled):
        pass
    cancelled.set()
    assert conversation.turn is not None
    assert not conversation.turn.is_interrupted


def test_an_answer_stopped_before_its_first_word_takes_the_question_back(
    loaded_with: Make,
) -> None:
    loaded = loaded_with()
    conversation = Conversation(loaded, settings=Settings(max_new_tokens=400))
    cancelled = threading.Event()
    cancelled.set()
    # The first token is emitted before anybody is asked whether to stop; it may be no character.
    loaded.tokenizer.decode = lambda ids, **options: ""  # this tokenizer is the test's own
    assert [*conversation.answer("abc", cancelled=cancelled)] == []
    assert conversation.messages == []
    assert conversation.turns == []
    assert conversation.turn is None


def test_an_answer_that_waits_for_room_can_be_stopped(loaded: LoadedModel) -> None:
    cancelled, is_held = threading.Event(), threading.Event()
    with Batcher(loaded.model, max_batch_tokens=50) as batcher:
        holder = threading.Thread(target=batcher.run, args=(is_held.wait, 50))
        holder.start()
        try:
            while not batcher._room._held:
                pass
            conversation = Conversation(loaded, settings=SHORT, batcher=batcher)
            threading.Timer(0.2, cancelled.set).start()
            assert said(conversation, "abc", cancelled=cancelled) == ""
        finally:
            is_held.set()
            holder.join()
        assert conversation.messages == []
        assert conversation.turns == []
        assert said(conversation, "abc") == said(Conversation(loaded, settings=SHORT), "abc")


@pytest.mark.parametrize("is_plain", [False, True])
def test_what_fails_is_raised_and_the_question_taken_back(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, is_plain: bool
) -> None:
    conversation = Conversation(loaded, settings=SHORT)
    first = said(conversation, "abc")
    messages, turns = [*conversation.messages], [*conversation.turns]

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("lade.chat.conversation.generate", fail)
        patch.setattr(type(loaded.model), "generate", fail)
        for text in ("def", None):
            with pytest.raises(RuntimeError, match="out of memory"):
                said(conversation, text, is_plain=is_plain)
            assert conversation.messages == messages
            assert conversation.turns == turns
    assert said(conversation, None, seed=0) == first


def test_an_answer_that_no_thread_can_be_started_for_fails(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = Conversation(loaded, settings=SHORT)

    def start(*args: Any, **options: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        for name in ("_start_new_thread", "_start_joinable_thread"):  # up to Python 3.12, and now
            patch.setattr(threading, name, start, raising=False)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            said(conversation, "abc")
    assert conversation.messages == []
    assert conversation.turns == []
    assert said(conversation, "abc")


def test_what_was_said_before_an_error_is_kept(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = Conversation(loaded, settings=SHORT)
    token_ids = loaded.tokenizer("ab")["input_ids"]

    def fail(*args: Any, on_step: Callable[[Step], None], **options: Any) -> None:
        on_step(Step(token_ids, 1, 1))
        raise RuntimeError("out of memory")

    monkeypatch.setattr("lade.chat.conversation.generate", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        said(conversation, "abc")
    assert [message["content"] for message in conversation.messages] == ["abc", "ab"]
    assert conversation.turn is not None
    assert conversation.turn.is_interrupted


def test_a_character_that_was_cut_is_dropped(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    conversation, cancelled = Conversation(loaded, settings=SHORT), threading.Event()
    token_ids = loaded.tokenizer("so \N{GRINNING FACE}")["input_ids"][:-1]

    def interrupted(
        *_: Any, on_step: Callable[[Step], None], stopping_criteria: Any, **__: Any
    ) -> Any:
        on_step(Step(token_ids, 0, 0))
        cancelled.set()
        stopping_criteria(torch.tensor([token_ids]), None)
        return SimpleNamespace(stats=DecodeStats())

    monkeypatch.setattr("lade.chat.conversation.generate", interrupted)
    assert said(conversation, "abc", cancelled=cancelled) == "so "
    assert conversation.messages[-1]["content"] == "so "
    conversation.save(tmp_path / "chat.json")
    assert json.loads((tmp_path / "chat.json").read_text())["messages"][-1]["content"] == "so "


def test_one_answer_at_a_time(loaded: LoadedModel) -> None:
    conversation = Conversation(loaded, settings=SHORT)
    pieces: Any = conversation.answer("abc")
    next(pieces)
    for call in (lambda: conversation.answer("d"), conversation.undo, conversation.clear):
        with pytest.raises(RuntimeError, match="expected the answer before to have ended"):
            call()
    pieces.close()
    assert said(conversation, "d")


def test_nothing_begins_before_the_first_piece_is_asked_for(loaded: LoadedModel) -> None:
    conversation = Conversation(loaded, settings=SHORT)
    conversation.answer("abc")
    assert conversation.messages == []
    assert said(conversation, "abc")


# --- the length ---------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context_is_refused_and_nothing_is_lost(
    loaded: LoadedModel,
) -> None:
    conversation = Conversation(loaded, settings=SHORT)
    said(conversation, "abc")
    messages = [*conversation.messages]
    with pytest.raises(ContextLengthError, match=r"expected a prompt of at most 512 tokens.* got"):
        conversation.answer("x" * 600)
    assert conversation.messages == messages
    assert said(conversation, "short")


def test_an_answer_ends_where_the_context_does(loaded: LoadedModel) -> None:
    conversation = Conversation(loaded, settings=Settings(max_new_tokens=100))
    said(conversation, "x" * (512 - len("[user]\n[assistant]") - 4))
    assert conversation.turn is not None
    assert conversation.turn.num_tokens == 5  # the last is never fed


# --- messages -----------------------------------------------------------------------------------


def test_again_and_back(loaded: LoadedModel) -> None:
    settings = Settings(max_new_tokens=12, temperature=1.0)
    conversation = Conversation(loaded, settings=settings)
    first = said(conversation, "abc")
    second = said(conversation, None)
    assert second != first  # another seed
    assert [message["content"] for message in conversation.messages] == ["abc", second]
    assert len(conversation.turns) == 1
    assert said(conversation, None, seed=0) == first
    said(conversation, "def")
    assert conversation.undo() == "def"
    assert [message["content"] for message in conversation.messages] == ["abc", first]
    assert conversation.undo() == "abc"
    assert conversation.undo() is None
    with pytest.raises(ValueError, match="got an empty conversation"):
        conversation.answer(None)


def test_a_cleared_conversation_begins_as_a_new_one(loaded: LoadedModel) -> None:
    conversation = Conversation(loaded, settings=Settings(max_new_tokens=12, temperature=1.0))
    first = said(conversation, "abc")
    conversation.clear()
    assert conversation.turn is None
    assert said(conversation, "abc") == first


def test_the_system_prompt_is_part_of_the_prompt(loaded_with: Make) -> None:
    conversation = Conversation(loaded_with(), settings=SHORT, system="be brief")
    said(conversation, "abc")
    assert conversation.turn is not None
    prompt = "[system]be brief\n[user]abc\n[assistant]"
    assert conversation.turn.num_prompt_tokens == len(prompt)
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
    conversation.system = None
    assert conversation.context.num_tokens < len(prompt) + 3 * 24


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "tiny has no chat template"),
        ("{{ messages[-1].content }}", "leaves it out"),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}", "refuses"),
    ],
)
def test_a_system_prompt_without_a_place_is_refused(
    loaded_with: Make, template: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=f"expected no system prompt: .*{message}"):
        Conversation(loaded_with(template), system="be brief")
    conversation = Conversation(loaded_with(template))
    with pytest.raises(ValueError, match=message):
        conversation.system = "be brief"
    assert conversation.system is None


def test_what_the_template_refuses_is_told(loaded_with: Make) -> None:
    conversation = Conversation(loaded_with("{{ raise_exception('not today') }}"))
    with pytest.raises(ValueError, match=r"the chat template of tiny refuses .*not today"):
        conversation.answer("abc")


def test_without_a_template_the_model_goes_on_with_the_text(loaded_with: Make) -> None:
    loaded = loaded_with(None)
    conversation = Conversation(loaded, settings=SHORT)
    first = said(conversation, "abc")
    inputs = loaded.tokenizer("abc", return_tensors="pt")
    ids = loaded.model.generate(**inputs, do_sample=False, max_new_tokens=24)[0, 3:]
    assert first == loaded.tokenizer.decode(ids)
    said(conversation, "def")
    assert conversation.turn is not None
    text = f"abc{first}\ndef"
    assert conversation.turn.num_prompt_tokens == len(loaded.tokenizer(text)["input_ids"])
    with pytest.raises(ValueError, match="expected a prompt of one token or more"):
        Conversation(loaded).answer("")


def test_thinking_is_kept_apart_and_not_sent_again(loaded_with: Make) -> None:
    loaded = loaded_with(TEMPLATE.replace("[assistant]{% e", "[assistant]<think>{% e"))
    conversation = Conversation(loaded, settings=SHORT)
    pieces = [*conversation.answer("abc")]
    turn = conversation.turn
    assert turn is not None
    assert all(piece.is_thinking for piece in pieces)
    assert turn.thinking == "".join(piece.text for piece in pieces)
    assert turn.text == ""
    assert conversation.messages[-1] == {"role": "assistant", "content": ""}


def test_an_answer_after_thinking_is_its_message() -> None:
    from lade.chat.conversation import Turn, _content_of
    from lade.chat.pieces import Piece

    turn = Turn(0, False, 1, pieces=[Piece("hm", False, True), Piece("\n\nyes", True, False)])
    assert (turn.thinking, turn.text, _content_of(turn)) == ("hm", "\n\nyes", "yes")


# --- files --------------------------------------------------------------------------------------


def test_a_conversation_is_saved_and_goes_on_elsewhere(loaded: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    settings = Settings(max_new_tokens=12, temperature=0.8, seed=5)
    conversation = Conversation(loaded, settings=settings, system="é")
    said(conversation, "abc")
    conversation.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    content = json.loads(path.read_text())
    assert content["messages"] == conversation.messages
    assert content["settings"]["temperature"] == 0.8
    assert "é" in path.read_text()
    other = Conversation(loaded)
    other.load(path)
    assert (other.system, other.settings) == ("é", settings)
    assert other.messages == conversation.messages
    assert other.turns == []
    assert said(other, "def") == said(conversation, "def")
    assert other.undo() == "def"
    assert other.undo() == "abc"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "its format is 'other'"),
        ({"version": 2}, "its version is 2"),
        ({"system": 3}, "system prompt is no text"),
        ({"settings": {"top_p": 7}}, "expected top_p"),
        ({"settings": {"beams": 7}}, "beams"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "message 1 is not"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "message 1 is not"),
        ({"messages": [{"role": "user", "content": "a"}]}, "last question has no answer"),
        ({"messages": [3]}, "not subscriptable"),
        ({"messages": None}, "not iterable"),
    ],
)
def test_a_file_of_something_else_is_refused_and_changes_nothing(
    loaded: LoadedModel, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "chat.json"
    conversation = Conversation(loaded, settings=SHORT)
    said(conversation, "abc")
    conversation.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    before = [*conversation.messages]
    with pytest.raises(ValueError, match=f"expected a saved conversation in .*{message}"):
        conversation.load(path)
    assert conversation.messages == before
    assert conversation.settings == SHORT
    path.write_bytes(b"\xff\xfe not JSON")
    with pytest.raises(ValueError, match="expected a saved conversation"):
        conversation.load(path)


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens of 1 or more"),
        ({"seed": -1}, "seed of 0 or more"),
        ({"temperature": -0.1}, "finite temperature"),
        ({"temperature": float("inf")}, "finite temperature"),
        ({"top_p": 0.0}, "top_p above 0"),
        ({"top_p": 1.1}, "top_p above 0"),
        ({"top_k": -1}, "top_k of 0 or more"),
        ({"repetition_penalty": 0.0}, "repetition_penalty above 0"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**options)


@pytest.mark.parametrize(
    "options", [{"seed": 1.5}, {"temperature": "hot"}, {"top_p": None}, {"top_k": 0.5}]
)
def test_settings_of_a_wrong_type_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="expected"):
        Settings(**options)
