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
    num_lanes: int, folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_packed: bool = False
) -> ModuleType:
    """Return kernels for vectors of so many float32: of forwards, or of packed products.

    The folder is empty.
    """
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    root, tiles = Path(lade.__file__).parent / "forward", f"tiles_{num_lanes}"
    source, num = re.subn(
        "(?m)^LANES = .*", f"LANES = {num_lanes}", (root / "_tiles.py").read_text()
    )
    assert num == 1
    _loaded(tiles, source, folder, monkeypatch)
    kind = "packed" if is_packed else "kernels"
    source = (root / f"_{kind}.py").read_text().replace("lade.forward._tiles", tiles)
    return _loaded(f"{kind}_{num_lanes}", source, folder, monkeypatch)


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
