import pytest
import torch

from tests.lade.tiny import byte_tokenizer, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved tiny model with a byte-level tokenizer made on the spot."""
    path = tmp_path_factory.mktemp("tiny")
    byte_tokenizer().save_pretrained(path)
    model = tiny_model("llama", seed=2, dtype=torch.float32, vocab_size=256)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    return str(path)
