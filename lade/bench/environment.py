"""What a result was measured on: hardware, versions, date."""

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from lade._version import __version__


def environment() -> dict[str, Any]:
    """Return hardware, versions and date, ready for JSON; no host name and no path."""
    import torch

    packages = ("torch", "transformers", "numba", "numpy")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu_name(),
        "num_cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "lade": __version__,
        **{name: metadata.version(name) for name in packages},
    }


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
