"""Results as a table for a terminal, by category."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from rich import box
from rich.table import Table
from rich.text import Text

from lade.apps.bench.busy import Load, Sums
from lade.apps.bench.run import Result, Summary, summarise

_COLUMNS = ("tokens/s", "speed-up", "MAT", "draft tokens /step", "same text", "accepted")

LOOPS = "ending in a loop"
OVERALL = "overall"


class _Grouped(Protocol):
    @property
    def category(self) -> str: ...

    @property
    def loops(self) -> bool: ...


_G = TypeVar("_G", bound=_Grouped)


def groups(results: Sequence[_G]) -> dict[str, list[_G]]:
    """Return results without loops by category, then all of these, then those with loops.

    A batch counts as one with loops if one of its rows has one.
    """
    clean = [result for result in results if not result.loops]
    by_name: dict[str, list[_G]] = {}
    for result in clean:
        by_name.setdefault(result.category, []).append(result)
    if clean:
        by_name[OVERALL] = clean
    if loops := [result for result in results if result.loops]:
        by_name[LOOPS] = loops
    return by_name


def empty_table(title: str, caption: str | None) -> Table:
    """Return a table without columns, in the form of all of ours."""
    return Table(
        title=Text(title, "italic"),
        caption=Text(caption, "dim") if caption else None,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )


def table(
    results: Sequence[Result],
    methods: Sequence[str],
    how: str,
    caption: str | None = None,
    summarise: Callable[[Sequence[Result], str], Summary] = summarise,
) -> Table:
    """Return a table of all groups and methods; `how` says how all of it was decoded."""
    words = how.replace("greedy", "greedy decoding", 1)
    made = empty_table(
        f"{words[0].upper()}{words[1:]} (answers that loop are listed separately)", caption
    )
    made.add_column("method", no_wrap=True)
    for heading in _COLUMNS:
        made.add_column(heading, justify="right", vertical="bottom")
    for group, part in groups(results).items():
        num_prompts = sum(len(result.prompts) for result in part)
        made.add_row(Text(f"{group}, {num_prompts} prompt{'s' * (num_prompts > 1)}", "bold"))
        for method in methods:
            each = summarise(part, method)
            made.add_row(
                f"  {method}",
                f"{each.tokens_per_sec:.1f}",
                "" if each.speedup is None else f"{each.speedup:.2f}x",
                f"{each.mean_accepted_tokens:.2f}",
                f"{each.draft_tokens_per_step:.1f}",
                *("" if s is None else f"{s:.0%}" for s in (each.same_text, each.acceptance_rate)),
            )
        made.add_section()
    return made


def busy_table(sums: Mapping[Load, Sums], title: str) -> Table:
    """Return a table of speeds beside busy processes."""
    made = empty_table(title, "CPU: tokens for each second that all threads computed")
    for heading in ("method", "threads", "busy processes", "tokens/s", "CPU"):
        made.add_column(heading, justify="right")
    for load, of_load in sums.items():
        made.add_row(*map(str, load), *(f"{rate:.1f}" for rate in of_load.rates().values()))
    return made
