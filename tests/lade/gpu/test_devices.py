"""On a GPU what holds on a CPU: every way of verifying, every execution, captures beside others.

Tests that run on both devices show that a failure on a GPU is the GPU's. `make gpu` runs all that
need one.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lade
from lade.captures import free_unused
from lade.config import SPECULATING, Execution, Verification
from lade.errors import UnsupportedModelError
from lade.gpu.capture import clear_workspaces
from lade.gpu.graphs import CudaRecorder
from lade.probing.profile import profile_of
from tests.grids import thinned
from tests.lade.both import ONE, THREE, both
from tests.lade.devices import needing_workspace, on_both
from tests.lade.gpu.test_graphs import LONG
from tests.lade.recorder import CpuRecorder, RecordingPolicy
from tests.lade.tiny import BLOOM, FAMILIES, MAMBA2, tiny_model

ROOT = Path(__file__).parents[3]
# Those that cannot be verified by trees, too.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{name: {} for name in FAMILIES},
    "bloom": {**BLOOM, "attention": "eager"},
    "mamba2": {**MAMBA2, "attention": "eager"},
}
EXPERTS: dict[str, Any] = {
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def model_on(device: str, name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return tiny_model(name, dtype=dtype, **{**ARCHITECTURES.get(name, {}), **options}).to(device)


def refused_by(model: Any) -> set[Verification]:
    """Return the ways in which no text of a model can be verified."""
    refused: set[Verification] = set()
    for verification in SPECULATING:
        config = lade.Config(verification=verification)
        try:
            lade.generate(model, ONE.to(model.device), config=config, max_new_tokens=2)
        except UnsupportedModelError:
            refused.add(verification)
    return refused


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "device"), on_both(ARCHITECTURES, "llama", "bloom", "mamba2"))
def test_every_way_of_verifying_gives_the_text_of_generate(name: str, device: str) -> None:
    """In float32, seed for seed, and no other ways are refused than on a CPU."""
    refused = refused_by(model_on("cpu", name))
    model = model_on(device, name)
    assert refused_by(model) == refused
    assert len(refused) < len(SPECULATING)
    for verification in SPECULATING:
        if verification in refused:
            continue
        config = lade.Config(verification=verification, max_draft_tokens=8)
        for do_sample in (False, True):
            _, got = both(model, ONE, config=config, do_sample=do_sample, **LONG)
            assert got.stats.num_accepted_tokens > 0


@pytest.mark.parametrize(("name", "device"), on_both(FAMILIES, "llama"))
@pytest.mark.parametrize("execution", thinned(["eager", "fixed", "graphs"], "graphs"))
def test_every_execution_gives_the_text_of_generate(
    name: str, execution: Execution, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny models have heads too small for some kernels."""
    if device == "cpu":
        policy = RecordingPolicy(CpuRecorder())
        monkeypatch.setattr("lade.hf.generation.Generation.policy", policy)
    model = model_on(device, name)
    config = lade.Config(execution=execution, max_draft_tokens=8)
    for prompt in (ONE, THREE):
        for do_sample in (False, True):
            for _ in range(2):
                both(model, prompt, config=config, do_sample=do_sample, **LONG)
    kept = profile_of(model).workspace_store._kept
    assert any(workspace.graphs for workspace in kept) == (execution == "graphs")


# --- captures, and what else uses the device ------------------------------------------------------


def recorded_product(recorder: CudaRecorder) -> Callable[[], None]:
    """Record a product that needs a workspace; return a check of its replay."""
    x, weight = needing_workspace()
    expected = x @ weight
    recording = recorder.record(lambda is_recorded: x @ weight)

    def check(reads: tuple[Tensor, ...] = (x, weight)) -> None:
        """Replay with what it reads still there."""
        recording.output.fill_(torch.nan)
        recording.replay()
        torch.testing.assert_close(recording.output, expected)

    return check


def fill_free_memory() -> None:
    """Write NaN to memory that is not in use, and give it back."""
    clear_workspaces()
    torch.cuda.empty_cache()
    torch.full((2**29,), torch.nan, device="cuda")  # 2 GiB
    torch.cuda.empty_cache()


@pytest.mark.cuda
def test_a_recording_outlives_another_of_the_same_recorder() -> None:
    """As long as a graph lives, nothing that it reads goes with another one."""
    recorder = CudaRecorder(torch.device("cuda"))
    first, second = recorded_product(recorder), recorded_product(recorder)
    del first
    fill_free_memory()
    second()
    third = recorded_product(recorder)
    fill_free_memory()
    second()
    third()


@pytest.mark.cuda
@pytest.mark.parametrize("waits", [False, True])
def test_after_a_failed_capture_the_device_and_the_recorder_are_usable(waits: bool) -> None:
    """What raises ends a capture; what waits also makes it invalid."""
    recorder = CudaRecorder(torch.device("cuda"))
    recorded_product(recorder)()
    num_runs = 0

    def run(is_recorded: bool) -> Tensor:
        nonlocal num_runs
        num_runs += 1
        drawn = torch.randn(8, 8, device="cuda").relu()
        if num_runs == 3:  # after two rehearsals
            torch.cuda.synchronize() if waits else None
            raise RuntimeError("mine")
        return drawn

    with pytest.raises(RuntimeError):
        recorder.record(run)
    assert num_runs == 3
    torch.randn(8, device="cuda")  # the generator takes no capture for under way
    fill_free_memory()
    recorder.begin_anew()
    recorded_product(recorder)()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_experts_are_recorded_or_run_as_they_are(experts: str, dtype: torch.dtype) -> None:
    """Where a kernel copies sizes to the host, that is known before a capture is spoiled."""
    model = model_on("cuda", "qwen3_moe", dtype, **EXPERTS)
    model.set_experts_implementation(experts)
    config = lade.Config(execution="graphs", max_draft_tokens=4)
    options: dict[str, Any] = {"do_sample": False, "config": config, **LONG}
    has_kernel = torch.cuda.get_device_capability()[0] in (9, 10) and dtype == torch.bfloat16
    if experts == "grouped_mm" and not has_kernel:
        with pytest.warns(lade.EagerExecutionWarning, match="grouped_mm"):
            got = lade.generate(model, ONE.cuda(), **options)
    else:
        got = lade.generate(model, ONE.cuda(), **options)
        (workspace,) = profile_of(model).workspace_store._kept
        assert workspace.graphs is not None
        assert len(workspace.graphs) > 0
    assert got.shape[1] == ONE.shape[1] + LONG["max_new_tokens"]
    fill_free_memory()
    again = lade.generate(model, ONE.cuda(), **options)
    assert again.shape == got.shape


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:called a synchronizing")  # of one, as another's mode ends
def test_threads_that_record_draw_and_free_at_once_disturb_nobody() -> None:
    """Captures of one, draws of another and freed memory of a third take turns."""

    def answer(seed: int) -> None:
        model = model_on("cuda", "llama", seed=seed)
        config = lade.Config(execution="graphs", max_draft_tokens=8)
        inputs: dict[str, Any] = {"attention_mask": torch.ones_like(ONE).cuda()}
        for _ in range(3):
            got = lade.generate(model, ONE.cuda(), config=config, do_sample=False, **inputs, **LONG)
            expected = model.generate(ONE.cuda(), do_sample=False, pad_token_id=0, **inputs, **LONG)
            assert torch.equal(got, expected)
            sampled = lade.generate(
                model, ONE.cuda(), config=config, do_sample=True, **inputs, **LONG
            )
            assert sampled.shape == got.shape
            free_unused(model.device)

    with ThreadPoolExecutor(4) as threads:
        for answered in [threads.submit(answer, seed) for seed in range(4)]:
            answered.result()


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:::torch")
def test_a_static_cache_that_transformers_compiles_disturbs_no_recording() -> None:
    """It clears the workspaces of all graphs, and its own graphs lie in the same memory."""
    model = model_on("cuda", "llama", num_hidden_layers=1)
    config = lade.Config(execution="graphs", max_draft_tokens=8)
    for _ in range(2):
        both(model, ONE, config=config, do_sample=False, **LONG)
        inputs = {"attention_mask": torch.ones_like(ONE).cuda(), "pad_token_id": 0}
        options: dict[str, Any] = {"do_sample": False, "cache_implementation": "static", **LONG}
        model.generate(ONE.cuda(), **inputs, **options)
        fill_free_memory()
        both(model, ONE, config=config, do_sample=False, **LONG)


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:::torch")
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_compiled_steps_give_the_text_of_generate(name: str) -> None:
    model = model_on("cuda", name, num_hidden_layers=2, **_layers_of(name))
    config = lade.Config(execution="compiled", max_draft_tokens=8)
    for _ in range(2):
        both(model, ONE, config=config, do_sample=False, **LONG)
    (workspace,) = profile_of(model).workspace_store._kept
    assert workspace.graphs is not None
    assert len(workspace.graphs) > 0


def _layers_of(name: str) -> dict[str, Any]:
    is_mixed = name == "gemma3_text"
    return {"layer_types": ["sliding_attention", "full_attention"]} if is_mixed else {}


# --- a GPU that a test broke ----------------------------------------------------------------------

_CONFTEST = """
import torch
from tests.lade.devices import pytest_runtest_protocol, pytest_runtest_setup

errors = []

def synchronize():
    if errors:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

torch.cuda.is_available, torch.cuda.synchronize = (lambda: True), synchronize
"""
_TESTS = """
import conftest
import pytest

pytestmark = pytest.mark.cuda

def test_before():
    pass

def test_that_breaks_it():
    conftest.errors.append(1)
    assert False

def test_after():
    assert not conftest.errors
"""


@pytest.mark.exhaustive
def test_a_worker_whose_gpu_is_broken_is_replaced(tmp_path: Path) -> None:
    """Else whatever ran later would fail for that, and say nothing of itself."""
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "test_it.py").write_text(_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = cuda: needs a GPU\n")
    options = ("-n", "1", "-rA", "-p", "no:cacheprovider", "-p", "no:randomly")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "PASSED test_it.py::test_before" in run.stdout
    assert "FAILED test_it.py::test_that_breaks_it" in run.stdout
    assert "PASSED test_it.py::test_after" in run.stdout
    assert "crashed" in run.stdout
