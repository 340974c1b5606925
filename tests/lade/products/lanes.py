"""Kernels that are compiled for vectors of a given length, whatever this machine has."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numba
import pytest

import lade


def kernels_with(
    num_lanes: int, folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str
) -> ModuleType:
    """Return a module of kernels for vectors of so many float32.

    Args:
        folder: an empty one, of the test.
        names: of the modules that use tiles, each of those before it, the last of which is wanted.
    """
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    known: dict[str, str] = {}  # what is loaded in place of what
    for name in ("lade.products._tiles", *names):
        source = (Path(lade.__file__).parent.parent / (name.replace(".", "/") + ".py")).read_text()
        for other, mine in known.items():
            source = source.replace(other, mine)
        if not known:
            source, num = re.subn("(?m)^LANES = .*", f"LANES = {num_lanes}", source)
            assert num == 1
        known[name] = f"{name.replace('.', '_')}_{num_lanes}"
        module = _loaded(known[name], source, folder, monkeypatch)
    return module


def _loaded(name: str, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module
