"""`lade serve` as a process: signals, pools that outlive a kill, options."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from typer.testing import CliRunner

from lade import hosts
from lade.cli.app import app
from lade.cli.serve import KeySource
from tests.lade.server.serving import QUESTION, loaded_model, plain_text, wait_until

KEYS = ("key-of-alice", "key-of-bob")
_START_SEC = 300  # a busy machine compiles kernels meanwhile


class Running(NamedTuple):
    process: subprocess.Popen[str]
    url: str

    def client(self, key: str = KEYS[0]) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=_START_SEC)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on disk, as `--model` takes it."""
    folder = tmp_path_factory.mktemp("tiny")
    model, tokenizer, _ = loaded_model()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def serving(folder: Path, log: Path, *options: str) -> Iterator[Running]:
    command = [sys.executable, "-m", "lade", "serve", "--model", str(folder), "--port", "0"]
    command += ["--dtype", "float32", "--model-name", "tiny", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "500"}
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, text=True, env=environment)

    def url() -> Any:
        assert process.poll() is None, log.read_text()
        return re.search(r"http://\S+/v1", log.read_text())

    try:
        wait_until(lambda: url() is not None, _START_SEC)
        yield Running(process, url()[0])
    finally:
        process.kill()
        process.wait()


def ask(client: openai.OpenAI, **options: Any) -> Any:
    options = {"max_tokens": 40, "temperature": 0, **options}
    return client.chat.completions.create(model="tiny", messages=QUESTION, **options)


def num_accepted(client: openai.OpenAI) -> int:
    number: int = ask(client).usage.completion_tokens_details.accepted_draft_tokens
    return number


@pytest.mark.exhaustive
def test_pools_outlive_a_kill_and_a_stop_ends_well(folder: Path, tmp_path: Path) -> None:
    """One test, for each start of a process takes seconds."""
    pools, log = tmp_path / "pools", tmp_path / "log"
    keys = tmp_path / "keys"
    keys.write_text("# of all\n" + "\n".join(KEYS))
    options = ["--api-keys-file", str(keys), "--pools", str(pools), "--save-every", "0.1"]
    options += ["--max-draft-tokens", "4", "--grace", "20"]
    with serving(folder, log, *options) as running:
        num_accepted(running.client())
        wait_until(lambda: any(pools.rglob("*.pool")))
        # When it changed, not when it was modified: this time says how long the file may stay.
        saved = next(pools.rglob("*.pool")).stat().st_ctime_ns
        ask(running.client(), seed=1, temperature=1)
        wait_until(lambda: next(pools.rglob("*.pool")).stat().st_ctime_ns > saved)
        running.process.kill()
    with serving(folder, log, *options) as running:
        assert num_accepted(running.client()) > num_accepted(running.client(KEYS[1])) + 5
        stream = ask(running.client(), max_tokens=300, stream=True)
        text = "".join(next(stream).choices[0].delta.content or "" for _ in range(3))
        running.process.send_signal(signal.SIGTERM)
        text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == plain_text(loaded_model(), max_new_tokens=300)
        assert running.process.wait(60) == 0
    shown = log.read_text()
    assert "POST /v1/chat/completions 200" in shown
    assert "What-is" not in shown
    assert "Traceback" not in shown
    for path in pools.rglob("*"):
        assert "alice" not in path.name


def test_keys_come_one_by_one_and_in_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# first\n a \n\nb\n")
    assert KeySource(["c"], path).read() == ["c", "a", "b"]
    assert KeySource(["c"], None).read() == ["c"]
    path.write_text("# none\n\n")
    with pytest.raises(ValueError, match="expected API keys in"):
        KeySource([], path).read()


def test_a_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["serve"])
    assert 'pip install "lade-decoding[serve]"' in str(done.exception)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.0.0.2", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.0.1", False),
        ("my-machine", False),
    ],
)
def test_hosts_that_others_reach_are_told(host: str, is_local: bool) -> None:
    assert hosts.is_local(host) == is_local
