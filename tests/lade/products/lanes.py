"""Kernels that are compiled for vectors of a given length, whatever this machine has."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numba
import pytest

from lade.products import linear


def kernels_with(
    num_lanes: int, folder: Path, monkeypatch: pytest.MonkeyPatch, users: Path | None = None
) -> ModuleType:
    """Return the kernels of products for vectors of so many float32, or those that use them.

    Args:
        folder: an empty one, of the test.
        users: the file of kernels that import those of products.
    """
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    source = Path(linear.__file__).with_name("_kernels.py").read_text()
    changed = re.sub("(?m)^LANES = .*", f"LANES = {num_lanes}", source)
    assert changed.count(f"\nLANES = {num_lanes}\n") == 1
    module = _loaded(f"products_{num_lanes}", changed, folder, monkeypatch)
    if users is None:
        return module
    source = users.read_text().replace("lade.products._kernels", module.__name__)
    return _loaded(f"users_{num_lanes}", source, folder, monkeypatch)


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
