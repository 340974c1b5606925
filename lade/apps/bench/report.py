"""Results as tables for a terminal, and answers to one prompt held against plain `generate`'s."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from lade.apps.bench.methods import Answer
from lade.apps.bench.run import Result, Summary, summarise
from lade.compat import dtype_of
from lade.compat.closeness import is_exact_in

_COLUMNS = (
    "tokens/s",
    "speed-up",
    "tokens /CPU s",
    "MAT",
    "draft tokens /step",
    "same text",
    "accepted",
)

LOOPS = "ending in a loop"
OVERALL = "overall"


def groups(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return results without loops by category, then all of these, then those with loops.

    A batch counts as one with loops if one of its rows has one.
    """
    clean = [result for result in results if not result.loops]
    by_name: dict[str, list[Result]] = {}
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
                f"{each.tokens_per_cpu_sec:.1f}",
                *_of_steps(each),
                *("" if s is None else f"{s:.0%}" for s in (each.same_text, each.acceptance_rate)),
            )
        made.add_section()
    return made


def _of_steps(summary: Summary) -> tuple[str, str]:
    """Return MAT and draft tokens of a step; nothing for an engine that does not tell its steps."""
    if summary.mean_accepted_tokens == 0:
        return "", ""
    return f"{summary.mean_accepted_tokens:.2f}", f"{summary.draft_tokens_per_step:.1f}"


def compared(answers: Mapping[str, Answer]) -> Iterator[str]:
    """Yield a line for each method's answer of one row; the first one is plain `generate`'s."""
    plain, width = next(iter(answers.values())), max(map(len, answers))
    for name, answer in answers.items():
        line = f"{name.ljust(width)}  {answer.num_tokens:,} tokens in {answer.sec:.1f} s"
        line += f", {answer.tokens_per_sec:.1f} tokens a second"
        if answer is not plain:
            pairs = zip_longest(plain.rows[0], answer.rows[0])
            first = next((n for n, (one, other) in enumerate(pairs, 1) if one != other), None)
            line += f", {answer.tokens_per_sec / plain.tokens_per_sec:.2f}x plain, "
            line += "same text" if first is None else f"differs at token {first}"
        yield line


def why_different(model: Any) -> str:
    """Explain why answers may differ in the model's dtype."""
    dtype = str(dtype_of(model)).removeprefix("torch.")
    if is_exact_in(model):
        return f"The text should be the same in {dtype}: this is a fault of lade, please report it."
    return (
        f"Plain generate computes in {dtype}, so where two tokens are nearly tied the texts can "
        "diverge. --dtype float32 gives the same text."
    )
