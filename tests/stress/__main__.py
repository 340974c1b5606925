"""`python -m tests.stress`: run one kind of stress, and tell what was found."""

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from tests.about import about
from tests.stress.interrupts import call_from_threads, interrupt_between, interrupt_by_signals
from tests.stress.processes import end_processes
from tests.stress.uses import USES


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 where anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    kinds = ("functions", "interrupts", "threads", "processes")
    what = (
        "interrupt calls where functions begin or by signals, call from threads, or end processes"
    )
    parser.add_argument("what", choices=kinds, help=what)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--kind", choices=USES, help="what threads call")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file of results to put this one into")
    asked = parser.parse_args(argv)
    tempfile.tempdir = tempfile.mkdtemp()  # of no other process, whose files would be counted
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    if asked.what == "processes":
        result = end_processes(asked.calls, asked.seed)
    elif asked.what == "threads":
        result = call_from_threads(asked.kind or "tree", asked.calls, asked.threads)
    else:
        between = asked.what == "functions"
        result = (interrupt_between if between else interrupt_by_signals)(
            asked.calls, USES, asked.seed
        )
    told = {"what": asked.what, "seed": asked.seed, "kind": asked.kind} | asdict(result)
    told |= {"seconds": round(time.perf_counter() - start, 1)} | about()
    print(json.dumps(told, indent=1))
    if asked.out is not None:  # in the place of an earlier one
        results = json.loads(asked.out.read_text()) if asked.out.exists() else {}
        results[" ".join(filter(None, (asked.what, asked.kind)))] = told
        asked.out.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    return int(bool(result.raised or result.wrong or result.left))


if __name__ == "__main__":
    sys.exit(main())
