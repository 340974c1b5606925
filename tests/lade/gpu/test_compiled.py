"""Steps of fixed shape through `torch.compile`."""

import shutil
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

import lade
from tests.lade.both import ONE, THREE, both
from tests.lade.devices import CPU_AND_CUDA
from tests.lade.tiny import tiny_model

pytestmark = [
    pytest.mark.exhaustive,  # compilers take their time
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:::torch"),
]
LAYERS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]}
}
COMPILED = lade.Config(execution="compiled", max_draft_tokens=7)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40}


@pytest.fixture(autouse=True)
def _reset_compiler(single_thread: None) -> Any:
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_text_is_that_of_generate(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of the compiler but its last part, which makes machine code."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model = tiny_model(family)
    for prompt in (ONE, THREE) if family == "llama" else (ONE,):
        both(model, prompt, config=COMPILED, **GREEDY)


@pytest.mark.parametrize("device", CPU_AND_CUDA)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_machine_code_gives_that_text_too(device: str) -> None:
    model = tiny_model("llama", num_hidden_layers=1, dtype=torch.float32).to(device)
    for _ in range(1 if device == "cpu" else 2):
        both(model, ONE, config=COMPILED, **GREEDY)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "mistral"])
def test_every_width_is_one_graph_of_static_shape_with_attention_as_an_operator(
    family: str, with_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Sequence[Any]) -> Any:
        graphs.append(graph)
        assert not any(isinstance(each, torch.SymInt) for each in inputs)
        return graph.forward

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", partial(compile_, backend=backend, fullgraph=True))
    model = tiny_model(family, num_hidden_layers=2, dtype=torch.float32, **LAYERS.get(family, {}))
    for max_draft_tokens in (7, 0, 20):
        config = lade.Config(execution="compiled", max_draft_tokens=max_draft_tokens)
        both(model, ONE, config=config, **GREEDY)
    assert len(graphs) >= 3
    for graph in graphs:
        calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        assert calls.count(torch.ops.lade.attend.default) == 2  # of two layers
    lade.release(model)
    both(model, ONE, config=COMPILED, **GREEDY)
    assert len(graphs) > 3  # given back, and compiled anew
