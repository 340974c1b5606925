"""Figures of answers, as words."""

from collections.abc import Mapping, Sequence
from typing import Any

from lade.chat.conversation import Context, Turn
from lade.closeness import is_exact_in
from lade.stats import SourceStats
from ngram_pool import NGramPool

_SEPARATOR = " · "


def figures_of(turn: Turn, plain_tokens_per_sec: float | None) -> list[str]:
    """Return what is said of an answer, the most important first."""
    noun = "token" if turn.num_tokens == 1 else "tokens"
    parts = [f"{turn.num_tokens:,} {noun}", *speed_of(turn, plain_tokens_per_sec)]
    if turn.first_token_sec is not None:
        parts.append(f"the first after {turn.first_token_sec:.1f} s")
    if turn.num_reused_tokens:
        parts.append(f"{turn.num_reused_tokens:,} of {turn.num_prompt_tokens:,} not run again")
    if turn.is_plain:
        parts.insert(0, "plain")
    if turn.is_interrupted:
        parts.insert(0, "stopped")
    if turn.ends_in_loop:
        parts.append("ends in a loop")
    return parts


def speed_of(turn: Turn, plain_tokens_per_sec: float | None) -> list[str]:
    """Return how fast an answer came, in parts; one that is whole and no loop beside plain."""
    parts = [f"{turn.tokens_per_sec:.1f} a second", f"{turn.mean_accepted_tokens:.2f} a step"]
    if plain_tokens_per_sec and not (turn.is_plain or turn.is_interrupted or turn.ends_in_loop):
        parts.append(f"{turn.tokens_per_sec / plain_tokens_per_sec:.2f}x plain")
    return parts


def likeness_of(plain: Turn, with_drafts: Turn, model: Any) -> str:
    """Tell whether two answers to one question are the same, and why not; empty if one stopped."""
    if plain.is_interrupted or with_drafts.is_interrupted:
        return ""
    one, other = (turn.thinking + turn.text for turn in (plain, with_drafts))
    if one == other:
        loops = " They end in a loop, which flatters drafts." * with_drafts.ends_in_loop
        return f"The texts are the same.{loops}"
    pairs = enumerate(zip(one, other, strict=False))
    num_same = next((i for i, pair in pairs if len({*pair}) > 1), min(len(one), len(other)))
    parting = f"The texts part after {num_same:,} characters"
    dtype = str(model.dtype).removeprefix("torch.")
    if is_exact_in(model):
        return f"{parting}; in {dtype} they should not: please report this as a fault."
    return f"{parting}: in {dtype} a near-tie may fall the other way. --dtype float32 is exact."


def fill_of(context: Context, pool: NGramPool | None) -> list[str]:
    """Return how full context and pool are, in parts."""
    used, limit = context
    parts = [f"context {used:,}" + (f" of {limit:,}" if limit else "")]
    if pool is not None:
        parts.append(f"pool {_percent(len(pool) / pool.capacity_tokens)}")
    return parts


def sources_text(sources: Mapping[str, SourceStats]) -> str:
    """Describe what each source of drafts did; empty where drafts have one source."""
    parts = [
        f"{name} {each.num_accepted_tokens:,} of {each.num_draft_tokens:,} in {each.sec:.2f} s"
        for name, each in sources.items()
    ]
    return f"accepted of drafted: {', '.join(parts)}" if parts else ""


def fitted(parts: Sequence[str], width: int) -> str:
    """Return as many parts as fit into a line, the first ones."""
    line = ""
    for part in parts:
        longer = f"{line}{_SEPARATOR}{part}" if line else part
        if len(longer) > width:
            break
        line = longer
    return line or "".join(parts[:1])[:width]


def _percent(share: float) -> str:
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"
