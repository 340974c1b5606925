"""The formula of assisted generation against real runs.

A drafter that runs its model K times for K draft tokens, each accepted with probability a given
that those before it were, lets a step commit (1 - a^(K+1)) / (1 - a) tokens, bonus included. Such a
step costs K draft forwards and one of the target, which verifies K + 1 tokens.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023,
section 3 (arXiv 2211.17192). There a forward over K + 1 tokens costs what one over a token does;
here its measured cost is taken.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lade.bench.report import share_text, speedup_text
from lade.bench.tables import Sheet


class Comparison(NamedTuple):
    """One method of a real run beside what the formula makes of its counts."""

    method: str
    num_draft_tokens: float  # K: the mean over steps with a draft
    share_drafted: float  # of the steps, those with a draft
    acceptance: float
    cost_ratio: float  # of the time to draft one token to plain's time for a token
    step_cost: float  # of a step's forward, plain's time for a token being 1
    tokens_per_step: float  # by the formula
    measured_tokens_per_step: float
    speedup: float  # by the formula
    measured_speedup: float


def expected_tokens(acceptance: float, num_draft_tokens: float) -> float:
    """Return the expected tokens of a step: accepted draft tokens and the bonus token."""
    if acceptance == 1:
        return num_draft_tokens + 1.0
    return float((1 - acceptance ** (num_draft_tokens + 1)) / (1 - acceptance))


def compare(path: Path) -> list[Comparison]:
    """Hold the formula against every method of a result file that counts drafts.

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
        methods = [name for name in content["settings"]["methods"] if name != "plain"]
        found = [_compared(method, prompts) for method in methods]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"expected {path.name} to be a result file of a run with plain: {error!r}"
        ) from None
    made = [each for each in found if each is not None]
    if not made:
        raise ValueError(f"expected a method of {path.name} to have drafted something, got none")
    return made


def _compared(method: str, prompts: Sequence[Mapping[str, Any]]) -> Comparison | None:
    """Return a method beside the formula; None if it counts no drafts or has made none."""
    entries = [prompt[method] for prompt in prompts]
    if not all("forward_sec" in entry for entry in entries):
        return None

    def total(name: str) -> Any:
        return sum(entry[name] for entry in entries)

    num_row_steps = sum(entry.get("num_row_steps", entry["num_steps"]) for entry in entries)
    # Of published results, only the totals of all prompts are left.
    num_prompts = sum(prompt.get("num_prompts", 1) for prompt in prompts)
    num_rows = sum(entry.get("num_rows", 0) for entry in entries) or num_prompts
    drafted, accepted = total("num_drafted_row_steps"), total("num_accepted_tokens")
    tried = accepted + total("num_corrected_row_steps")
    if not (drafted and tried and num_row_steps):
        return None
    plain = [prompt["plain"] for prompt in prompts]
    plain_sec = sum(entry["sec"] for entry in plain)
    plain_step_sec = plain_sec / (sum(entry["num_steps"] for entry in plain) + num_prompts)
    size, share = total("num_draft_tokens") / drafted, drafted / num_row_steps
    # All drafting is divided by the drafted tokens: a chain of K costs K forwards of the drafter.
    cost_ratio = total("draft_sec") / total("num_draft_tokens") / plain_step_sec
    step_cost = total("forward_sec") / total("num_steps") / plain_step_sec
    tokens = share * expected_tokens(accepted / tried, size) + (1 - share)
    plain_rate = sum(entry["num_tokens"] for entry in plain) / plain_sec
    return Comparison(
        method,
        size,
        share,
        accepted / tried,
        cost_ratio,
        step_cost,
        tokens,
        (total("num_tokens") - num_rows) / num_row_steps,
        tokens / (share * size * cost_ratio + step_cost),
        total("num_tokens") / total("sec") / plain_rate,
    )


def table(made: Sequence[Comparison]) -> Sheet:
    """Return a table of a real run beside the formula."""
    rows = [
        (
            each.method,
            f"{each.num_draft_tokens:.1f}",
            share_text(each.share_drafted),
            *(f"{value:.2f}" for value in each[3:8]),
            speedup_text(each.speedup),
            speedup_text(each.measured_speedup),
        )
        for each in made
    ]
    headings = (
        *("method", "K", "with a draft", "acceptance", "cost ratio", "step cost"),
        *("tokens/step, formula", "tokens/step, measured"),
        *("speed-up, formula", "speed-up, measured"),
    )
    caption = (
        "K and acceptance are means; steps of varying K come to other tokens.\nPrefill and all but "
        "drafts and forwards are left out of the formula."
    )
    return Sheet("The formula against a real run", headings, 1, [rows], caption)
