"""A tiny model that speaks printable text, served; and what it says plainly."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lade.config import Config
from lade.models.loading import LoadedModel
from lade.server.app import Server
from lade.server.options import ServerOptions
from tests.lade.tiny import tiny_model

NAME = "tiny"
# Every run takes the same steps: with a limit to candidates nothing is explored.
REPEATING = Config(max_candidates=4, max_draft_tokens=4, uses_table=False)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
QUESTION = [{"role": "user", "content": "What-is-a-pool?"}]


def printable_tokenizer() -> Any:
    """Return a tokenizer with one token for each printable character, a space for one of them."""
    letters = {chr(33 + place).replace("`", "Ġ"): place for place in range(94)}
    made = Tokenizer(models.BPE(letters, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def loaded_model(**options: Any) -> LoadedModel:
    """Return a tiny model whose answers do not end by themselves."""
    tokenizer = printable_tokenizer()
    if "eos_token_id" in options:
        tokenizer.add_special_tokens({"eos_token": "~"})
    tokenizer.chat_template = TEMPLATE
    options = {"vocab_size": 94, "eos_token_id": None, "dtype": torch.float32, **options}
    model = tiny_model(**options)
    model.generation_config.do_sample = False
    return LoadedModel(model, tokenizer, NAME)


def prompt_ids(loaded: LoadedModel, messages: Sequence[dict[str, Any]] = QUESTION) -> Any:
    return loaded.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def plain_ids(
    loaded: LoadedModel,
    messages: Sequence[dict[str, Any]] | str = QUESTION,
    *,
    seed: int | None = None,
    **options: Any,
) -> list[int]:
    """Return the tokens of transformers' own answer."""
    if isinstance(messages, str):
        inputs = loaded.tokenizer(messages, return_tensors="pt")
    else:
        inputs = prompt_ids(loaded, messages)
    ids = inputs["input_ids"]
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


@contextmanager
def serving(loaded: LoadedModel, **options: Any) -> Iterator[Server]:
    options = {"config": REPEATING, **options}
    with Server(loaded, ServerOptions(**options), port=0) as server:
        yield server


@contextmanager
def client_of(server: Server, api_key: str = "none", **options: Any) -> Iterator[openai.OpenAI]:
    options = {"max_retries": 0, "timeout": 60, **options}
    with openai.OpenAI(base_url=server.url, api_key=api_key, **options) as client:
        yield client


def asked(client: openai.OpenAI, **options: Any) -> Any:
    """Ask the question."""
    options = {"max_tokens": 40, "temperature": 0, "messages": QUESTION, **options}
    return client.chat.completions.create(model=NAME, **options)


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def post(server: Server, path: str = "/chat/completions", **options: Any) -> httpx.Response:
    """Send whatever it is, with no client's help."""
    headers = {"content-type": "application/json", **options.pop("headers", {})}
    return httpx.post(f"{server.url}{path}", headers=headers, timeout=60, **options)


def metric(server: Server, name: str, **labels: str) -> float:
    """Return a metric's value."""
    found = 0.0
    for line in server.metrics.text().decode().splitlines():
        named = line.startswith((f"{name}{{", f"{name} "))
        if named and all(f'{label}="{value}"' in line for label, value in labels.items()):
            found += float(line.rsplit(" ", 1)[1])
    return found


class Paced:
    """Has a model wait before each token for as long as a test wants it to."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.num_calls = 0
        self.num_tokens = 0
        self._tokens = threading.Semaphore(0)
        self._is_free = False
        self._model = loaded.model
        self._generate = loaded.model.generate

    def __enter__(self) -> "Paced":
        self._model.generate = self._paced
        return self

    def __exit__(self, *_: Any) -> None:
        self.free()
        del self._model.generate

    def let(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self._tokens.release()

    def free(self) -> None:
        self._is_free = True
        self.let(1)

    def _paced(self, **options: Any) -> Any:
        self.num_calls += 1
        options["stopping_criteria"].append(self)
        return self._generate(**options)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Be a stopping criterion."""
        if not self._is_free:
            assert self._tokens.acquire(timeout=60)
        self.num_tokens += 1
        return torch.zeros(len(input_ids), dtype=torch.bool)


def wait_until(is_so: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for what is bound to happen; fail after so many seconds."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)
