"""A tiny model that speaks printable text, served; and what it says plainly."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import torch

from lade.config import Config
from lade.models.loading import LoadedModel
from lade.server.app import Server
from lade.server.options import ServerOptions
from tests.lade.tiny import byte_tokenizer, tiny_model

NAME = "tiny"
# Every run takes the same steps: with a limit to candidates nothing is explored.
REPEATING = Config(max_candidates=4, max_draft_tokens=4, uses_table=False)
# Without spaces: the model knows the 94 printable characters of ASCII only, so its text is text.
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
QUESTION = [{"role": "user", "content": "What-is-a-pool?"}]


def loaded_model(**options: Any) -> LoadedModel:
    """Return a tiny model whose answers do not end by themselves."""
    tokenizer = byte_tokenizer()
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
    output = loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options
    )
    token_ids: list[int] = output[0, ids.shape[1] :].tolist()
    return token_ids


def plain_text(loaded: LoadedModel, *args: Any, **options: Any) -> str:
    return str(loaded.tokenizer.decode(plain_ids(loaded, *args, **options)))


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
    text = httpx.get(server.url.removesuffix("/v1") + "/metrics").text
    found = 0.0
    for line in text.splitlines():
        named = line.startswith((f"{name}{{", f"{name} "))
        if named and all(f'{label}="{value}"' in line for label, value in labels.items()):
            found += float(line.rsplit(" ", 1)[1])
    return found
