"""A tiny model that speaks printable text, served, and its text by plain `generate`.

The only file of these tests that imports what is not public.
"""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import lade
from lade.apps.server.app import Server
from lade.apps.server.grammars import Grammars
from lade.apps.server.inference import _Relay
from lade.apps.server.options import ServerOptions
from lade.models import LoadedModel
from tests.lade.apps.server.client import QUESTION, Client, Json
from tests.lade.tiny import tiny_model

NAME = "tiny"
# Every run takes the same steps: no time decides how much is drafted.
REPEATING = lade.Config(max_draft_tokens=4)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def loaded_model(**options: Any) -> LoadedModel:
    """Return a tiny model with a token for each printable character.

    Its answers do not end by themselves, unless `eos_token_id` is 93, which is "~".
    """
    letters = {chr(33 + place).replace("`", "Ġ"): place for place in range(94)}
    made = Tokenizer(models.BPE(letters, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    if "eos_token_id" in options:
        tokenizer.add_special_tokens({"eos_token": "~"})
    tokenizer.chat_template = TEMPLATE
    options = {"vocab_size": 94, "eos_token_id": None, "dtype": torch.float32, **options}
    model = tiny_model(**options)
    model.generation_config.do_sample = False
    return LoadedModel(model, tokenizer, NAME)


def plain_ids(
    loaded: LoadedModel,
    messages: Sequence[Json] | str = QUESTION,
    *,
    seed: int | None = None,
    **options: Any,
) -> list[int]:
    """Return the tokens of transformers' own answer."""
    prompt = messages if isinstance(messages, str) else prompt_of(messages)
    ids = loaded.tokenizer(prompt, return_tensors="pt")["input_ids"]
    if seed is not None:
        torch.manual_seed(seed)
    options = {"do_sample": seed is not None, "max_new_tokens": 40, **options}
    model = loaded.model
    output = type(model).generate(  # also where a model is `Paced`
        model, ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options
    )
    token_ids: list[int] = output[0, ids.shape[1] :].tolist()
    return token_ids


def plain_text(loaded: LoadedModel, *args: Any, **options: Any) -> str:
    ids = plain_ids(loaded, *args, **options)
    return str(loaded.tokenizer.decode(ids, skip_special_tokens=True))


def prompt_of(messages: Sequence[Json] = QUESTION) -> str:
    """Return what the template makes of messages; each character is a token."""
    return "".join(f"<{each['role']}>{each['content']}" for each in messages) + "<assistant>"


@contextmanager
def serving(loaded: LoadedModel, *, port: int = 0, **options: Any) -> Iterator[Client]:
    """Serve a model, with drafts that are the same in every run; yield a client of it."""
    options = {"config": REPEATING, **options}
    with Server(loaded, ServerOptions(**options), port=port) as server:
        key = next((line.split()[0] for line in options.get("api_keys", ())), "none")
        yield Client(server, server.url, key)


class Paced:
    """Has answers wait before each token for as long as a test wants it to."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._relays: list[Any] = []
        self._tokens = threading.Semaphore(0)
        self._is_free = False

    @property
    def num_calls(self) -> int:
        return len(self._relays)

    def __enter__(self) -> "Paced":
        self._put = _Relay._put
        pace = self

        def put(self: _Relay, token_id: int) -> None:
            pace._paced(self, token_id)

        _Relay._put = put  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: Any) -> None:
        self.free()
        _Relay._put = self._put  # type: ignore[method-assign]

    def let(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self._tokens.release()

    def let_until(self, is_so: Callable[[], bool]) -> None:
        """Let tokens go one by one until something is so: all answers come from one thread."""

        def is_so_or_let() -> bool:
            self.let(1)
            return is_so()

        wait_until(is_so_or_let)

    def free(self) -> None:
        self._is_free = True
        self.let(99)  # as many as may wait

    def _paced(self, relay: Any, token_id: int) -> None:
        if relay not in self._relays:
            self._relays.append(relay)
        if not self._is_free:
            assert self._tokens.acquire(timeout=60)
        self.num_tokens += 1
        self._put(relay, token_id)


def takes(loaded: LoadedModel, schema: Json, instance: str) -> bool:
    """Return whether the grammar that the server makes of a schema takes an instance."""
    grammar = Grammars(loaded).made(schema)
    ids = loaded.tokenizer(instance)["input_ids"]
    return grammar.consume_tokens(ids) and grammar.is_accepting()


def wait_until(is_so: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for what is bound to happen; fail after so many seconds."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def process_of(loaded: LoadedModel, folder: Path, *options: str) -> Iterator[tuple[Any, str]]:
    """Run `lade serve` as a process, which writes to `folder/log`; yield it and its address."""
    loaded.model.save_pretrained(folder / "model")
    loaded.tokenizer.save_pretrained(folder / "model")
    command = [sys.executable, "-m", "lade", "serve", "--model", str(folder / "model")]
    command += ["--dtype", str(loaded.model.dtype).removeprefix("torch.")]
    command += ["--model-name", NAME, "--threads", "1", "--port", "0"]
    log = folder / "log"
    with log.open("w") as file:
        wide = {**os.environ, "COLUMNS": "500"}
        process = subprocess.Popen([*command, *options], stderr=file, text=True, env=wide)

    def url() -> Any:
        assert process.poll() is None, log.read_text()
        return re.search(r"(http://\S+)/v1", log.read_text())

    try:
        wait_until(lambda: url() is not None, 300)  # a busy machine compiles kernels meanwhile
        yield process, url()[1]
    finally:
        process.kill()
        process.wait()
