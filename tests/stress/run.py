"""The command: run one kind of stress, and tell what was found."""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.about import about
from tests.stress.interrupts import interrupt_by_signals, interrupt_lines, interrupt_threads
from tests.stress.threads import KINDS, call_from_threads
from tests.stress.uses import USES


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 where anything was found."""
    arguments = _parse(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    result = arguments.run(arguments)
    asked = {name: value for name, value in vars(arguments).items() if name not in ("run", "out")}
    told = asked | result | {"seconds": round(time.perf_counter() - start, 1)} | about()
    print(json.dumps(told, indent=1))
    if arguments.out is not None:
        _add(arguments.out, told)
    return int(bool(result["raised"] or result["wrong"] or result["left"]))


def _add(path: Path, told: dict[str, Any]) -> None:
    """Put a result into a file of results, by what was run, in the place of an earlier one."""
    results = json.loads(path.read_text()) if path.exists() else {}
    results[" ".join(filter(None, (told["what"], told.get("kind"))))] = told
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)

    def command(name: str, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help)
        added.add_argument("--seed", type=int, default=0)
        added.add_argument("--out", type=Path, help="a file of results to put this one into")
        return added

    lines = command("lines", "interrupt at every line, and once more when it comes again")
    lines.add_argument("--use", action="append", choices=USES, help="these alone")
    lines.add_argument(
        "--every-use", action="store_true", help="a line of several uses in each of them"
    )
    lines.set_defaults(
        run=lambda args: interrupt_lines(
            args.use or USES, known=None if args.every_use else set(), seed=args.seed
        ).as_dict()
    )
    interrupts = command("interrupts", "interrupt calls by a signal, at random moments")
    interrupts.add_argument("--calls", type=int, default=1000)
    interrupts.set_defaults(
        run=lambda args: interrupt_by_signals(args.calls, seed=args.seed).as_dict()
    )
    exceptions = command("async", "raise exceptions in threads that share a model and a pool")
    exceptions.add_argument("--exceptions", type=int, default=1587)
    exceptions.add_argument("--threads", type=int, default=6)
    exceptions.set_defaults(
        run=lambda args: interrupt_threads(
            args.exceptions, num_threads=args.threads, seed=args.seed
        ).as_dict()
    )
    threads = command("threads", "call from threads that share a model")
    threads.add_argument("--kind", choices=KINDS, default="gemma2")
    threads.add_argument("--calls", type=int, default=10_000)
    threads.add_argument("--threads", type=int, default=4)
    threads.set_defaults(
        run=lambda args: call_from_threads(args.kind, args.calls, args.threads).as_dict()
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
