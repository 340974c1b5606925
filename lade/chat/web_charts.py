"""Charts of the page as inline SVG: rates, accepted lengths, fill levels, timelines of a race.

Colours and dashes are classes of `web.css`, so that charts follow light and dark mode. Drawings
stretch to the width there is, labels beside them keep their size. Each chart has its figures in
words for screen readers. Plain SVG, as a charting library would be megabytes more for a browser to
load, for nothing that is needed here.
"""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from lade.stats import Step

_MAX_POINTS = 80  # of a line; more are closer than a pixel
_MAX_BARS = 48
_WINDOW_SEC = 1.0  # rates are those of the last second


_STEPS_KEY = (
    '<p class="ends"><span><i class="key drafted"></i> drafted and accepted</span>'
    '<span><i class="key own"></i> by the model itself</span></p>'
)


class Timeline(NamedTuple):
    """When each token of an answer was there."""

    name: str
    style: str  # class of its line in `web.css`
    token_times: Sequence[float]  # seconds from the begin of the call, ascending


def rate_chart(token_times: Sequence[float]) -> str:
    """Draw tokens per second over the seconds of an answer."""
    points = _rates(token_times)
    if len(points) < 2:
        return _empty("Tokens per second")
    end, peak = points[-1][0], max(rate for _, rate in points)
    scale = _Scale(end, _round_up(peak), "s")
    words = f"Tokens per second: {points[-1][1]:.1f} now, {peak:.1f} at most."
    return scale.figure("Tokens per second", words, scale.polyline(points, "lade-line"))


def steps_chart(steps: Sequence[Step]) -> str:
    """Draw how many tokens each of the last steps brought, drafted ones below the model's own."""
    steps = [step for step in steps if step.token_ids][-_MAX_BARS:]
    if not steps:
        return _empty("Tokens by step")
    longest = max(len(step.token_ids) for step in steps)
    scale = _Scale(_MAX_BARS, _round_up(longest))
    width = 0.8 * scale.x(1)
    bars = []
    for i, step in enumerate(steps):
        # A stop condition may end a step within its drafted tokens: none is then the model's own.
        levels = (0, step.num_accepted, len(step.token_ids))
        for low, high, style in zip(levels[:-1], levels[1:], ("drafted", "own"), strict=True):
            if high > low:
                bars.append(
                    f'<rect class="{style}" x="{scale.x(i):.2f}" y="{scale.y(high):.2f}" '
                    f'width="{width:.2f}" height="{scale.y(low) - scale.y(high):.2f}"/>'
                )
    mean = sum(len(step.token_ids) for step in steps) / len(steps)
    words = f"Tokens by step, last {len(steps)} steps: {mean:.2f} on average, {longest} at most."
    return scale.figure("Tokens by step", words, "".join(bars), beside=_STEPS_KEY)


def fill_chart(name: str, used: int, limit: int) -> str:
    """Draw how full something is."""
    share = min(1.0, used / limit)
    words = f"{used:,} of {limit:,}"
    return (
        f'<figure class="chart"><figcaption>{escape(name)} <small>{words}</small></figcaption>'
        f'<div class="fill" role="meter" aria-label="{escape(name)}" aria-valuemin="0" '
        f'aria-valuemax="{limit}" aria-valuenow="{used}" aria-valuetext="{words}">'
        f'<div style="width: {share:.3%}"></div></div></figure>'
    )


def race_chart(timelines: Sequence[Timeline]) -> str:
    """Draw tokens over seconds, a line for each answer."""
    begun = [line for line in timelines if line.token_times]
    if not begun:
        return _empty("Tokens over seconds")
    end = max(line.token_times[-1] for line in begun)
    scale = _Scale(end, _round_up(max(len(line.token_times) for line in begun)), "s")
    drawn, ends, words = [], [], []
    for line in begun:
        times = line.token_times
        points = [(0.0, 0.0), *((sec, i + 1.0) for i, sec in enumerate(times))]
        drawn.append(scale.polyline(_thinned(points), line.style))
        x, y = scale.x(times[-1]), scale.y(len(times))
        ends.append(f'<i class="{line.style}" style="left: {x:.2f}%; top: {y:.2f}%"></i>')
        words.append(f"{line.name}: {len(times)} tokens in {times[-1]:.2f} seconds")
    shown = f"{'; '.join(words)}."
    return scale.figure("Tokens over seconds", shown, "".join(drawn), "".join(ends), "tall")


class _Scale:
    """Places in a chart, in percent, of values from zero to the ends of its axes."""

    def __init__(self, x_end: float, y_end: float, unit: str | None = None) -> None:
        self._x_end, self._y_end, self._unit = x_end or 1.0, y_end, unit

    def x(self, value: float) -> float:
        return 100 * value / self._x_end

    def y(self, value: float) -> float:
        return 100 - 100 * value / self._y_end

    def polyline(self, points: Sequence[tuple[float, float]], style: str) -> str:
        places = " ".join(f"{self.x(a):.2f},{self.y(b):.2f}" for a, b in points)
        return f'<polyline class="{style}" points="{places}"/>'

    def figure(
        self, title: str, words: str, drawn: str, above: str = "", style: str = "", beside: str = ""
    ) -> str:
        """Put a chart together: its drawing, HTML above that, and a line of HTML below."""
        grid, labels = [], []
        for value in (0.0, self._y_end / 2, self._y_end):
            y = self.y(value)
            grid.append(f'<line class="grid" x1="0" x2="100" y1="{y:g}" y2="{y:g}"/>')
            labels.append(f'<span style="top: {y:g}%">{value:g}</span>')
        seconds = ""
        if self._unit:
            end = f"{self._x_end:.1f} {self._unit}"
            seconds = f'<p class="ends"><span>0 {self._unit}</span><span>{end}</span></p>'
        return (
            f'<figure class="chart {style}"><figcaption>{escape(title)}</figcaption>'
            f'<div class="plot"><div class="labels" aria-hidden="true">{"".join(labels)}</div>'
            f'<svg role="img" aria-label="{escape(words)}" viewBox="0 0 100 100" '
            f'preserveAspectRatio="none">{"".join(grid)}{drawn}</svg>{above}</div>'
            f"{seconds}{beside}</figure>"
        )


def _rates(token_times: Sequence[float]) -> list[tuple[float, float]]:
    """Return the rate of the second before each moment that brought tokens.

    It is counted from the last token before that second, or from the begin of the call, so that
    answers of less than a token per second have their rate, too.
    """
    points: list[tuple[float, float]] = []
    first = 0  # token of the window
    for i, now in enumerate(token_times):
        while token_times[first] <= now - _WINDOW_SEC:
            first += 1
        sec = now - (token_times[first - 1] if first else 0.0)
        if sec > 0:
            if points and points[-1][0] == now:
                points.pop()
            points.append((now, (i + 1 - first) / sec))
    return _thinned(points)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most `_MAX_POINTS` and one, the last of them included."""
    stride = -(-len(points) // _MAX_POINTS) or 1
    kept = [*points[::stride]]
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def _round_up(value: float) -> float:
    """Return the next of 2, 4, 10, 20, 40, 100, …, whose half is a round number, too."""
    power = 1
    while True:
        for step in (2, 4, 10):
            if value <= step * power:
                return step * power
        power *= 10


def _empty(title: str) -> str:
    return (
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption>'
        '<p class="empty">after the first answer</p></figure>'
    )
