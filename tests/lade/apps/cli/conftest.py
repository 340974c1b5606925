"""A tiny saved model with chat templates."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lade.tiny import byte_tokenizer

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'][0] }}>{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture
def templated(folder: str, tmp_path: Path) -> Callable[[str], str]:
    """Return a function that copies the tiny model and gives it a chat template."""

    def make(template: str) -> str:
        path = tmp_path / f"templated{len([*tmp_path.glob('templated*')])}"
        shutil.copytree(folder, path)
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(path)
        return str(path)

    return make
