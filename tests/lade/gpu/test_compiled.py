"""Steps of fixed shape through `torch.compile`."""

import importlib.util
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import lade
from lade.attention import tree as tree_attention
from lade.gpu.capture import NoWaiting
from lade.gpu.compiled import CompiledModel
from lade.probing.profile import profile_of
from tests.lade.both import ONE, THREE, both
from tests.lade.tiny import tiny_model

pytestmark = pytest.mark.exhaustive  # compilers take their time
LAYERS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]}
}
COMPILED = lade.Config(execution="compiled", max_draft_tokens=7)


@pytest.fixture(autouse=True)
def _reset_compiler(single_thread: None) -> Any:
    yield
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_text_is_that_of_generate(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of the compiler but its last part, which makes machine code."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", partial(compile_, backend="aot_eager"))
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
    (compiled,) = profile_of(model).workspace_store.compiled.values()
    assert graphs["stats"]["unique_graphs"] == len(compiled) <= 3  # one for each width


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make lade take the CPU for a device with kernels; their operators are plain torch there.

    The answer is given by what a compiler cannot look into, as on a GPU.
    """

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def has_kernels(device: torch.device) -> bool:
        return importlib.util.find_spec("torch") is not None

    monkeypatch.setattr(tree_attention, "_has_kernels", has_kernels)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
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
    counters: Any = torch._dynamo.utils.counters
    counters.clear()
    model = tiny_model(family, num_hidden_layers=2, dtype=torch.float32, **LAYERS.get(family, {}))
    for max_draft_tokens in (7, 0, 20):
        config = lade.Config(execution="compiled", max_draft_tokens=max_draft_tokens)
        both(model, ONE, config=config, do_sample=False, max_new_tokens=40)
    (compiled,) = profile_of(model).workspace_store.compiled.values()
    assert len(graphs) == len(compiled) >= 3
    assert not counters["graph_break"]
    for graph in graphs:
        calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        assert calls.count(torch.ops.lade.attend.default) == 2  # of two layers


def test_what_is_rehearsed_is_compiled_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch meets under a dispatch mode, such as a rehearsal's, it never compiles again."""
    num_runs = 0

    def backend(graph: Any, inputs: Sequence[Any]) -> Any:
        def run(*args: Any) -> Any:
            nonlocal num_runs
            num_runs += 1
            return graph.forward(*args)

        return run

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    model = tiny_model("llama", num_hidden_layers=1, dtype=torch.float32)
    compiled = CompiledModel(model)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    inputs = {"input_ids": ONE[:, :3], "attention_mask": mask}
    runs = []
    for is_rehearsed in (True, False, True, False, False):
        with torch.no_grad(), NoWaiting() if is_rehearsed else nullcontext():
            logits = compiled(**inputs).logits
        assert torch.equal(logits, model(**inputs).logits)
        runs.append(num_runs)
    assert runs == [0, 1, 1, 2, 3]


def test_further_shapes_are_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lade.gpu.compiled.MAX_RECORDINGS", 2)
    made: list[Any] = []

    def compile_(run: Any, **options: Any) -> Any:
        made.append(run)
        return run

    monkeypatch.setattr(torch, "compile", compile_)
    compiled = CompiledModel(lambda **inputs: inputs["input_ids"].shape[1])
    for width in (1, 2, 4, 2):
        mask = torch.ones(1, 1, width, 9)
        for masks in (mask, {"full_attention": mask}):
            assert compiled(input_ids=torch.zeros(1, width), attention_mask=masks) == width
    assert len(compiled) == len(made) == 2
    assert made[0].__code__ is not made[1].__code__
