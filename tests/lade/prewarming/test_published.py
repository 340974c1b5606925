"""Tables that travel with a checkpoint: `lade.pool` beside its weights, also on the Hub."""

import json
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import lade
from ngram_pool import NGramPool
from tests.lade.both import ONE, same_as_generate
from tests.lade.tiny import by_last_token, byte_tokenizer, tiny_model

FOUR = lade.Config(max_draft_tokens=4)


def model_of(folder: Path, *, seed: int = 1) -> Any:
    """A model as if it was loaded from a folder."""
    model = tiny_model("llama", seed=seed)
    model.config.name_or_path = str(folder)
    return model


def prewarm(model: Any, folder: Path | None = None) -> Any:
    return lade.prewarm(model, 60, max_tokens=1000, folder=folder)


@cache
def num_drafted_without() -> int:
    return num_drafted(tiny_model("llama", seed=1))


@cache
def published() -> bytes:
    """The table of those weights."""
    with TemporaryDirectory() as folder:
        return bytes(prewarm(tiny_model("llama", seed=1), Path(folder)).path.read_bytes())


def num_drafted(model: Any) -> int:
    _, got = same_as_generate(model, ONE, config=FOUR)
    return int(got.stats.num_draft_tokens)


def test_a_table_beside_the_weights_is_drafted_from_and_named(tmp_path: Path) -> None:
    alone = by_last_token(tiny_model("llama", seed=1))
    made = prewarm(alone, tmp_path)
    assert made.path == tmp_path / "lade.pool"
    assert made.path.stat().st_mode & 0o777 == 0o644
    model = by_last_token(model_of(tmp_path))
    assert lade.probe(model).table == made.path
    assert f"\n  drafts from the table {made.path}" in str(lade.probe(model))
    beside, without = (same_as_generate(each, ONE, config=FOUR)[1].stats for each in (model, alone))
    assert beside.mean_accepted_tokens > 1.1 * without.mean_accepted_tokens
    assert lade.probe(by_last_token(model_of(tmp_path)).to(torch.bfloat16)).table == made.path
    file = tmp_path / "model.gguf"
    file.touch()
    assert lade.probe(by_last_token(model_of(file))).table == made.path


def test_ones_own_table_comes_first_and_begins_with_what_is_published(tmp_path: Path) -> None:
    published = prewarm(model_of(tmp_path), tmp_path)
    own = prewarm(model_of(tmp_path))
    assert own.path.parent != tmp_path
    assert own.seconds > published.seconds
    assert lade.probe(model_of(tmp_path)).table == own.path
    again = prewarm(model_of(tmp_path), tmp_path / "new")
    assert again.seconds > own.seconds
    other = prewarm(model_of(tmp_path / "nowhere", seed=2))
    assert other.seconds < own.seconds


def with_text(path: Path) -> None:
    pool = NGramPool.load(path)
    pool.observe([5, 6, 7])
    pool.save(path)


def of_other_weights(path: Path) -> None:
    pool = NGramPool.load(path)
    pool.model = "0" * 64
    pool.save(path)


def changed(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: void(path.write_bytes(change(path.read_bytes())))


def void(_: object) -> None:
    """Ignore a result."""


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "forged": (changed(lambda data: data[:-1] + b"\7"), "damaged"),
    "newer": (changed(lambda data: data.replace(rb"\"version\":4", rb"\"version\":5", 1)), "newer"),
    "text": (with_text, "holds text, or the likely tokens of other weights"),
    "weights": (of_other_weights, "holds text, or the likely tokens of other weights"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_table_that_does_not_fit_is_named_once_and_not_used(kind: str, tmp_path: Path) -> None:
    spoil, reason = BAD[kind]
    path = tmp_path / "lade.pool"
    path.write_bytes(published())
    spoil(path)
    bad, model = path.read_bytes(), model_of(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert lade.probe(model).table is None
        assert [num_drafted(model) for _ in range(2)] == [num_drafted_without()] * 2
    (said,) = [str(each.message) for each in caught]
    assert re.match(f"lade does not use its table for LlamaForCausalLM: {path}.*{reason}", said)
    assert path.read_bytes() == bad


def test_new_weights_get_a_new_table_in_place_of_the_old(tmp_path: Path) -> None:
    (tmp_path / "lade.pool").write_bytes(published())
    with pytest.warns(UserWarning, match="successors, unigrams and weights are left out"):
        made = prewarm(model_of(tmp_path, seed=2), tmp_path)
    assert lade.probe(model_of(tmp_path, seed=2)).table == made.path
    assert made.seconds < 30
    with pytest.warns(UserWarning, match="does not use its table"):
        assert lade.probe(model_of(tmp_path)).table is None


# --- on the Hub -----------------------------------------------------------------------------------

_ANSWER = """
import json, sys, torch, lade
from transformers import AutoModelForCausalLM

name, loads = sys.argv[1], sys.argv[2] == "load"
if loads:
    model = lade.models.load(name, device="cpu", dtype="float32").model
else:
    model = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
prompt = torch.tensor([[5, 6, 7, 8]])
got = lade.generate(model, prompt, config=lade.Config(max_draft_tokens=4), **options)
assert got.sequences.tolist() == model.generate(prompt, **options).sequences.tolist()
table = lade.probe(model).table
print(json.dumps([got.stats.mean_accepted_tokens, table and table.name]))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[dict[str, str], list[str]]]:
    """A Hub with one repository, a/b: the environment of its clients, and the files they asked."""
    folder, asked = tmp_path / "checkpoint", list[str]()
    model = by_last_token(tiny_model("llama", seed=1, vocab_size=256))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    prewarm(model, folder)

    class Handler(SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            found = re.fullmatch(r"/a/b/resolve/\w+/([\w.]+)", path)
            asked.append(found[1] if found else path)
            return str(folder / asked[-1]) if found else "/nowhere"

        def end_headers(self) -> None:
            self.send_header("X-Repo-Commit", "1" * 40)
            self.send_header("ETag", f'"{asked[-1]}"')  # the name of the file in the cache
            if not (folder / asked[-1]).is_file():
                self.send_header("X-Error-Code", "EntryNotFound")
            super().end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        env = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
        env["XDG_CACHE_HOME"] = str(tmp_path / "cache")  # without tables of the user's own
        yield {**os.environ, **env}, asked
        server.shutdown()


def answer(env: dict[str, str], *arguments: str) -> Any:
    """Return the mean accepted tokens of another process, and the name of its table."""
    command = [sys.executable, "-c", _ANSWER, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.exhaustive  # processes that begin anew
def test_loading_fetches_the_table_and_generating_asks_no_hub(
    hub: tuple[dict[str, str], list[str]], tmp_path: Path
) -> None:
    env, asked = hub
    without, name = answer(env, "a/b", "transformers")
    assert name is None
    assert "model.safetensors" in asked
    assert "lade.pool" not in asked
    mean, name = answer(env, "a/b", "load")
    assert name == "lade.pool"
    assert mean > 1.1 * without
    assert "lade.pool" in asked
    asked.clear()
    for place in ("a/b", str(tmp_path / "checkpoint")):
        offline = {**env, "HF_HUB_OFFLINE": "1"}
        mean, name = answer(offline, place, "transformers")
        assert mean > 1.1 * without
        assert name == "lade.pool"
    assert asked == []
