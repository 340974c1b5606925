"""Garbage collection is put off while much is made that stays."""

import subprocess
import sys

import pytest


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
