"""`lade serve` as a process: signals, pools that outlive a kill, keys, corpora, options."""

import importlib
import json
import re
import signal
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import httpx
import pytest

import lade
from tests.lade.apps.cli.command import run
from tests.lade.apps.server.client import QUESTION, Client, error_of, text_of
from tests.lade.apps.server.serving import (
    loaded_model,
    plain_text,
    process_of,
    prompt_of,
    wait_until,
)


@pytest.mark.exhaustive  # each start of a process takes seconds
def test_pools_outlive_a_kill_and_a_stop_ends_well(tmp_path: Path) -> None:
    pools, log, keys, manual = (tmp_path / name for name in ("pools", "log", "keys", "a.pool"))
    loaded = loaded_model()
    keys.write_text("# of all\nkey-of-alice pools=docs\n\nkey-of-bob\n")
    pool = lade.NGramPool()
    pool.observe(loaded.tokenizer(prompt_of() + plain_text(loaded))["input_ids"])
    lade.save_pool(pool, manual, tokenizer=loaded.tokenizer)
    options = ["--api-keys-file", str(keys), "--pools", str(pools), "--max-draft-tokens", "4"]
    options += ["--corpus", f"docs={manual}"]
    with process_of(loaded, tmp_path, *options) as (process, url):
        client = Client(process, f"{url}/v1", "key-of-alice")
        few, many = client.drafted(user="a"), client.drafted(user="b", pools=["docs"])
        assert many > few + 10
        keys.write_text("key-of-carol\n")
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: "the keys were read again" in log.read_text())
        assert "other users of this machine may read" in log.read_text()
        error_of(client.post(json={}), 401)
        client.key = "key-of-carol"
        first = client.drafted()
        wait_until(lambda: len([*pools.rglob("*.pool")]) == 3, 150)  # as often as they are saved
        process.kill()
    with process_of(loaded, tmp_path, *options) as (process, url):
        client = Client(process, f"{url}/v1", "key-of-carol")
        assert client.drafted() > first + 5
        body = {"messages": QUESTION, "max_tokens": 300, "temperature": 0, "stream": True}
        headers = {"authorization": f"Bearer {client.key}"}
        place = f"{client.url}/chat/completions"
        with httpx.stream("POST", place, json=body, headers=headers) as answer:
            lines = answer.iter_lines()
            reported = [next(lines) for _ in range(5)]
            process.send_signal(signal.SIGTERM)
            events = [json.loads(each[6:]) for each in [*reported, *lines] if each.endswith("}")]
        assert text_of(events) == plain_text(loaded, max_new_tokens=300)
        assert process.wait(60) == 0
    shown = log.read_text()
    assert re.search(r"lade [\d.]+\S*; float32 on cpu, 1 threads; a context of 512 tokens; ", shown)
    assert "POST /v1/chat/completions 200" in shown
    assert not re.search("What-is|Traceback", shown)
    assert not any("alice" in path.name for path in pools.rglob("*"))


def test_wrong_options_are_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    keys = {name: tmp_path / name for name in ("twice", "wide", "empty")}
    keys["twice"].write_bytes(b"\xef\xbb\xbfone\ntwo\none admin\n")  # behind a byte order mark
    keys["wide"].write_text("one\n", encoding="utf-16")
    keys["empty"].write_bytes(b"\xef\xbb\xbf")
    for words, said in (
        (f"--api-keys-file {keys['twice']}", "expected each API key once, got one again"),
        (f"--api-keys-file {keys['wide']}", "as UTF-8, got another encoding"),
        (f"--api-keys-file {keys['empty']}", "a line each, got none"),
        (f"--pools {keys['twice']}/pools", "cannot keep pools in"),
    ):
        done = run("serve", *words.split())
        assert done.code != 0
        assert said in done.err


def test_packages_that_are_missing_or_too_old_are_told_of_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not by a request that needs them; the releases are those that the installation asks for."""
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    package, asked = sys.modules["lade.apps.server"], project["optional-dependencies"]["serve"]
    assert [f"{name}>={least}" for name, least in package.NEEDED.items()] == asked[1:]
    monkeypatch.setattr(metadata, "version", lambda name: "1.6.9")
    with pytest.raises(ImportError, match=r"'llguidance', 1\.7 or newer, but 1\.6\.9 is"):
        importlib.reload(package)

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ImportError, match="'llguidance', which is not installed"):
        importlib.reload(package)
