"""Every Numba function of the budget, and nothing else; `ngram_pool/_kernels.py` says why.

Arrays of the costs of one size of batch:

    costs   float64 [4, num_knots]  by the sizes `KNOTS`; see `GUESS` and what follows
    is_seen bool [largest + 1]      whether a forward of this size has run
    counts  int64 [2]               see `ASKED` and what follows

All calls share them. Of each call by itself, because it depends on texts:

    turns   int64 [5]               see `STEPS` and what follows

They hold the GIL, so that each call is one step for other threads, too. No signal is noticed
meanwhile: what must change together is changed by one call. They are loops over numbers: numpy's
own functions of arrays take four times as long to compile.

Next file: `costs.py`.
"""

import numpy as np
from numpy.typing import NDArray

from ngram_pool._kernels import Int32Array, Int64Array, kernel_with_gil

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Sizes of a forward, in tokens per row, that are chosen from and measured: few, so that each is
# soon known. Sizes beyond `MAX_DRAFT_TOKENS` occur with pending tokens; larger ones count as 256.
SIZES = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64),
    *(80, 96, 128, 192, 256),
)
KNOTS = np.array(SIZES, np.float64)

# Rows of `costs`: costs up to a factor, before anything was measured; smoothed measurements, in
# seconds; how many there were of each size, gradually forgotten; and the seconds of all sizes, also
# where nothing was measured.
GUESS, KNOWN, NUM, CURVE = range(4)
# Indices of `counts`: times asked; and how many measurements are still to tell how fast the machine
# is now, where costs are known from another time.
ASKED, NUM_SCALING = range(2)
# Indices of `turns`: steps recorded; the steps that drafted and did not, last; the steps until the
# other is tried; and the step that was the last such trial.
STEPS, DRAFTED, PLAIN, PATIENCE, TRIAL = range(5)
# Steps until drafting, or not drafting, is tried again where the other has won throughout: doubled
# each time, up to this. A try every 128 steps costs 0.5 % where a second token makes a step 1.6
# times as long, as in float32 on some CPUs.
LAST_PROBE = 128
_PATIENCE_AT_FIRST = 4  # steps; the first one of a size does not count, and two must

# Weights of a new measurement: on all sizes, because a longer text or a busy machine slows all of
# them, and on its own size, where the first few are averaged.
_SHARED_WEIGHT = 0.1
_SCALING_WEIGHT = 0.5  # on all sizes, of the first few where costs are known from another time
_OWN_WEIGHT = 0.1
_OUTLIER = 1.3  # a measurement is clipped to within this factor of the expected cost
_FIRST_OUTLIER = 2.0  # the same until there have been two
# A cost may be lower than measured: by this fraction after one measurement, and by this over the
# square of their number after more. Measurements are gradually forgotten, down to two. The size
# that looks best at its lowest cost is measured again, so a bad start or a load that has ended is
# noticed.
_DOUBT_OF_ONE = 0.2
_MOST_COUNTED = 10.0
LEAST_COUNTED = 2.0
_MEMORY_OF_COSTS = 0.997  # per step

# Promised probabilities are grouped into intervals; these are the lower bounds but the first.
PROMISES = np.array(
    [0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
)
NUM_INTERVALS = len(PROMISES) + 1
# Weight that the past keeps per step: a short memory, because the worst case is a text that stops
# being predictable.
_MEMORY_OF_OUTCOMES = 0.9
_PRIOR_WEIGHT = 2.0  # as if this many tokens had been promised, and had come true


# --- costs ------------------------------------------------------------------------------------


@kernel_with_gil
def knot_of(size: float) -> int:
    """Return the last knot but one whose size is not above a size."""
    knot = 0
    while knot < len(KNOTS) - 2 and KNOTS[knot + 1] <= size:
        knot += 1
    return knot


@kernel_with_gil
def fill_curve(costs: Floats) -> None:
    """Interpolate costs between the measured knots; beyond them they follow the guess."""
    guess, known, num, curve = costs[GUESS], costs[KNOWN], costs[NUM], costs[CURVE]
    first, last = len(KNOTS), -1
    for knot in range(len(KNOTS)):
        if num[knot] == 0.0:
            continue
        first = min(first, knot)
        curve[knot] = known[knot]
        if last >= 0:
            slope = (known[knot] - known[last]) / (KNOTS[knot] - KNOTS[last])
            for between in range(last + 1, knot):
                curve[between] = slope * (KNOTS[between] - KNOTS[last]) + known[last]
        last = knot
    for knot in range(first):
        curve[knot] = known[first] * guess[knot] / guess[first]
    for knot in range(last, len(KNOTS)):
        curve[knot] = known[last] * guess[knot] / guess[last]


@kernel_with_gil
def total(values: Floats) -> float:
    """Return the sum of some numbers."""
    result = 0.0
    for i in range(len(values)):
        result += values[i]
    return result


@kernel_with_gil
def record_cost(
    costs: Floats, is_seen: Bools, counts: Int64Array, turns: Int64Array, size: float, sec: float
) -> None:
    """Learn from the seconds of one forward; the arrays are described above."""
    known, num, curve = costs[KNOWN], costs[NUM], costs[CURVE]
    is_trial = turns[TRIAL] == turns[STEPS]
    turns[STEPS] += 1
    size = min(size, KNOTS[-1])
    sec = max(sec, 1e-9)  # a coarse clock may not have advanced
    if not is_seen[int(size)]:
        # The first forward of a size does not count: libraries prepare kernels for it.
        is_seen[int(size)] = True
        return
    # The size lies at a share of the way from one knot to the next.
    left = knot_of(size)
    share = (size - KNOTS[left]) / (KNOTS[left + 1] - KNOTS[left])
    expected = (1.0 - share) * curve[left] + share * curve[left + 1]
    if total(num) == 0.0:  # the guess is known up to a factor
        for knot in range(len(KNOTS)):
            curve[knot] *= sec / expected
        expected = sec
    ratio = sec / expected
    is_knot = share == 0.0 or share == 1.0
    least = num[left + int(share)] if is_knot else min(num[left], num[left + 1])
    # Forwards are often slower than they should be and hardly ever faster: where there are few
    # measurements, or none of late, a lower one is taken as it is.
    is_scaling = counts[NUM_SCALING] > 0
    is_news = ratio < 1.0 and (is_trial or least <= LEAST_COUNTED) and not is_scaling
    if not is_news:
        most = _FIRST_OUTLIER if is_scaling or least < LEAST_COUNTED else _OUTLIER
        ratio = min(max(ratio, 1.0 / most), most)
        if least > 0:  # a wrong guess says nothing about the others
            shared = 1.0 + (_SCALING_WEIGHT if is_scaling else _SHARED_WEIGHT) * (ratio - 1.0)
            for knot in range(len(KNOTS)):
                known[knot] *= shared
            if is_scaling:
                counts[NUM_SCALING] -= 1
                ratio /= shared
    for knot in range(len(KNOTS)):
        num[knot] = max(_MEMORY_OF_COSTS * num[knot], min(num[knot], LEAST_COUNTED))
    for knot, part in ((left, 1.0 - share), (left + 1, share)):
        if part > 0.0:
            if num[knot] == 0:
                known[knot] = curve[knot]
            weight = 1.0 if is_news else max(1.0 / (1.0 + num[knot]), _OWN_WEIGHT)
            known[knot] *= 1.0 + part * weight * (ratio - 1.0)
            num[knot] = min(_MOST_COUNTED, num[knot] + part)
    fill_curve(costs)


# --- the choice -------------------------------------------------------------------------------


@kernel_with_gil
def lowest_cost(costs: Floats, knot: int) -> float:
    """Return what a size may cost at the lowest."""
    num = costs[NUM, knot]
    # The guess for a size never measured is optimistic already.
    doubt = _DOUBT_OF_ONE / max(1.0, num) ** 2 if num > 0.0 else 0.0
    return float(costs[CURVE, knot] * (1.0 - doubt))


@kernel_with_gil
def choose_size(
    costs: Floats, counts: Int64Array, turns: Int64Array, sizes: Floats, gains: Floats
) -> int:
    """Return the index of the size with the best ratio of tokens to time; 0 for no draft.

    Args:
        sizes: float64 [num_sizes], mean tokens per row; the first one has no draft.
        gains: float64 [num_sizes], expected tokens.
    """
    counts[ASKED] += 1
    # Steps without a draft are measured first. After a few calls without a measurement the guess
    # has to do: where finished rows stay in the forward, only the others are asked about, and what
    # is measured counts for a larger batch.
    must_begin = total(costs[NUM]) < 1.5 and counts[ASKED] <= _PATIENCE_AT_FIRST
    if must_begin or sizes[-1] == sizes[0]:
        return 0
    best, best_rate, plain_rate = 0, 0.0, 0.0
    for i in range(len(sizes)):
        size = min(max(sizes[i], KNOTS[0]), KNOTS[-1])
        left = knot_of(size)
        cost, after = lowest_cost(costs, left), lowest_cost(costs, left + 1)
        if size == KNOTS[left + 1]:
            cost = after
        else:
            slope = (after - cost) / (KNOTS[left + 1] - KNOTS[left])
            cost += slope * (size - KNOTS[left])
        rate = gains[i] / cost
        if i == 0:
            plain_rate = rate
        elif best == 0 or rate > best_rate:
            best, best_rate = i, rate
    return best if or_the_other(best_rate > plain_rate, turns) else 0


@kernel_with_gil
def or_the_other(is_drafting: bool, turns: Int64Array) -> bool:
    """Return whether to draft: as it seems best, or for once the other way."""
    if turns[STEPS] - turns[PLAIN if is_drafting else DRAFTED] >= turns[PATIENCE]:
        turns[PATIENCE] = min(2 * turns[PATIENCE], LAST_PROBE)
        turns[TRIAL] = turns[STEPS]
        is_drafting = not is_drafting
    turns[DRAFTED if is_drafting else PLAIN] = turns[STEPS]
    return is_drafting


# --- calibration ------------------------------------------------------------------------------


@kernel_with_gil
def look_at_outcome(
    token_ids: Int32Array,
    parents: Int32Array,
    depths: Int32Array,
    probs: Floats,
    emitted: Int64Array,
    came: Floats,
) -> None:
    """Compare one row's draft with what was emitted.

    The fate of a node beyond the last emitted token is unknown if its path up to there was emitted.
    It counts with the drafter's probability, given that path. If it were left out, only the
    failures beside it would count, and teach that long drafts are worth nothing.

    Args:
        token_ids, parents, depths, probs: of all nodes that were proposed, verified or not.
        emitted: int64, the tokens of the step, at least one.
        came: float64 [num_nodes], written: whether the path of each node was emitted: 1, 0, or a
            probability if unknown.
    """
    for node in range(len(token_ids)):
        parent, depth = int(parents[node]), int(depths[node])
        came_before = came[parent] if parent >= 0 else 1.0
        came[node] = 0.0
        if depth <= len(emitted):
            if came_before > 0.0 and token_ids[node] == emitted[depth - 1]:
                came[node] = 1.0
            continue
        known = parent  # the last node on the path whose fate is known
        while depths[known] > len(emitted):
            known = int(parents[known])
        if came_before > 0.0 and probs[known] > 0.0:
            came[node] = min(1.0, probs[node] / probs[known])


@kernel_with_gil
def renew_worth(sums: Floats, worth: Floats, promised: Floats, came: Floats, num_rows: int) -> None:
    """Learn from the outcomes of a step; all rows together weigh as one.

    Args:
        sums: float64 [2, NUM_INTERVALS], of what was promised and of what came, decayed.
        worth: float64 [NUM_INTERVALS], acceptance over promise.
        promised, came: float64 [num_nodes], of all nodes of the step; see `look_at_outcome`.
        num_rows: rows that they are from.
    """
    for interval in range(NUM_INTERVALS):
        sums[0, interval] *= _MEMORY_OF_OUTCOMES
        sums[1, interval] *= _MEMORY_OF_OUTCOMES
    for node in range(len(promised)):
        interval = 0
        while interval < len(PROMISES) and PROMISES[interval] <= promised[node]:
            interval += 1
        sums[0, interval] += promised[node] / num_rows
        sums[1, interval] += came[node] / num_rows
    of_all = (total(sums[1]) + _PRIOR_WEIGHT) / (total(sums[0]) + _PRIOR_WEIGHT)
    for interval in range(NUM_INTERVALS):
        came_true = sums[1, interval] + _PRIOR_WEIGHT * of_all
        worth[interval] = came_true / (sums[0, interval] + _PRIOR_WEIGHT)
