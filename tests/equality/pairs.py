"""Few combinations in which any two values of two factors meet."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from random import Random

Row = dict[str, str]  # factor -> value
Pair = frozenset[tuple[str, str]]

_TRIES = 40  # to complete a combination around a pair before the pair counts as impossible
_AT_ONCE = 4  # candidates; the one with most new pairs is taken


def all_pairs(
    factors: Mapping[str, Sequence[str]], fits: Callable[[Row], bool], seed: int
) -> list[Row]:
    """Return combinations that hold every pair of values that fit together.

    Args:
        factors: name -> its values.
        fits: whether a combination, of some of the factors, may be.
        seed: of the choice among combinations that would do.
    """
    rng = Random(seed)
    wanted = {
        frozenset({(a, x), (b, y)})
        for a, b in combinations(factors, 2)
        for x in factors[a]
        for y in factors[b]
        if fits({a: x, b: y})
    }
    rows = []
    for pair in sorted(wanted, key=sorted):
        if pair not in wanted:
            continue
        found = [_around(dict(pair), factors, fits, wanted, rng) for _ in range(_AT_ONCE)]
        whole = [row for row in found if row is not None]
        if not whole:
            whole = [
                row
                for _ in range(_TRIES)
                if (row := _around(dict(pair), factors, fits, wanted, rng)) is not None
            ]
        wanted.discard(pair)
        if whole:
            best = max(whole, key=lambda row: len(wanted & pairs_of(row)))
            wanted -= pairs_of(best)
            rows.append(best)
    return rows


def pairs_of(row: Row) -> set[Pair]:
    """Return the pairs of values in a combination."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def _around(
    row: Row,
    factors: Mapping[str, Sequence[str]],
    fits: Callable[[Row], bool],
    wanted: set[Pair],
    rng: Random,
) -> Row | None:
    """Complete a combination, each factor by the value that makes most new pairs; None if none."""
    others = [name for name in factors if name not in row]
    rng.shuffle(others)
    for name in others:
        values = [value for value in factors[name] if fits(row | {name: value})]
        if not values:
            return None
        row = row | {name: max(values, key=lambda value: _gain(row, name, value, wanted, rng))}
    return {name: row[name] for name in factors}


def _gain(row: Row, name: str, value: str, wanted: set[Pair], rng: Random) -> float:
    new = sum(frozenset({(name, value), other}) in wanted for other in row.items())
    return new + rng.random() / 2
