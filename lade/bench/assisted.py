"""The empirical formula of assisted generation, as a what-if table and against real runs.

A drafter that runs its model K times for K draft tokens, each accepted with probability a given
that those before it were, lets a step commit (1 - a^(K+1)) / (1 - a) tokens, bonus included. Such a
step costs K draft forwards and one of the target, which verifies K + 1 tokens.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023,
section 3 (arXiv 2211.17192). There a forward over K + 1 tokens costs what one over a token does;
here its measured cost may be given. Next file: `project.py`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lade.bench.environment import environment
from lade.bench.project import StepCosts
from lade.bench.report import rounded, share_text, speedup_text
from lade.bench.tables import Sheet

_BEST = "*"  # behind the best speed-up of a column


class Prediction(NamedTuple):
    """What the formula says of one number of draft tokens and one acceptance probability."""

    num_draft_tokens: int  # K
    acceptance: float  # a
    cost_ratio: float  # of a draft forward to a forward of the target over one token
    step_cost: float  # of a forward over K + 1 tokens, relative to one over one token
    tokens_per_step: float
    speedup: float
    is_best: bool = False  # of all K with this acceptance; where several are, the smallest


class Comparison(NamedTuple):
    """One method of a real run beside what the formula makes of its counts."""

    results: str  # name of the file
    method: str
    num_draft_tokens: float  # K: the mean over steps with a draft
    share_drafted: float  # of the steps, those with a draft
    acceptance: float
    cost_ratio: float  # of the time to draft one token to plain's time for a token
    step_cost: float | None  # measured, or of a file; None where 1 was assumed
    tokens_per_step: float  # by the formula
    measured_tokens_per_step: float
    speedup: float  # by the formula
    measured_speedup: float


def expected_tokens(acceptance: float, num_draft_tokens: float) -> float:
    """Return the expected tokens of a step: accepted draft tokens and the bonus token.

    Raises:
        ValueError: the acceptance is no probability, or there are fewer than 0 draft tokens.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"expected an acceptance of 0 to 1, got {acceptance}")
    if not num_draft_tokens >= 0:
        raise ValueError(f"expected 0 draft tokens or more, got {num_draft_tokens}")
    if acceptance == 1:
        return num_draft_tokens + 1.0
    return float((1 - acceptance ** (num_draft_tokens + 1)) / (1 - acceptance))


def predict(
    acceptances: Sequence[float],
    cost_ratio: float,
    draft_sizes: Sequence[int],
    costs: StepCosts | None = None,
) -> list[Prediction]:
    """Return the predictions for every acceptance and K, the best K of each acceptance marked.

    Args:
        acceptances: probabilities that a draft token is accepted, given that those before it were.
        cost_ratio: cost of a draft forward, relative to one of the target over one token.
        draft_sizes: K, the numbers of draft tokens.
        costs: of the target's forwards by their tokens; None where one over K + 1 tokens costs
            what one over a single token does.

    Raises:
        ValueError: an argument is out of its range, or `costs` has no forward of that size.
    """
    if not 0 <= cost_ratio < float("inf"):
        raise ValueError(f"expected a cost ratio of 0 or more, got {cost_ratio}")
    made = []
    for acceptance in acceptances:
        column = []
        for size in draft_sizes:
            step_cost = 1.0 if costs is None else costs.sec(1 + size) / costs.sec(1)
            tokens = expected_tokens(acceptance, size)
            speedup = tokens / (size * cost_ratio + step_cost)
            column.append(Prediction(size, acceptance, cost_ratio, step_cost, tokens, speedup))
        best = max(column, key=lambda each: (each.speedup, -each.num_draft_tokens))
        made += [each._replace(is_best=each is best) for each in column]
    return made


def what_if_table(made: Sequence[Prediction], costs_name: str | None = None) -> Sheet:
    """Return the tables of speed-ups and of tokens per step: a row for each K."""
    acceptances = [*dict.fromkeys(each.acceptance for each in made)]
    sizes = [*dict.fromkeys(each.num_draft_tokens for each in made)]
    cells = {(each.num_draft_tokens, each.acceptance): each for each in made}
    step_cost = {each.num_draft_tokens: each.step_cost for each in made}
    rows: dict[str, list[tuple[str, ...]]] = {"speed-up": [], "tokens per step": []}
    for size in sizes:
        column = [cells[size, acceptance] for acceptance in acceptances]
        words = (f"{size}", "" if costs_name is None else f"{step_cost[size]:.2f}")
        marked = [speedup_text(each.speedup) + _BEST * each.is_best for each in column]
        rows["speed-up"].append(("speed-up", *words, *marked))
        tokens = [f"{each.tokens_per_step:.2f}" for each in column]
        rows["tokens per step"].append(("tokens per step", *words, *tokens))
    verified = (
        "K + 1 tokens are verified at the cost of one"
        if costs_name is None
        else f"step cost: of verifying K + 1 tokens, by {costs_name}, one token being 1"
    )
    caption = (
        f"{_BEST} the best K of a column. A draft forward costs {made[0].cost_ratio:g} of the "
        f"target's; {verified}.\nColumns: the probability that a draft token is accepted, given "
        "that those before it were."
    )
    headings = ("", "K", "step cost", *(f"{acceptance:g}" for acceptance in acceptances))
    title = "Assisted generation by the formula"
    return Sheet(title, headings, 2, [*rows.values()], caption)


def compare(path: Path, costs: StepCosts | None = None) -> list[Comparison]:
    """Hold the formula against every method of a `lade bench run` result file that counts drafts.

    The acceptance is that of tokens on the way down a draft: accepted ones over accepted ones and
    rejections. The share of all draft tokens would be too low, for nothing below a rejection was
    tried. Of a tree, a token counts as accepted where any of the drafted alternatives was.

    Raises:
        ValueError: it is not such a file, or has no plain decoding or no method with drafts.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        prompts = [prompt for prompt in content["prompts"] if not prompt["loops"]]
        prompts = prompts or content["prompts"]
        methods = [*content["settings"]["methods"]]
        made = [
            compared
            for method in methods
            if method != "plain"
            and (compared := _compared(path.stem, method, prompts, costs)) is not None
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"expected {path.name} to be a result file of lade bench run with plain: {error!r}"
        ) from None
    if not made:
        raise ValueError(f"expected a method of {path.name} to have drafted something, got none")
    return made


def _compared(
    results: str, method: str, prompts: Sequence[Mapping[str, Any]], costs: StepCosts | None
) -> Comparison | None:
    """Return a method beside the formula; None if it counts no drafts or has made none."""
    entries = [prompt[method] for prompt in prompts]
    if not all("num_corrected_row_steps" in entry for entry in entries):
        return None
    sums = {
        name: sum(entry.get(name, 0) for entry in entries)
        for name in (
            *("num_tokens", "sec", "num_draft_tokens", "num_accepted_tokens", "draft_sec"),
            *("num_drafted_row_steps", "num_corrected_row_steps", "forward_sec", "num_steps"),
        )
    }
    num_row_steps = sum(entry.get("num_row_steps", entry["num_steps"]) for entry in entries)
    num_rows = sum(entry.get("num_rows", 1) for entry in entries)
    drafted = sums["num_drafted_row_steps"]
    tried = sums["num_accepted_tokens"] + sums["num_corrected_row_steps"]
    if not (drafted and tried and num_row_steps):
        return None
    plain = [prompt["plain"] for prompt in prompts]
    plain_step_sec = sum(entry["sec"] for entry in plain) / sum(
        entry["num_steps"] + 1 for entry in plain
    )
    num_tokens = sum(entry["num_tokens"] for entry in plain)
    size, share = sums["num_draft_tokens"] / drafted, drafted / num_row_steps
    acceptance = sums["num_accepted_tokens"] / tried
    # All drafting is divided by the drafted tokens: a chain of K costs K forwards of the drafter.
    cost_ratio = sums["draft_sec"] / sums["num_draft_tokens"] / plain_step_sec
    step_cost = None
    if costs is not None:
        step_cost = costs.sec(1 + round(size)) / costs.sec(1)
    elif all("forward_sec" in entry for entry in entries):
        step_cost = sums["forward_sec"] / sums["num_steps"] / plain_step_sec
    tokens = share * expected_tokens(acceptance, size) + (1 - share)
    cost = share * size * cost_ratio + (1.0 if step_cost is None else step_cost)
    plain_rate = num_tokens / sum(entry["sec"] for entry in plain)
    return Comparison(
        results,
        method,
        size,
        share,
        acceptance,
        cost_ratio,
        step_cost,
        tokens,
        (sums["num_tokens"] - num_rows) / num_row_steps,
        tokens / cost,
        sums["num_tokens"] / sums["sec"] / plain_rate,
    )


def comparison_table(made: Sequence[Comparison]) -> Sheet:
    """Return a table of real runs beside the formula."""
    sections: dict[str, list[tuple[str, ...]]] = {}
    for each in made:
        sections.setdefault(each.results, []).append(
            (
                each.results,
                each.method,
                f"{each.num_draft_tokens:.1f}",
                share_text(each.share_drafted),
                f"{each.acceptance:.2f}",
                f"{each.cost_ratio:.2f}",
                "" if each.step_cost is None else f"{each.step_cost:.2f}",
                f"{each.tokens_per_step:.2f}",
                f"{each.measured_tokens_per_step:.2f}",
                speedup_text(each.speedup),
                speedup_text(each.measured_speedup),
            )
        )
    headings = (
        *("results", "method", "K", "with a draft", "acceptance", "cost ratio", "step cost"),
        *("tokens/step, formula", "tokens/step, measured"),
        *("speed-up, formula", "speed-up, measured"),
    )
    caption = (
        "K and acceptance are means; steps of varying K come to other tokens.\nPrefill and all but "
        "drafts and forwards are left out of the formula."
    )
    return Sheet("The formula against real runs", headings, 2, [*sections.values()], caption)


def as_json(
    predictions: Sequence[Prediction], comparisons: Sequence[Comparison], settings: dict[str, Any]
) -> dict[str, Any]:
    """Return all predictions and comparisons, ready for JSON."""
    return {
        "environment": environment(),
        "settings": settings,
        "comparisons": [rounded(each._asdict()) for each in comparisons],
        "runs": [rounded(each._asdict()) for each in predictions],
    }
