"""Tiny saved models that one can chat with, and a chat in this process."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from tests.lade.apps.chat.screen import Screen
from tests.lade.apps.cli.command import Done, run
from tests.lade.tiny import byte_tokenizer, tiny_model

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer_with(template: str | None = TEMPLATE) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def saved_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that saves a model of bytes that never ends on its own, by template."""
    made: dict[str | None, Path] = {}

    def make(template: str | None = TEMPLATE) -> Path:
        if template not in made:
            path = made[template] = tmp_path_factory.mktemp("chat") / "tiny"
            tokenizer = tokenizer_with(template)
            if "<think>" in (template or ""):
                tokenizer.add_tokens(["<think>", "</think>"])
            tokenizer.save_pretrained(path)
            sizes: dict[str, Any] = {"vocab_size": max(256, len(tokenizer)), "num_hidden_layers": 1}
            model = tiny_model("llama", dtype=torch.float32, **sizes)
            model.generation_config.eos_token_id = None
            model.save_pretrained(path)
        return made[template]

    return make


class Chat:
    """What came of a chat."""

    def __init__(self, screen: Screen, done: Done, data: Path) -> None:
        self.screen, self.done, self.data = screen, done, data
        self.shown = screen.shown()


@pytest.fixture
def chat(saved_with: Callable[..., Path], tmp_path: Path) -> Callable[..., Chat]:
    """Return a function that lets a user type until the chat ends."""

    def begin(
        *keys: str,
        options: tuple[object, ...] = ("--temperature", 0),
        template: str | None = TEMPLATE,
        size: tuple[int, int] = (80, 400),
        watch: Callable[[Screen], object] = bool,
        pause: float = 0.0,
        **env: str,
    ) -> Chat:
        screen = Screen()
        begun: list[threading.Thread] = []

        def type_slowly() -> None:  # as completion takes a moment
            for each in keys:
                time.sleep(pause)
                keyboard.send_text(each)

        def written() -> None:
            watch(screen)
            if pause and not begun and "leaves." in screen.shown():
                begun.append(threading.Thread(target=type_slowly, daemon=True))
                begun[0].start()

        screen.on_write = written
        given = ["--model", saved_with(template), "--dtype", "float32", "--max-new-tokens", 10]
        env = {"TERM": "xterm", "XDG_DATA_HOME": str(tmp_path / "data"), **env}
        with create_pipe_input() as keyboard:
            keyboard.send_text("" if pause else "".join(keys))
            with create_app_session(input=keyboard, output=DummyOutput()):
                columns, lines = size
                done = run(
                    *("chat", *given, *options),
                    screen=screen,
                    columns=columns,
                    LINES=str(lines),
                    **env,
                )
        return Chat(screen, done, tmp_path / "data")

    return begin


def saved(path: Path) -> list[str]:
    """Return the texts of a saved conversation."""
    return [message["content"] for message in json.loads(path.read_text())["messages"]]
