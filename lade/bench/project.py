"""Project replays to another machine: the speed-up of measured MAT at its step costs.

A step that verifies n draft tokens runs 1 + n tokens and commits MAT tokens, where plain decoding
runs and commits one. So the speed-up is MAT x cost(1) / cost(1 + n). This leaves out the prefill
and our own code (`draft ms/step` of the replay), and counts every draft as having n tokens.
"""

import csv
import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lade.bench.environment import environment
from lade.bench.replay_report import Point, num_passes_of
from lade.bench.report import OVERALL, rounded, speedup_text
from lade.bench.tables import Sheet


class StepCosts:
    """Seconds of one forward of a model on a machine, by its number of tokens.

    Args:
        sec_by_size: measured seconds by number of tokens; at least one.
        name: of their source, for error messages.

    Raises:
        ValueError: there are none, or a size or a time is not above 0.
    """

    def __init__(self, sec_by_size: Mapping[int, float], name: str) -> None:
        if not sec_by_size:
            raise ValueError(f"expected step costs in {name}, found none")
        for size, sec in sec_by_size.items():
            if size < 1 or not 0 < sec < math.inf:
                raise ValueError(
                    f"expected a number of tokens and seconds above 0 in {name}, got {size}, {sec}"
                )
        self._sizes = sorted(sec_by_size)
        self._secs = [sec_by_size[size] for size in self._sizes]
        self._name = name

    def sec(self, num_tokens: int) -> float:
        """Return the seconds of a forward over `num_tokens`, interpolated between neighbours.

        Raises:
            ValueError: `num_tokens` is outside the measured sizes; nothing is extrapolated.
        """
        sizes, secs = self._sizes, self._secs
        if not sizes[0] <= num_tokens <= sizes[-1]:
            raise ValueError(
                f"expected {self._name} to have the step cost of {num_tokens} tokens, or of fewer "
                f"and of more, got {sizes[0]} to {sizes[-1]}"
            )
        right = bisect_left(sizes, num_tokens)
        if sizes[right] == num_tokens:
            return secs[right]
        share = (num_tokens - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return secs[right - 1] + share * (secs[right] - secs[right - 1])


class Projection(NamedTuple):
    """One point of a replay, projected."""

    results: str  # the name of its file
    label: str  # the method, with the pass if there are several
    max_draft_tokens: int
    mean_accepted_tokens: float
    step_cost: float  # of 1 + max_draft_tokens tokens, relative to one token
    speedup: float
    is_best: bool  # among all draft sizes of this method


def read_step_costs(path: Path) -> StepCosts:
    """Read a table of step costs: JSON, `{"1": 0.021, …}`, or two columns of CSV.

    The columns may have headings.

    Raises:
        ValueError: the file is neither, or a value is out of range.
    """
    text = path.read_text(encoding="utf-8")
    try:
        if text.lstrip().startswith("{"):
            pairs = [*json.loads(text).items()]
        else:
            pairs = [row for row in csv.reader(text.splitlines()) if row]
            if pairs and not pairs[0][0].strip().isdigit():
                pairs = pairs[1:]  # a header
        numbers = [(int(size), float(sec)) for size, sec in pairs]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"expected {path.name} to hold a number of tokens and seconds in each line, or a JSON "
            f"object of them: {error}"
        ) from None
    if len(dict(numbers)) < len(numbers):
        raise ValueError(f"expected each number of tokens once in {path.name}, got one twice")
    return StepCosts(dict(numbers), path.name)


def read_points(path: Path) -> list[Point]:
    """Read the points over all answers without loops of a `lade bench replay` result file.

    Raises:
        ValueError: it is not such a file, or has no such points.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        made = [Point(**entry) for entry in content["runs"]]
        found = [point for point in made if point.group == OVERALL]
        if not found:
            raise ValueError("no answers without loops")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"expected {path.name} to be a result file of lade bench replay: {error!r}"
        ) from None
    return found


def project(results: str, measured: Sequence[Point], costs: StepCosts) -> list[Projection]:
    """Return the projection of each point, the best draft size of each method marked."""
    num_passes = num_passes_of(measured)
    plain_sec = costs.sec(1)
    made = []
    for point in measured:
        step_cost = costs.sec(1 + point.max_draft_tokens) / plain_sec
        mat = point.mean_accepted_tokens
        label = point.label(num_passes)
        made.append(
            Projection(
                results, label, point.max_draft_tokens, mat, step_cost, mat / step_cost, False
            )
        )
    best: dict[str, Projection] = {}
    for each in made:
        if each.label not in best or each.speedup > best[each.label].speedup:
            best[each.label] = each
    return [each._replace(is_best=each is best[each.label]) for each in made]


def table(made: Sequence[Projection], costs_name: str) -> Sheet:
    """Return a table of projections, with a section per method of a file."""
    sections: dict[tuple[str, str], list[tuple[str, ...]]] = {}
    for each in made:
        cells = (
            *(
                each.results,
                each.label,
                str(each.max_draft_tokens),
                f"{each.mean_accepted_tokens:.2f}",
            ),
            *(f"{each.step_cost:.2f}", speedup_text(each.speedup), "best" if each.is_best else ""),
        )
        sections.setdefault((each.results, each.label), []).append(cells)
    headings = ("results", "method", "max draft tokens", "MAT", "step cost", "projected", "")
    caption = "Speed-up over plain decoding; prefill and drafting not counted."
    return Sheet(
        f"Projected to the step costs in {costs_name}", headings, 2, [*sections.values()], caption
    )


def as_json(made: Sequence[Projection], settings: dict[str, Any]) -> dict[str, Any]:
    """Return all projections, ready for JSON."""
    return {
        "environment": environment(),
        "settings": settings,
        "runs": [rounded(each._asdict()) for each in made],
    }
