"""Check every architecture of transformers, as tiny random models.

python -m tests.support --json docs/support/transformers-5.24.0.json

This prints how lade verifies drafts for each one, and whether its text is that of plain generate:
greedy, sampled, batched, past the window. The exit code is 1 if one of them is wrong or fails. Of
results in docs/support, `python docs/figures.py` writes tables of docs/models.md.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support import formats, forwards, report
from tests.support.formats import all_formats, run_formats
from tests.support.forwards import run_forwards
from tests.support.inside import write_json
from tests.support.run import all_names, run_all


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.support",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = "model types or variants, or weight formats with --formats; without any, all"
    parser.add_argument("names", nargs="*", help=names)
    of_formats = "check weight formats, and what longer forwards cost in each"
    parser.add_argument("--formats", action="store_true", help=of_formats)
    of_forwards = "read models as for one compiled job, and tell what does not fit"
    parser.add_argument("--forwards", action="store_true", help=of_forwards)
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts, drafts, samples")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    asked = parser.parse_args(arguments)
    made: Any = formats if asked.formats else forwards if asked.forwards else report
    found: Iterator[Any]
    if asked.formats:
        found = run_formats(asked.names or [*all_formats()], seed=asked.seed)
    elif asked.forwards:
        found = run_forwards(asked.names or all_names(), seed=asked.seed)
    else:
        found = run_all(asked.names or all_names(), seed=asked.seed)
    # Models so small would only wait for each other's threads, and times are compared.
    torch.set_num_threads(1)
    rows: list[Any] = []
    is_stopped = True
    try:
        for row in found:
            rows.append(row)
            print(" | ".join(made.cells(row)), flush=True)
        is_stopped = False
    finally:  # what an interrupted run found is kept
        if rows:
            print(json.dumps(made.summary(rows), indent=1))
            if asked.json is not None:
                write_json(asked.json, made.content_of(rows, asked.seed, is_stopped))
    return int(any(row.is_bad for row in rows))


if __name__ == "__main__":
    sys.exit(main())
