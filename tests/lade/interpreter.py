"""A process of Triton's interpreter, which computes one case after the other."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Interpreted = Callable[[Any], dict[str, Any]]


@contextmanager
def interpreted_by(module: str, *options: str) -> Iterator[Interpreted]:
    """Start a module in the interpreter; give a function that returns its report on a case.

    Args:
        module: calls `answer_cases` when run.
        options: of Python.
    """
    process = subprocess.Popen(
        [sys.executable, *options, "-m", module],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        to_worker, from_worker = process.stdin, process.stdout
        assert to_worker is not None
        assert from_worker is not None

        def run(case: Any) -> dict[str, Any]:
            print(json.dumps(case), file=to_worker, flush=True)
            report: dict[str, Any] = json.loads(from_worker.readline())
            return report

        yield run


def answer_cases(error_of: Callable[[Any], float]) -> None:
    """Read cases and print how far each is off."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        try:
            report: dict[str, Any] = {"error": error_of(json.loads(line))}
        except Exception:
            report = {"raised": traceback.format_exc()}
        print(json.dumps(report), flush=True)
