"""Steps of fixed shape through `torch.compile`."""

import shutil
from typing import Any

import pytest
import torch

import lade
from lade.probing.profile import profile_of
from tests.lade.both import ONE, THREE, both
from tests.lade.tiny import tiny_model

pytestmark = pytest.mark.exhaustive  # compilers take their time
COMPILED = lade.Config(execution="compiled", max_draft_tokens=7)


@pytest.fixture(autouse=True)
def _single_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_text_is_that_of_generate(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of the compiler but its last part, which makes machine code."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile_(model, backend="aot_eager"))
    model = tiny_model(family)
    for prompt in (ONE, THREE) if family == "llama" else (ONE,):
        both(model, prompt, config=COMPILED, do_sample=False, max_new_tokens=40)
    assert profile_of(model).workspace_store.compiled
    lade.release(model)
    assert not profile_of(model).workspace_store.compiled


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_machine_code_gives_that_text_too() -> None:
    model = tiny_model("llama", num_hidden_layers=1, dtype=torch.float32)
    graphs: Any = torch._dynamo.utils.counters
    graphs.clear()
    both(model, ONE, config=COMPILED, do_sample=False, max_new_tokens=24)
    assert graphs["frames"]["ok"] >= 1
    assert not graphs["graph_break"]
    # Widths and lengths are told apart by size alone, so they do not compile again and again.
    assert graphs["stats"]["unique_graphs"] <= 3
