"""Servers that call `model.generate` answer with lade: a wrapped model, a folder, the example."""

import json
import runpy
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers.cli.serve import Serve

import lade
from tests.lade.server.serving import loaded_model
from tests.lade.tiny import byte_tokenizer, tiny_model

EXAMPLES = Path(__file__).parents[1] / "examples"
# Without spaces: the model knows the 94 printable characters of ASCII only, so its text is text.
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
QUESTION = [{"role": "user", "content": "What-is-a-pool?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights, as `transformers serve` loads it."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    tiny_model(vocab_size=94, eos_token_id=None).save_pretrained(folder)
    return folder


class InThread(Serve):  # type: ignore[misc]
    """Serves in a thread, as `Serve` does, but closes its event loop, or pytest complains."""

    def start_server(self) -> None:
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()


@contextmanager
def running(serve: Any, folder: Path, **options: Any) -> Iterator[tuple[openai.OpenAI, Any]]:
    """Run a server on a free port; yield a client and the loaded model."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = serve(str(folder), port=port, device="cpu", non_blocking=True, **options)
    try:
        (loaded,) = server._model_manager.loaded_models.values()
        while not server.server.started:
            assert server._thread.is_alive()
            time.sleep(0.01)
        url = f"http://localhost:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            yield client, loaded.model
    finally:
        server.kill_server()


def stream(client: openai.OpenAI, folder: Path, max_tokens: int = 60) -> Any:
    return client.chat.completions.create(
        model=str(folder), messages=QUESTION, max_tokens=max_tokens, temperature=0, stream=True
    )


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def plain_text(model: Any, **options: Any) -> str:
    """What the model says without lade."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    inputs = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    options = {"do_sample": False, "max_new_tokens": 60, **options}
    output = type(model).generate(model, **inputs, **options)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))


class LadeServe(InThread):
    """`transformers serve` with the model wrapped before the first request."""

    def start_server(self) -> None:
        for loaded in self._model_manager.loaded_models.values():
            lade.wrap(loaded.model, shares_text=True)
        super().start_server()


@pytest.fixture(scope="module")
def wrapped(folder: Path) -> Iterator[tuple[openai.OpenAI, Any]]:
    with running(LadeServe, folder) as served:
        yield served


def test_a_wrapped_model_streams_the_plain_text(folder: Path, wrapped: Any) -> None:
    client, model = wrapped
    expected = plain_text(model)
    assert len(expected) == 60
    forwards: list[object] = []
    hook = model.register_forward_hook(lambda *_: forwards.append(None))
    assert text_of(stream(client, folder)) == expected
    assert len(model.generate.pool) >= 60
    forwards.clear()
    assert text_of(stream(client, folder)) == expected  # drafted from the first answer
    assert len(forwards) < 40
    hook.remove()


def test_a_client_that_leaves_does_not_disturb_the_next(folder: Path, wrapped: Any) -> None:
    client, model = wrapped
    expected = plain_text(model)
    leaving = stream(client, folder, max_tokens=400)
    assert len(text_of(next(leaving) for _ in range(3))) > 0
    leaving.close()
    assert text_of(stream(client, folder)) == expected
    whole = client.chat.completions.create(
        model=str(folder), messages=QUESTION, max_tokens=60, temperature=0
    )
    assert whole.choices[0].message.content == expected


@pytest.mark.exhaustive
@pytest.mark.usefixtures("own_remote_code")
def test_a_model_folder_can_bring_lade_along(folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(folder, tmp_path / "tiny")
    shutil.copytree(EXAMPLES / "custom_generate" / "custom_generate", folder / "custom_generate")
    with running(InThread, folder, trust_remote_code=True) as (client, model):
        expected = plain_text(model)
        assert not hasattr(model, "_lade_profiles")
        assert text_of(stream(client, folder)) == expected
        assert hasattr(model, "_lade_profiles")  # lade has measured the model


def test_sampling_through_the_server_is_that_of_plain_generate(folder: Path, wrapped: Any) -> None:
    client, model = wrapped
    sampling = {"do_sample": True, "temperature": 0.7, "max_new_tokens": 30}
    torch.manual_seed(3)
    expected = plain_text(model, **sampling)
    answer = client.chat.completions.create(
        model=str(folder),
        messages=QUESTION,
        seed=3,
        extra_body={"generation_config": json.dumps(sampling)},
    )
    assert answer.choices[0].message.content == expected


@pytest.mark.exhaustive
def test_the_example_serves_and_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lade.models.load", loaded_model)
    runpy.run_path(str(EXAMPLES / "serve.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    drafted = [int(line.split(" of its tokens were drafted")[0].split()[-1]) for line in lines]
    assert drafted[1] > drafted[0]  # from what this user was told before
