"""`lade serve` as a process: signals, pools that outlive a kill, keys, corpora, options."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.lade.server.client import QUESTION, Client, error_of, text_of
from tests.lade.server.serving import (
    loaded_model,
    plain_text,
    prompt_of,
    run_command,
    wait_until,
)

_START_SEC = 300  # a busy machine compiles kernels meanwhile


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on disk, as `--model` takes it."""
    folder = tmp_path_factory.mktemp("tiny")
    model, tokenizer, _ = loaded_model()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def serving(folder: Path, log: Path, *options: str) -> Iterator[Client]:
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
        yield Client(process, url()[0], "key-of-alice")
    finally:
        process.kill()
        process.wait()


@pytest.mark.exhaustive  # each start of a process takes seconds
def test_pools_outlive_a_kill_and_a_stop_ends_well(folder: Path, tmp_path: Path) -> None:
    pools, log, keys, manual = (tmp_path / name for name in ("pools", "log", "keys", "manual"))
    keys.write_text("# of all\nkey-of-alice pools=docs\n\nkey-of-bob\n")
    manual.mkdir()
    (manual / "a.txt").write_text(prompt_of() + plain_text(loaded_model()))
    (manual / "b.txt").write_bytes(b"\x00\xff" * 999)
    options = ["--api-keys-file", str(keys), "--pools", str(pools), "--max-draft-tokens", "4"]
    options += ["--corpus", f"docs={manual}"]
    with serving(folder, log, *options) as client:
        few, many = client.drafted(user="a"), client.drafted(user="b", pools=["docs"])
        assert many > few + 10
        keys.write_text("key-of-carol\n")
        client.server.send_signal(signal.SIGHUP)
        wait_until(lambda: "the keys were read again" in log.read_text())
        assert "other users of this machine may read" in log.read_text()
        error_of(client.post(json={}), 401)
        client.key = "key-of-carol"
        first = client.drafted()
        wait_until(lambda: len([*pools.rglob("*.pool")]) == 3, 150)  # as often as they are saved
        client.server.kill()
    assert "left out of the corpus docs: binary: 1" in log.read_text()
    with serving(folder, log, *options) as client:
        client.key = "key-of-carol"
        assert client.drafted() > first + 5
        body = {"messages": QUESTION, "max_tokens": 300, "temperature": 0, "stream": True}
        headers = {"authorization": f"Bearer {client.key}"}
        with httpx.stream(
            "POST", f"{client.url}/chat/completions", json=body, headers=headers
        ) as answer:
            lines = answer.iter_lines()
            told = [next(lines) for _ in range(5)]
            client.server.send_signal(signal.SIGTERM)
            events = [json.loads(each[6:]) for each in [*told, *lines] if each.endswith("}")]
        assert text_of(events) == plain_text(loaded_model(), max_new_tokens=300)
        assert client.server.wait(60) == 0
    shown = log.read_text()
    assert "POST /v1/chat/completions 200" in shown
    assert not re.search("What-is|Traceback", shown)
    assert not any("alice" in path.name for path in pools.rglob("*"))


def test_the_help_fits_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run_command("serve", "--help").output
    rows = [line for line in shown.splitlines() if line.startswith("│") and "--help" not in line]
    assert 20 < len(rows) <= 40
    for gone in ("certificate", "allowed-origin", "json-logs", "chunk-interval", "corpora-bytes"):
        assert gone not in shown


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--corpus", "a"], "expected --corpus NAME=PATH"),
        (["--corpus", "a=/no/such/file"], "expected --corpus NAME=PATH"),
        (["--port", "70000"], "expected a port below 65536"),
        (["--chunk-interval", "1"], "No such option"),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(options: list[str], said: str) -> None:
    done = run_command("serve", *options)
    assert done.exit_code != 0
    assert said in f"{done.output}{done.exception}"
