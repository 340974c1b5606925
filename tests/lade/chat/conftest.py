"""Tiny models that one can chat with."""

from collections.abc import Callable
from typing import Any

import pytest

from lade.models.loading import LoadedModel
from tests.lade.shared import shared_model
from tests.lade.tiny import byte_tokenizer

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer_with(template: str | None = TEMPLATE) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def loaded() -> LoadedModel:
    """A model of bytes, exact, that never ends on its own."""
    return LoadedModel(shared_model(vocab_size=256, eos_token_id=None), tokenizer_with(), "tiny")


@pytest.fixture
def loaded_with() -> Callable[..., LoadedModel]:
    def make(template: str | None = TEMPLATE, **options: Any) -> LoadedModel:
        model = shared_model(**{"vocab_size": 256, "eos_token_id": None, **options})
        return LoadedModel(model, tokenizer_with(template), "tiny")

    return make
