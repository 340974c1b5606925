"""What a result of fuzzing or of stress is of: its date, code and versions."""

import platform
from datetime import UTC, datetime
from typing import Any

import numba
import torch
import transformers

import lade
from benchmarks.environment import code


def about() -> dict[str, Any]:
    """Return date, code and versions, ready for JSON."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "code": code(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numba": numba.__version__,
            "lade": lade.__version__,
        },
    }
