"""Garbage collection is put off while much is made that stays, and is as it was afterwards."""

import gc
import subprocess
import sys

import pytest

from lade.garbage import without_collection


@pytest.mark.parametrize("was_enabled", [True, False])
def test_collection_is_as_it_was_afterwards(was_enabled: bool) -> None:
    before = gc.isenabled()
    try:
        gc.enable() if was_enabled else gc.disable()
        with without_collection():
            with pytest.raises(KeyError), without_collection():
                raise KeyError
            assert not gc.isenabled()
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable() if before else gc.disable()


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
