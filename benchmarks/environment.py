"""The code, hardware, versions and date of a measurement."""

import hashlib
import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from lade._version import __version__

_ROOT = Path(__file__).parents[1]
_SOURCES = ("lade", "ngram_pool")  # what results depend on; result files change as they are made


def environment() -> dict[str, Any]:
    """Return code, hardware, versions and date, ready for JSON, without host name or paths."""
    import torch

    packages = ("torch", "transformers", "numba", "numpy")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "code": code(),
        "cpu": _cpu_name(),
        "num_cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "lade": __version__,
        **{name: metadata.version(name) for name in packages},
    }


def code(root: Path = _ROOT) -> str:
    """Return a digest of the Python source of `lade` and `ngram_pool`, 12 hexadecimal digits.

    It is that of a measurement in a checkout, whatever is committed there, and in a wheel.
    """
    digest = hashlib.sha256()
    for package in _SOURCES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _cpu_name() -> str:
    from llvmlite.binding import get_host_cpu_name  # the microarchitecture, such as znver5

    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
    except OSError:
        names = []
    return f"{names[0] if names else platform.processor()} ({get_host_cpu_name()})"
