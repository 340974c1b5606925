"""Tests that do not depend on the order they run in, nor on others in the same process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lade.probing import user_code
from tests.lade import shared
from tests.lade.tiny import byte_tokenizer, tiny_model


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a GPU where there is none."""
    if item.get_closest_marker("cuda") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def steady_random_state() -> None:
    """Begin each test with the same state of torch's generator, whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def same_number_of_threads() -> Iterator[None]:
    """Leave torch the threads it had: those of a command would be there for all tests after it."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved tiny model with a byte-level tokenizer made on the spot."""
    path = tmp_path_factory.mktemp("tiny")
    byte_tokenizer().save_pretrained(path)
    sizes: dict[str, Any] = {"vocab_size": 256, "num_hidden_layers": 1}
    model = tiny_model("llama", seed=2, dtype=torch.float32, **sizes)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    return str(path)


@pytest.fixture
def single_thread() -> Iterator[None]:
    """Compute on one thread: several would split tiny products row by row, unlike real ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as a device that has to be waited for."""
    monkeypatch.setattr("lade.hf.generation.is_asynchronous", lambda device: True)


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take code of the tests for lade's own, which asks for no check: hooks that note what runs."""
    monkeypatch.setattr(user_code, "_HOME", {*user_code._HOME, "tests"})


@pytest.fixture(autouse=True)
def shared_models_stay_whole() -> Iterator[None]:
    """Fail a test that changes a model it shares with others, and let the next one begin anew."""
    shared.forget()
    yield
    changes = shared.hand_back()
    assert not changes, f"a shared model was changed, take `tiny_model`: {changes}"
