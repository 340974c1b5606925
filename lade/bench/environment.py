"""The commit, hardware, versions and date of a measurement."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from lade._version import __version__

_PACKAGE = Path(__file__).parents[1]
_SOURCES = ("lade", "ngram_pool")  # what results depend on; result files change as they are made


def environment() -> dict[str, Any]:
    """Return commit, hardware, versions and date, ready for JSON, without host name or paths."""
    import torch

    packages = ("torch", "transformers", "numba", "numpy")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "cpu": _cpu_name(),
        "num_cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "lade": __version__,
        **{name: metadata.version(name) for name in packages},
    }


def commit(package: Path = _PACKAGE) -> str:
    """Return the commit of the checked-out code.

    Args:
        package: the folder of the package `lade`.

    Returns:
        The commit's hash, followed by `-dirty` if a source file has changed since; "unknown"
        outside a git checkout of this project, as in an installed wheel.
    """
    root = package.parent
    # A virtual environment may lie in another project's checkout, which does not track our files.
    if _git(root, "ls-files", "--error-unmatch", str(package / "__init__.py")) is None:
        return "unknown"
    found = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", *_SOURCES)
    if not found or changes is None:
        return "unknown"
    return f"{found}-dirty" if changes else found


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints, or None if it fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


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
