"""Plots of results as PNG and SVG, by matplotlib: the extra `plots`, imported when needed."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMATS = ("png", "svg")
_DPI = 150


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
