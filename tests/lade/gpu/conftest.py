"""Devices that are not there, and their faults, for tests that use public names alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lade.attention import packed
from lade.hf.generation import Generation
from lade.probing import user_code
from lade.probing.profile import profile_of
from lade.probing.proof import Distances
from lade.probing.slots import Replaced
from lade.targets.kv_cache import TreeCache
from tests.lade.recorder import CpuRecorder, RecordingPolicy


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CpuRecorder:
    """Record on the CPU what a GPU would."""
    made = CpuRecorder()
    monkeypatch.setattr(Generation, "policy", RecordingPolicy(made))
    return made


@pytest.fixture
def cramped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let memory be taken for a prompt alone, so that texts outgrow it."""
    monkeypatch.setattr("lade.gpu.fixed._FIRST_NEW", 0)


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be memory for the longest text, and attention to what exists, as on a GPU."""
    monkeypatch.setattr("lade.gpu.fixed.spare_bytes", lambda device: 10**9)
    for module in ("lade.gpu.fixed", "lade.probing.selfcheck"):
        monkeypatch.setattr(f"{module}.runs_in_triton", lambda *_: True)


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Let every allocation of more slots than `most` fail."""
    limit = {"most": 10**9, "refused": 0}
    real = torch.Tensor.new_zeros

    def new_zeros(self: Tensor, shape: Any, **options: Any) -> Tensor:
        if len(shape) == 5 and shape[3] > limit["most"]:
            limit["refused"] += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(self, shape, **options)

    monkeypatch.setattr(torch.Tensor, "new_zeros", new_zeros)
    # It stands in for a device, and is no code of the user's.
    monkeypatch.setattr(user_code, "_REPLACED", Replaced(lambda _: False))
    return limit


@pytest.fixture
def wrong_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps of fixed shape write all keys to one slot."""
    right = TreeCache.fix

    def wrong(self: TreeCache, slots: Any, length: Any = None) -> None:
        moved = {kind: each._replace(of_new=each.of_new * 0) for kind, each in slots.items()}
        right(self, moved, length)

    monkeypatch.setattr(TreeCache, "fix", wrong)


@pytest.fixture
def bend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Return what makes lade's attention wrong, and has the next call of a model looked at."""
    attended = packed._attended

    def make_wrong(model: Any) -> None:
        monkeypatch.setattr(packed, "_attended", lambda q, *args: attended(1.5 * q, *args))
        profile_of(model).proofs["tree"] = Distances()

    return make_wrong
