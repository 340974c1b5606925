"""Accepted draft tokens step by step: as recorded, and adjusted to a given MAT.

Next file: `drafter.py`.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import fmean

from lade.bench.replay import replay_trace
from lade.bench.traces import read_traces
from lade.drafting.pool_drafter import PoolDrafter
from lade.stats import Step
from ngram_pool import NGramPool

#: How many steps accepted 0, 1, 2, … draft tokens: greedy answers of SmolLM2-135M-Instruct in
#: bfloat16 to the six prompts of `lade demo`, at most 192 tokens each, none ending in a loop.
#: Drafted by one pool without a table, 31 tokens per step; 279 steps, MAT 3.08.
RECORDED = (125, 58, 28, 16, 11, 10, 9, 3, 3, 2, 3, 1, 2, 2, 1, 2, 1, *[0] * 8, 1, *[0] * 4, 1)

_STEEPEST = 50.0  # bound of the tilt; beyond it, all weight is on one count
_NUM_HALVINGS = 60
_SEED = 0


def recorded_in(traces_path: Path, num_draft_tokens: int) -> list[int]:
    """Return how many steps accept 0, 1, 2, … draft tokens when traces are replayed.

    One pool without a table drafts for all answers that do not end in a loop. The last step of an
    answer may be cut short by its end, and is left out.

    Raises:
        ValueError: it is not a file of traces, or has no step to count.
    """
    recorded = read_traces(traces_path)
    drafter = PoolDrafter(NGramPool(seed=0))
    counts: Counter[int] = Counter()
    for trace in recorded.traces:
        if not trace.loops:
            steps: list[Step] = []
            replay_trace(trace, drafter, num_draft_tokens, recorded, steps.append)
            counts.update(step.num_accepted for step in steps[:-1])
    if not counts:
        raise ValueError(
            f"expected answers of several steps that end in no loop in {traces_path.name}, got none"
        )
    return [counts[num] for num in range(max(counts) + 1)]


def counts_at(
    histogram: Sequence[int], mat: float, num_draft_tokens: int, num_steps: int
) -> list[int]:
    """Return how many draft tokens successive steps accept, with a given mean.

    The counts are the recorded ones, reweighted by a factor exponential in the count, which yields
    the distribution of that mean nearest to the recorded one (in relative entropy). The steps are
    evenly spaced quantiles of this distribution in random order, so that few steps have the mean of
    many; it is as near to the given one as such a choice can be.

    Args:
        histogram: how many steps accepted 0, 1, 2, … draft tokens.
        mat: the MAT to reach, the bonus token included.
        num_draft_tokens: maximum of a step; recorded steps above it count as accepting that many.
        num_steps: how many counts to return.

    Raises:
        ValueError: no reweighting brings the counts to this mean.
    """
    clipped = [0] * (num_draft_tokens + 1)
    for count, num_recorded in enumerate(histogram):
        clipped[min(count, num_draft_tokens)] += num_recorded
    known = [count for count, num_recorded in enumerate(clipped) if num_recorded]
    if not known[0] + 1 < mat < known[-1] + 1:
        raise ValueError(
            f"expected a MAT between {known[0] + 1} and {known[-1] + 1}, as steps of "
            f"{num_draft_tokens} draft tokens have been recorded, got {mat}"
        )
    tried: list[list[int]] = []
    low, high = -_STEEPEST, _STEEPEST
    for _ in range(_NUM_HALVINGS):
        tilt = (low + high) / 2
        tried.append(_quantiles(clipped, known, tilt, num_steps))
        low, high = (tilt, high) if fmean(tried[-1]) + 1 < mat else (low, tilt)
    nearest = min(tried, key=lambda counts: abs(fmean(counts) + 1 - mat))
    Random(_SEED).shuffle(nearest)
    return nearest


def _quantiles(
    histogram: Sequence[int], known: Sequence[int], tilt: float, num_steps: int
) -> list[int]:
    """Return evenly spaced quantiles of a tilted histogram, ascending."""
    logs = [math.log(histogram[count]) + tilt * count for count in known]
    bounds = [*accumulate(math.exp(log - max(logs)) for log in logs)]
    places = ((step + 0.5) / num_steps * bounds[-1] for step in range(num_steps))
    return [known[bisect_right(bounds, place)] for place in places]
