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
    num_lanes: int, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> ModuleType:
    """Return a module of kernels, and with it tiles, for vectors of so many float32.

    Args:
        folder: an empty one, of the test.
        name: of the module, which uses no others but tiles.
    """
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    root, tiles = Path(lade.__file__).parent.parent, f"tiles_{num_lanes}"
    source = (root / "lade/products/_tiles.py").read_text()
    source, num = re.subn("(?m)^LANES = .*", f"LANES = {num_lanes}", source)
    assert num == 1
    _loaded(tiles, source, folder, monkeypatch)
    source = (root / (name.replace(".", "/") + ".py")).read_text()
    source = source.replace("lade.products._tiles", tiles)
    return _loaded(f"kernels_{num_lanes}", source, folder, monkeypatch)


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
