"""What methods did in an engine, as a table and as JSON."""

from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any, NamedTuple

from benchmarks.engines.agreement import FALSE_ALARM, Drawn
from benchmarks.engines.job import PhaseResult, RequestAnswer
from benchmarks.engines.methods import PLAIN
from benchmarks.engines.plan import DRAWS, phase_name
from lade.bench.report import msec_text, rounded, share_text, speedup_text
from lade.bench.tables import Sheet
from lade.stats import ends_in_loop


class PhaseSummary(NamedTuple):
    """A pass of a method at a number of concurrent requests."""

    num_answers: int
    num_tokens: int
    tokens_per_sec: float
    mat: float  # tokens of a request in an engine's step, without the first; answers without loops
    mat_of_all: float  # loops included
    acceptance_length: float | None  # as vLLM counts it: of steps with a draft; None without any
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_failures: int  # of lade's proposer
    draft_sec_per_step: float
    first_token_sec: float  # median
    latency_sec: float  # median
    latency_p90_sec: float
    same_text: float | None  # share of answers with plain's tokens; None without plain
    num_loops: int  # answers that end in a loop


class Row(NamedTuple):
    """A summary and what it is of."""

    method: str
    concurrency: int
    num_pass: int  # from 1
    summary: PhaseSummary


def summarise(result: PhaseResult, plain: PhaseResult | None) -> PhaseSummary:
    """Summarise a pass, and compare its texts with those of plain's same pass."""
    answers, counters = result.answers, result.counters
    judged = answers if plain is None else plain.answers
    loops = [ends_in_loop(answer.token_ids) for answer in judged]
    clean = [answer for answer, loop in zip(answers, loops, strict=True) if not loop]
    latencies = [answer.sec for answer in answers]
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    return PhaseSummary(
        len(answers),
        num_tokens,
        num_tokens / result.sec,
        _mat(clean or answers),
        _mat(answers),
        1 + counters.num_accepted_tokens / counters.num_drafts if counters.num_drafts else None,
        counters.num_drafts,
        counters.num_draft_tokens,
        counters.num_accepted_tokens,
        counters.num_failures,
        counters.draft_sec / max(counters.num_proposals, 1),
        median(answer.first_token_sec for answer in answers),
        median(latencies),
        quantiles(latencies, n=10)[-1] if len(latencies) > 1 else latencies[0],
        None if plain is None else _share_same(answers, plain.answers),
        sum(loops),
    )


def rows_of(results: Mapping[str, Sequence[PhaseResult]]) -> list[Row]:
    """Return the summaries of all passes, by method; a method's phases stand in order."""
    plain = {result.name: result for result in results.get(PLAIN, ())}
    rows = []
    for method, phases in results.items():
        num_passes: dict[int, int] = {}
        for result in phases:
            if result.name == DRAWS:
                continue
            num_pass = num_passes[result.concurrency] = num_passes.get(result.concurrency, 0) + 1
            summary = summarise(result, plain.get(result.name))
            rows.append(Row(method, result.concurrency, num_pass, summary))
    return rows


def table(rows: Sequence[Row], title: str, caption: str | None = None) -> Sheet:
    """Return a table with a section for each number of requests and pass."""
    sections: dict[tuple[int, int], list[list[str]]] = {}
    speeds = {
        (row.concurrency, row.num_pass): row.summary.tokens_per_sec
        for row in rows
        if row.method == PLAIN
    }
    for row in rows:
        key, found = (row.concurrency, row.num_pass), row.summary
        of_plain = found.tokens_per_sec / speeds[key] if key in speeds else None
        accepted = found.num_accepted_tokens / max(found.num_draft_tokens, 1)
        sections.setdefault(key, []).append(
            [
                *(f"{row.concurrency} at once", f"pass {row.num_pass}", row.method),
                f"{found.tokens_per_sec:.1f}",
                "" if of_plain is None else speedup_text(of_plain),
                f"{found.mat:.2f}",
                "" if found.acceptance_length is None else f"{found.acceptance_length:.2f}",
                f"{found.num_draft_tokens:,}",
                share_text(accepted) if found.num_draft_tokens else "",
                msec_text(found.draft_sec_per_step) if found.num_drafts else "",
                f"{1000 * found.first_token_sec:,.0f}",
                f"{found.latency_sec:.2f}",
                f"{found.latency_p90_sec:.2f}",
                "" if found.same_text is None else f"{found.same_text:.1%}",
            ]
        )
    headings = (
        *("requests", "pass", "method", "tokens/s", "speed-up", "MAT", "acceptance length"),
        *("draft tokens", "accepted", "draft ms/step", "first token, ms", "latency, s"),
        *("its p90", "same text"),
    )
    return Sheet(title, headings, 3, [*sections.values()], caption)


def draws_table(drawn: Mapping[str, Drawn]) -> Sheet:
    """Return a table of sampled answers against those of plain decoding."""
    rows = [
        [
            method,
            f"{found.p_value:.3g}",
            f"{found.num_cells}",
            f"{found.num_draft_tokens:,}",
            f"{found.num_accepted_tokens:,}",
        ]
        for method, found in drawn.items()
    ]
    headings = ("method", "smallest p-value", "answers told apart", "draft tokens", "accepted")
    caption = f"Chi-square tests against plain's draws; below {FALSE_ALARM:g} they differ."
    return Sheet("Sampled answers", headings, 1, [rows], caption)


def as_json(rows: Sequence[Row], drawn: Mapping[str, Drawn]) -> dict[str, Any]:
    """Return rows and draws, ready for JSON."""
    return {
        "rows": [
            {
                "method": row.method,
                "concurrency": row.concurrency,
                "pass": row.num_pass,
                **rounded(row.summary._asdict()),
            }
            for row in rows
        ],
        "draws": {
            method: {**found._asdict(), "is_same": found.is_same, "tells": found.tells}
            for method, found in drawn.items()
        },
    }


def what_differs(rows: Sequence[Row], drawn: Mapping[str, Drawn]) -> list[str]:
    """Return a sentence for each method and pass that is not what plain decoding gives."""
    found = [
        f"{row.method}, {phase_name(row.concurrency, row.num_pass)}: "
        f"{row.summary.same_text:.1%} of the answers have plain's tokens"
        for row in rows
        if row.summary.same_text is not None and row.summary.same_text < 1
    ]
    found += [
        f"{row.method}, {phase_name(row.concurrency, row.num_pass)}: the proposer failed "
        f"{row.summary.num_failures} times"
        for row in rows
        if row.summary.num_failures
    ]
    for method, draws in drawn.items():
        if not draws.is_same:
            found.append(f"{method}: its draws differ from plain's (p = {draws.p_value:.2g})")
        elif not draws.tells:
            found.append(
                f"{method}: its draws tell nothing, with {draws.num_accepted_tokens} of "
                f"{draws.num_draft_tokens} draft tokens accepted"
            )
    return found


def _mat(answers: Sequence[RequestAnswer]) -> float:
    """Return mean accepted tokens: of a request in a step, but for the step of its prompt."""
    num_tokens = sum(len(answer.token_ids) - 1 for answer in answers)
    num_steps = sum(answer.num_steps - 1 for answer in answers)
    return num_tokens / num_steps if num_steps else 1.0


def _share_same(answers: Sequence[RequestAnswer], others: Sequence[RequestAnswer]) -> float:
    pairs = zip(answers, others, strict=True)
    return sum(one.token_ids == other.token_ids for one, other in pairs) / len(answers)
