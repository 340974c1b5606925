"""Servers that call `model.generate` answer with lade: a wrapped model, the example."""

import runpy
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers.cli.serve import Serve

import lade
from tests.lade.apps.server.client import Client, text_of
from tests.lade.apps.server.serving import loaded_model, plain_text, wait_until

EXAMPLES = Path(__file__).parents[1] / "examples"


class LadeServe(Serve):  # type: ignore[misc]
    """`transformers serve` in a thread, with the model wrapped before the first request."""

    def start_server(self) -> None:
        for loaded in self._model_manager.loaded_models.values():
            lade.wrap(loaded.model, shares_text=True)
        # As `Serve` does, but its event loop is closed, or pytest complains.
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()


@contextmanager
def running(folder: Path) -> Iterator[tuple[Client, Any]]:
    """Run a server on a free port; yield a client and the loaded model."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = LadeServe(str(folder), port=port, device="cpu", non_blocking=True)
    try:
        (loaded,) = server._model_manager.loaded_models.values()
        wait_until(lambda: server.server.started)
        yield Client(server, f"http://localhost:{port}/v1"), loaded.model
    finally:
        server.kill_server()


def test_a_wrapped_model_streams_the_plain_text(tmp_path: Path) -> None:
    loaded, folder = loaded_model(), tmp_path / "tiny"
    expected = plain_text(loaded)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    with running(folder) as (client, model):
        forwards: list[object] = []
        hook = model.register_forward_hook(lambda *_: forwards.append(None))
        assert text_of(client.stream(model=str(folder), done=False)) == expected
        forwards.clear()
        assert text_of(client.stream(model=str(folder), done=False)) == expected
        assert len(forwards) < 30  # drafted from the first answer
        hook.remove()
        assert client.text(model=str(folder)) == expected


@pytest.mark.exhaustive  # it loads all that a server needs
def test_the_example_serves_and_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lade.models.load", loaded_model)
    runpy.run_path(str(EXAMPLES / "serve.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    drafted = [int(line.split(" of its tokens were drafted")[0].split()[-1]) for line in lines]
    assert drafted[1] > drafted[0]  # from earlier answers to this user
