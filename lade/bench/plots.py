"""Plots of results as PNG and SVG, by matplotlib: the extra `plots`, imported when needed."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lade.bench.replay_report import Point, num_passes_of
from lade.bench.report import LOOPS, OVERALL
from lade.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lade.bench.fleet import Cell

_FORMATS = ("png", "svg")
_DPI = 150


def check_folder(folder: Path) -> None:
    """Create the folder for plots, before any work is done.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OSError: the folder cannot be created.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "plots")
    folder.mkdir(parents=True, exist_ok=True)


def plot_speedups(folder: Path, name: str, summary: Mapping[str, Any]) -> list[Path]:
    """Plot the speed-up of every method in every group of answers as bars; return the files.

    Args:
        folder: where to write `<name>.png` and `<name>.svg`.
        name: base name of the files.
        summary: by group and method, as in a result file of `lade bench run`.

    Raises:
        ValueError: no method was measured against plain.
    """
    bars = _speedups(summary)
    if not bars:
        raise ValueError("expected results of plain and another method to plot speed-ups, got none")
    figure, axes = _figure(width=max(6.0, 1.0 + 0.3 * len(bars) * len(summary)))
    width = 0.8 / len(bars)
    for number, (label, of_groups) in enumerate(bars.items()):
        offset = (number - (len(bars) - 1) / 2) * width
        axes.bar([place + offset for place in of_groups], [*of_groups.values()], width, label=label)
    axes.axhline(1.0, color="black", linewidth=0.8)  # plain
    axes.set_xticks(range(len(summary)), [*summary], rotation=30, ha="right")
    axes.set_ylabel("tokens per second over plain")
    return _save(figure, axes, folder, name)


def plot_curves(folder: Path, name: str, points: Sequence[Point]) -> list[Path]:
    """Plot MAT against draft tokens, one line per method; return the files.

    Args:
        folder: where to write `<name>.png` and `<name>.svg`.
        name: base name of the files.
        points: what to plot; points of single categories are left out.
    """
    num_passes = num_passes_of(points)
    lines: dict[str, list[Point]] = {}
    for point in points:
        if point.group in (OVERALL, LOOPS):
            note = ", loops" if point.group == LOOPS else ""
            lines.setdefault(point.label(num_passes) + note, []).append(point)
    figure, axes = _figure(width=6.0)
    for label, line in lines.items():
        in_order = sorted(line, key=lambda point: point.max_draft_tokens)
        counts = [point.max_draft_tokens for point in in_order]
        values = [point.mean_accepted_tokens for point in in_order]
        style = "--" if in_order[0].group == LOOPS else "-"
        axes.plot(counts, values, style, marker="o", label=label)
    axes.set_xlabel("draft tokens, at most")
    axes.set_ylabel("mean accepted tokens")
    return _save(figure, axes, folder, name)


def plot_fleet(folder: Path, name: str, cells: "Sequence[Cell]") -> list[Path]:
    """Plot MAT against replicas, one line per way of sharing; return the files.

    Args:
        folder: where to write `<name>.png` and `<name>.svg`.
        name: base name of the files.
        cells: what to plot.
    """
    lines: dict[str, list[tuple[int, float]]] = {}
    for cell in cells:
        point = cell.num_replicas, cell.mean_accepted_tokens
        lines.setdefault(cell.sharing, []).append(point)
    figure, axes = _figure(width=7.0)
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.set_xscale("log")
    axes.set_xlabel("replicas")
    axes.set_ylabel("mean accepted tokens")
    return _save(figure, axes, folder, name)


def _speedups(summary: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Return speed-ups by label (a method but plain, or a pass of it) and index of the group."""
    bars: dict[str, dict[int, float]] = {}
    for place, of_methods in enumerate(summary.values()):
        for method, entry in of_methods.items():
            passes = {method: entry}
            if "each_pass" in entry:
                each_pass = enumerate(entry["each_pass"], start=1)
                passes = {f"{method}, pass {number}": of_pass for number, of_pass in each_pass}
            for label, of_pass in passes.items():
                if method != "plain" and of_pass["speedup"] is not None:
                    bars.setdefault(label, {})[place] = of_pass["speedup"]
    return bars


def _figure(width: float) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure  # not pyplot, which keeps figures and wants a display

    figure = Figure(figsize=(width, 4.0), layout="constrained")
    return figure, figure.subplots()


def _save(figure: "Figure", axes: "Axes", folder: Path, name: str) -> list[Path]:
    axes.legend()
    paths = [folder / f"{name}.{ending}" for ending in _FORMATS]
    for path in paths:
        figure.savefig(path, dpi=_DPI)
    return paths
