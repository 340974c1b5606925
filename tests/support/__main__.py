"""Check every architecture of transformers, as tiny random models.

python -m tests.support --json docs/support/transformers-5.24.0.json

This prints how lade verifies drafts for each one, and whether its text is that of plain generate:
greedy, sampled, batched, past the window. Results in docs/support are written into docs/SUPPORT.md
as well. The exit code is 1 if one of them is wrong or fails.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lade.bench.report import write_json
from lade.config import Execution
from tests.support import formats_report, report
from tests.support.formats import all_formats, run_formats
from tests.support.run import all_names, run_all

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "support"


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    execution: Execution = "fixed" if asked.fixed_shapes else "eager"
    made: Any = formats_report if asked.formats else report
    found: Iterator[Any] = (
        run_formats(asked.names or [*all_formats()], seed=asked.seed)
        if asked.formats
        else run_all(asked.names or all_names(), seed=asked.seed, execution=execution)
    )
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
            print(made.summary(rows))
            if asked.json is not None:
                options = () if asked.formats else (execution,)
                results = made.results_of(rows, asked.seed, is_stopped, *options)
                write_json(asked.json, made.content_of(results))
    if asked.json is not None and asked.json.resolve().parent == RESULTS:
        document = formats_report.document(RESULTS)
        RESULTS.with_name("SUPPORT.md").write_text(document, encoding="utf-8")
    return int(any(row.is_bad for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tests.support",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names",
        nargs="*",
        help="model types, such as qwen3, or variants, such as qwen3-window; with --formats, "
        "weight formats; without any, all",
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--fixed-shapes", action="store_true", help="verify trees in forwards of a few fixed shapes"
    )
    kinds.add_argument(
        "--formats",
        action="store_true",
        help="check weight formats, such as int8 and nf4, and what longer forwards cost in each",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts, drafts, samples")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
