"""Plots of results as PNG and SVG, by matplotlib: the extra `plots`, imported when needed."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lade.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMATS = ("png", "svg")
_DPI = 150


def plot_speedups(folder: Path, name: str, summary: Mapping[str, Any]) -> list[Path]:
    """Plot the speed-up of every method in every group of answers as bars; return the files.

    Raises:
        UserError: no method was measured against plain.
    """
    bars = _speedups(summary)
    if not bars:
        raise UserError("expected results of plain and another method to plot speed-ups, got none")
    figure, axes = new_figure(width=max(6.0, 1.0 + 0.3 * len(bars) * len(summary)))
    width = 0.8 / len(bars)
    for number, (label, of_groups) in enumerate(bars.items()):
        offset = (number - (len(bars) - 1) / 2) * width
        axes.bar([place + offset for place in of_groups], [*of_groups.values()], width, label=label)
    axes.axhline(1.0, color="black", linewidth=0.8)  # plain
    axes.set_xticks(range(len(summary)), [*summary], rotation=30, ha="right")
    axes.set_ylabel("tokens per second over plain")
    return save(figure, axes, folder, name)


def _speedups(summary: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Return speed-ups by method, all but plain, and index of the group."""
    bars: dict[str, dict[int, float]] = {}
    for place, of_methods in enumerate(summary.values()):
        for method, entry in of_methods.items():
            if method != "plain" and entry["speedup"] is not None:
                bars.setdefault(method, {})[place] = entry["speedup"]
    return bars


def new_figure(width: float) -> "tuple[Figure, Axes]":
    """Return a figure and its axes."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures and wants a display

    figure = Figure(figsize=(width, 4.0), layout="constrained")
    return figure, figure.subplots()


def save(figure: "Figure", axes: "Axes", folder: Path, name: str) -> list[Path]:
    """Write a figure with its legend; return the files."""
    axes.legend()
    paths = [folder / f"{name}.{ending}" for ending in _FORMATS]
    for path in paths:
        figure.savefig(path, dpi=_DPI)
    return paths
