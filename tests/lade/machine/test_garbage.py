"""Garbage collection is put off while much is made that stays, and freed memory is given back."""

import ctypes
import subprocess
import sys

import psutil
import pytest

from lade.machine.garbage import return_memory


@pytest.mark.exhaustive  # a process of its own takes some seconds
def test_nothing_is_collected_while_lade_is_imported() -> None:
    code = (
        "import gc\n"
        "import torch, transformers, lade\n"
        "begun = []\n"
        "gc.callbacks.append(lambda phase, info: begun.append(phase))\n"
        "lade.generate\n"
        "print(begun.count('start'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert int(done.stdout) <= 1  # at the end


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not of glibc")
def test_freed_memory_between_what_stays_is_given_back() -> None:
    blocks = [b"x" * 60_000 for _ in range(4000)]
    kept = blocks[::40]
    del blocks
    memory = psutil.Process().memory_info
    before = memory().rss
    return_memory()
    assert before - memory().rss > 150_000_000
    assert len(kept) == 100
