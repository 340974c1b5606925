"""`python -m tests.equality`: walk a table of other cases than those of the tests."""

import argparse
import sys
from collections import Counter

from rich.progress import track

from tests.equality.table import cases
from tests.fuzz.compare import call_lade, compare
from tests.fuzz.run import deterministic, explain


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.equality", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", help="the cases of this model alone")
    parser.add_argument("--no-shrink", action="store_true", help="print failing cases as drawn")
    arguments = parser.parse_args()
    kinds = Counter[str]()
    chosen = [
        (row, case)
        for row, case in cases(arguments.seed)
        if arguments.model in (None, row["model"])
    ]
    with deterministic():
        for row, case in track(chosen, "cases"):
            verdict = compare(case)
            kinds[verdict.kind] += 1
            if verdict.kind not in ("same", "tie"):
                print(row, verdict.kind, verdict.reason, *verdict.differences, sep="\n  ")
            if verdict.kind == "mismatch":
                print(explain(str(row), case, call_lade, not arguments.no_shrink), flush=True)
    print(dict(kinds))
    return int(kinds["mismatch"] > 0)


if __name__ == "__main__":
    sys.exit(main())
