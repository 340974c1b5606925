"""Tests on a GPU: marked `cuda`, skipped without one, and apart from those that broke it."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

#: For tests that run on a CPU and, where there is one, on a GPU.
CPU_AND_CUDA = (
    pytest.param("cpu", marks=pytest.mark.twin),
    pytest.param("cuda", marks=pytest.mark.cuda),
)


# An error inside a kernel leaves its process unable to use the device, whatever runs next.
_BROKEN = 86


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a GPU where there is none."""
    if item.get_closest_marker("cuda") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """End a worker that can no longer use its GPU; pytest-xdist goes on with a new one."""
    result = yield
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if is_worker and item.get_closest_marker("cuda") is not None and _is_broken():
        os._exit(_BROKEN)
    return result


def _is_broken() -> bool:
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
