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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from tests.about import about
from tests.fuzz.cases import Case, draw_case
from tests.fuzz.compare import Door, Kind, call_lade, call_plain, compare
from tests.fuzz.parts import PACKED
from tests.fuzz.shrink import program, shrink

DOORS: dict[str, Door] = {"lade": call_lade, "plain": call_plain}
CASES_PER_TASK = 25
_Result = TypeVar("_Result")
PRINTED_PER_GROUP = 2  # of many failures that look alike, the others are only counted


@dataclass
class Outcome:
    """What is kept of one case."""

    index: int
    kind: Kind
    drawn: list[str]
    architecture: str = ""
    verification: str = ""
    reason: str = ""
    error: str = ""
    # Of lade's statistics: steps, draft tokens, accepted, committed; None where none were returned.
    counts: tuple[int, int, int, int] | None = None
    differences: list[str] = field(default_factory=list)
    program: str = ""
    skipped: list[str] = field(default_factory=list)  # events that could not happen

    @property
    def group(self) -> str:
        """Name the kind of the first difference, for counting those alike."""
        return group_of(self.differences)


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
    drawn: Counter[str] = field(default_factory=Counter)
    verifications: Counter[str] = field(default_factory=Counter)
    not_built: dict[str, str] = field(default_factory=dict)  # architecture -> why
    architectures: dict[str, Counter[str]] = field(default_factory=dict)
    with_stats: int = 0
    with_accepted: int = 0
    counts: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    skipped: Counter[str] = field(default_factory=Counter)  # events that could not happen
    groups: Counter[str] = field(default_factory=Counter)  # of mismatches
    failures: list[Outcome] = field(default_factory=list)
    ties: list[int] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one case."""
        self.num_cases += 1
        self.kinds[outcome.kind] += 1
        if outcome.kind == "not built":
            self.not_built[outcome.architecture] = outcome.reason
            return
        self.drawn.update(outcome.drawn)
        verification = outcome.verification or "none: refused or raised"
        self.verifications[verification] += 1
        if outcome.architecture:
            counts = self.architectures.setdefault(outcome.architecture, Counter())
            counts.update(["cases", verification])
            counts[outcome.kind] += outcome.kind != "same"
            counts["raised by both"] += outcome.error != ""
        if outcome.reason:
            self.refusals[outcome.reason] += 1
        self.skipped.update(outcome.skipped)
        if outcome.error:
            self.errors[outcome.error] += 1
        if outcome.counts is not None:
            self.with_stats += 1
            self.with_accepted += outcome.counts[2] > 0
            self.counts = [a + b for a, b in zip(self.counts, outcome.counts, strict=True)]
        if outcome.kind == "mismatch":
            self.failures.append(outcome)
            self.groups[outcome.group] += 1
        if outcome.kind == "tie":
            self.ties.append(outcome.index)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts, ready for JSON."""
        num_steps, num_draft, num_accepted, num_committed = self.counts
        return {
            "num_cases": self.num_cases,
            "num_same": self.kinds["same"],
            "num_mismatches": self.kinds["mismatch"],
            "num_ties": self.kinds["tie"],
            "num_rounded": self.kinds["rounding"],
            "num_refused": self.kinds["refused"],
            "num_unsteady": self.kinds["unsteady"],
            "num_not_built": self.kinds["not built"],
            "num_architectures": len(self.architectures),
            "ways_of_verifying": dict(self.verifications.most_common()),
            "mismatches_alike": dict(self.groups.most_common()),
            "refusals": dict(self.refusals.most_common()),
            "skipped_events": dict(self.skipped.most_common()),
            "raised_by_both": dict(self.errors.most_common()),
            "num_cases_with_stats": self.with_stats,
            "share_with_accepted_drafts": _ratio(self.with_accepted, self.with_stats),
            "mean_accepted_tokens": _ratio(num_committed, num_steps),
            "acceptance_rate": _ratio(num_accepted, num_draft),
            "num_draft_tokens": num_draft,
            "num_accepted_tokens": num_accepted,
            "drawn": dict(sorted(self.drawn.items())),
            "not_built": dict(sorted(self.not_built.items())),
            "architectures": {
                name: {what: count for what, count in counts.most_common() if count}
                for name, counts in sorted(self.architectures.items())
            },
            "ties": sorted(self.ties),
            "mismatches": [
                {"index": f.index, "differences": f.differences, "program": f.program}
                for f in self.failures
            ],
        }


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0


# --- one case -------------------------------------------------------------------------------


def judge(index: int, case: Case, ours: Door) -> Outcome:
    """Compare one case."""
    verdict = compare(case, ours)
    stats = verdict.stats
    counts = None
    if stats is not None:
        counts = (
            stats.num_steps,
            stats.num_draft_tokens,
            stats.num_accepted_tokens,
            stats.num_committed_tokens,
        )
    return Outcome(
        index=index,
        kind=verdict.kind,
        drawn=case.drawn,
        architecture=case.architecture,
        verification=verdict.verification,
        reason=verdict.reason,
        error=verdict.error,
        counts=counts,
        differences=verdict.differences,
        skipped=verdict.skipped,
    )


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
            yield judge(index, draw_case(seed, index, architectures), ours)


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
    parser.add_argument("--processes", type=int, default=2)
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
    with (
        Progress(*columns, redirect_stdout=sys.stdout.isatty()) as progress,
        multiprocessing.get_context("spawn").Pool(arguments.processes, _start_worker) as pool,
        suppress(KeyboardInterrupt),
    ):
        bar = progress.add_task("calls", total=num_sessions * per_session)

        def results() -> Iterator[_Result]:
            for result in pool.imap_unordered(partial(run, arguments.seed), numbers, chunksize=2):
                progress.advance(bar, per_session)
                yield result

        yield results()


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the workers


def _run_task(
    seed: int, against: str, architectures: Sequence[str] | None, indices: Sequence[int]
) -> list[Outcome]:
    return list(run_cases(seed, indices, DOORS[against], architectures))


def _run_all(arguments: argparse.Namespace) -> Iterator[Outcome]:
    stop = arguments.first + arguments.cases
    tasks = [
        range(start, min(start + CASES_PER_TASK, stop))
        for start in range(arguments.first, stop, CASES_PER_TASK)
    ]
    if arguments.processes == 0:
        indices, ours = range(arguments.first, stop), DOORS[arguments.against]
        yield from run_cases(arguments.seed, indices, ours, arguments.architectures)
        return
    task = partial(_run_task, arguments.seed, arguments.against, arguments.architectures)
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.processes, _start_worker) as pool:
        for outcomes in pool.imap_unordered(task, tasks):
            yield from outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = _parse(argv)
    console = Console(stderr=True)
    ours = DOORS[arguments.against]
    if arguments.only is not None:
        return _run_one(arguments, ours)
    summary, start, is_whole = Summary(), time.perf_counter(), False
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, redirect_stdout=sys.stdout.isatty()) as progress:
            bar = progress.add_task("cases", total=arguments.cases)
            for outcome in _run_all(arguments):
                summary.add(outcome)
                progress.advance(bar)
                if outcome.kind == "mismatch":
                    _tell(arguments, summary, outcome, ours)
                    if arguments.stop_after and len(summary.failures) >= arguments.stop_after:
                        break
            else:
                is_whole = True
    except KeyboardInterrupt:
        console.print("stopped; the summary is of the cases so far")
    result = _about(arguments, is_whole, time.perf_counter() - start) | summary.as_dict()
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    hidden = ("drawn", "mismatches", "ties", "architectures")
    shown = {name: value for name, value in result.items() if name not in hidden}
    print(json.dumps(shown, indent=1))
    return int(bool(summary.failures))


def _run_one(arguments: argparse.Namespace, ours: Door) -> int:
    (outcome,) = run_cases(arguments.seed, [arguments.only], ours, arguments.architectures)
    shrinking = outcome.kind == "mismatch" and not arguments.no_shrink
    print(_explained(arguments, arguments.only, ours, shrinking))
    print(f"# {outcome.kind}", *outcome.differences, outcome.reason, sep="\n# ")
    return int(outcome.kind == "mismatch")


def _tell(arguments: argparse.Namespace, summary: Summary, outcome: Outcome, ours: Door) -> None:
    """Print a failing case, unless enough alike were printed."""
    if summary.groups[outcome.group] > PRINTED_PER_GROUP:
        return
    outcome.program = _explained(arguments, outcome.index, ours, not arguments.no_shrink)
    print(outcome.program, flush=True)


def _explained(arguments: argparse.Namespace, index: int, ours: Door, shrinking: bool) -> str:
    case = draw_case(arguments.seed, index, arguments.architectures)
    title = f"Case {index} of seed {arguments.seed}"
    if arguments.architectures is not None:
        title += f", architectures {','.join(arguments.architectures) or 'none'}"
    with deterministic():
        return explain(title, case, ours, shrinking)


def _about(arguments: argparse.Namespace, is_whole: bool, seconds: float) -> dict[str, Any]:
    return {
        "seed": arguments.seed,
        "first_case": arguments.first,
        "complete": is_whole,
        "against": arguments.against,
        "only_architectures": arguments.architectures,
        "num_processes": arguments.processes,
        "seconds": round(seconds, 1),
        **about(),
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000, help="how many cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="0: in this process")
    parser.add_argument("--out", type=Path, help="where the summary goes, as JSON")
    parser.add_argument("--only", type=int, help="run and print this case alone")
    parser.add_argument(
        "--architectures",
        type=lambda names: [*PACKED] if names == "packed" else [*filter(None, names.split(","))],
        help="draw the model from these names alone, comma between; '' for the small families, "
        "'packed' for those of GGUF files",
    )
    parser.add_argument(
        "--stop-after", type=int, default=0, help="stop after so many mismatches; 0: never"
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
