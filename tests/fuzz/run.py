"""The command: draw cases, compare them on several processes, make failures small, sum up."""

import argparse
import json
import multiprocessing
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from lade import DecodeStats
from tests.about import about
from tests.fuzz.cases import Case, draw_case
from tests.fuzz.compare import Door, Verdict, call_lade, call_plain, compare
from tests.fuzz.parts import PACKED
from tests.fuzz.shrink import program, shrink

DOORS: dict[str, Door] = {"lade": call_lade, "plain": call_plain}
CASES_PER_SESSION = 25
_Result = TypeVar("_Result")
PRINTED_PER_GROUP = 2  # of many failures that look alike, the others are only counted


@dataclass
class Outcome:
    """What came of one case."""

    index: int
    case: Case
    verdict: Verdict
    program: str = ""

    @property
    def group(self) -> str:
        """Name the kind of the first difference, for counting those alike."""
        return group_of(self.verdict.differences)


def group_of(differences: Sequence[str]) -> str:
    """Return the first difference without what is particular to the case."""
    told = re.sub(r"\[.*\]|\{.*\}", "…", differences[0] if differences else "")
    return re.sub(r"\d[\d.e-]*", "N", told)[:200]


@dataclass
class Summary:
    """What is known of all cases so far."""

    num_cases: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    doors: Counter[str] = field(default_factory=Counter)
    verifications: Counter[str] = field(default_factory=Counter)
    not_built: dict[str, str] = field(default_factory=dict)  # architecture -> why
    architectures: Counter[str] = field(default_factory=Counter)
    with_stats: int = 0
    with_accepted: int = 0
    stats: DecodeStats = field(default_factory=DecodeStats)
    groups: Counter[str] = field(default_factory=Counter)  # of mismatches
    failures: list[Outcome] = field(default_factory=list)
    ties: list[int] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one case."""
        case, verdict = outcome.case, outcome.verdict
        self.num_cases += 1
        self.kinds[verdict.kind] += 1
        if verdict.kind == "not built":
            self.not_built[case.architecture] = verdict.reason
            return
        self.doors[case.door] += 1
        self.verifications[verdict.verification or "none: refused or raised"] += 1
        self.architectures.update([case.architecture] if case.architecture else ())
        self.refusals.update([verdict.reason] if verdict.reason else ())
        self.errors.update([verdict.error] if verdict.error else ())
        if verdict.stats is not None:
            self.with_stats += 1
            self.with_accepted += verdict.stats.num_accepted_tokens > 0
            self.stats.add(verdict.stats)
        if verdict.kind == "mismatch":
            self.failures.append(outcome)
            self.groups[outcome.group] += 1
        if verdict.kind == "tie":
            self.ties.append(outcome.index)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts, ready for JSON."""
        stats, kinds = self.stats, self.kinds
        named = {"mismatch": "mismatches", "tie": "ties", "rounding": "rounded"}
        others = ("same", "refused", "unsteady", "not built")
        named |= {kind: kind.replace(" ", "_") for kind in others}
        return {
            "num_cases": self.num_cases,
            **{f"num_{name}": kinds[kind] for kind, name in named.items()},
            "num_architectures": len(self.architectures),
            "ways_of_verifying": dict(self.verifications.most_common()),
            "mismatches_alike": dict(self.groups.most_common()),
            "refusals": dict(self.refusals.most_common()),
            "raised_by_both": dict(self.errors.most_common()),
            "share_with_accepted_drafts": _ratio(self.with_accepted, self.with_stats),
            "mean_accepted_tokens": _ratio(stats.num_committed_tokens, stats.num_steps),
            "acceptance_rate": _ratio(stats.num_accepted_tokens, stats.num_draft_tokens),
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_tokens": stats.num_accepted_tokens,
            "not_built": dict(sorted(self.not_built.items())),
            "architectures": dict(sorted(self.architectures.items())),
            "ties": sorted(self.ties),
            "mismatches": [
                {"index": f.index, "differences": f.verdict.differences, "program": f.program}
                for f in self.failures
            ],
        }


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0


# --- one case -------------------------------------------------------------------------------


def explain(title: str, case: Case, ours: Door, shrinking: bool = True) -> str:
    """Return a failing case as a program, made small, headed by what differs."""
    if shrinking:
        case = shrink(case, lambda smaller: compare(smaller, ours, anew=True).kind == "mismatch")
    verdict = compare(case, ours, anew=True)
    told = "\n".join(f"# {line}"[:300] for line in verdict.differences)
    return f"{told}\n{program(case, title)}"


# --- many cases -----------------------------------------------------------------------------


def run_cases(
    seed: int,
    indices: Iterable[int],
    ours: Door = call_lade,
    architectures: Sequence[str] | None = None,
) -> Iterator[Outcome]:
    """Judge cases one after another in this process."""
    with deterministic():
        for index in indices:
            case = draw_case(seed, index, architectures)
            yield Outcome(index, case, compare(case, ours))


@contextmanager
def deterministic() -> Iterator[None]:
    """One thread, so that sums keep their order; and no log of what transformers thinks odd."""
    num_threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        transformers.logging.set_verbosity(verbosity)


def sessions_parser(prog: str, about_it: str | None, cases: int) -> argparse.ArgumentParser:
    """Return a parser of what commands take whose cases come in sessions."""
    parser = argparse.ArgumentParser(prog=prog, description=about_it)
    parser.add_argument("--cases", type=int, default=cases, help="how many calls")
    parser.add_argument("--first", type=int, default=0, help="number of the first session")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="0: in this process")
    parser.add_argument("--out", type=Path, help="where the summary goes, as JSON")
    return parser


@contextmanager
def sessions(
    run: Callable[[int, int], _Result], arguments: argparse.Namespace, per_session: int
) -> Iterator[Iterator[_Result]]:
    """Give what `run` returns for the seed and each session's number; Ctrl-C ends the block."""
    num_sessions = -(-arguments.cases // per_session)
    numbers = range(arguments.first, arguments.first + num_sessions)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    of_number = partial(run, arguments.seed)
    with ExitStack() as stack:
        console = Console(stderr=True)
        shown = Progress(*columns, console=console, redirect_stdout=sys.stdout.isatty())
        progress = stack.enter_context(shown)
        found: Iterator[_Result] = map(of_number, numbers)
        if arguments.processes:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(context.Pool(arguments.processes, _start_worker))
            found = pool.imap_unordered(of_number, numbers, chunksize=2)
        stack.enter_context(suppress(KeyboardInterrupt))
        bar = progress.add_task("calls", total=num_sessions * per_session)

        def results() -> Iterator[_Result]:
            for result in found:
                progress.advance(bar, per_session)
                yield result

        yield results()


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the workers


def _run_session(
    against: str, architectures: Sequence[str] | None, stop: int, seed: int, number: int
) -> list[Outcome]:
    indices = range(number * CASES_PER_SESSION, min((number + 1) * CASES_PER_SESSION, stop))
    return [*run_cases(seed, indices, DOORS[against], architectures)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = _parse(argv)
    ours, names = DOORS[arguments.against], arguments.architectures
    if arguments.only is not None:
        (outcome,) = run_cases(arguments.seed, [arguments.only], ours, names)
        verdict = outcome.verdict
        print(_explained(arguments, outcome, ours))
        print(f"# {verdict.kind}", *verdict.differences, verdict.reason, sep="\n# ")
        return int(verdict.kind == "mismatch")
    summary, start = Summary(), time.perf_counter()
    stop = arguments.first * CASES_PER_SESSION + arguments.cases
    run = partial(_run_session, arguments.against, names, stop)
    with sessions(run, arguments, CASES_PER_SESSION) as found:
        for outcome in (each for outcomes in found for each in outcomes):
            summary.add(outcome)
            is_wrong = outcome.verdict.kind == "mismatch"
            if is_wrong and summary.groups[outcome.group] <= PRINTED_PER_GROUP:
                outcome.program = _explained(arguments, outcome, ours)
                print(outcome.program, flush=True)
    result = {
        "seed": arguments.seed,
        "first_session": arguments.first,
        "complete": summary.num_cases == arguments.cases,
        "against": arguments.against,
        "only_architectures": names,
        "num_processes": arguments.processes,
        "seconds": round(time.perf_counter() - start, 1),
        **about(),
        **summary.as_dict(),
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    hidden = ("mismatches", "ties", "architectures")
    print(json.dumps({key: each for key, each in result.items() if key not in hidden}, indent=1))
    return int(bool(summary.failures))


def _explained(arguments: argparse.Namespace, outcome: Outcome, ours: Door) -> str:
    title = f"Case {outcome.index} of seed {arguments.seed}"
    if arguments.architectures is not None:
        title += f", architectures {','.join(arguments.architectures) or 'none'}"
    shrinking = outcome.verdict.kind == "mismatch" and not arguments.no_shrink
    with deterministic():
        return explain(title, outcome.case, ours, shrinking)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = sessions_parser("python -m tests.fuzz", __doc__, cases=20_000)
    parser.add_argument("--only", type=int, help="run and print this case alone")
    parser.add_argument(
        "--architectures",
        type=lambda names: [*PACKED] if names == "packed" else [*filter(None, names.split(","))],
        help="draw the model from these names alone, comma between; '' for the small families, "
        "'packed' for those of GGUF files",
    )
    parser.add_argument("--no-shrink", action="store_true", help="print failing cases as drawn")
    parser.add_argument(
        "--against",
        choices=DOORS,
        default="lade",
        help="plain compares plain generate with itself, which shows that the cases are sound",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
