"""Make a failing case small, and print one as a program."""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, fields, replace
from typing import Any

from tests.fuzz.cases import Case

_LENGTHS = ("max_new_tokens", "max_length")  # without any, `generate` warns and adds 20 tokens

MAX_TRIES = 250  # of running a case, while it is made smaller


def shrink(case: Case, fails: Callable[[Case], bool], max_tries: int = MAX_TRIES) -> Case:
    """Return a case that still fails, and passes without any single part of it."""
    tries = 0
    smaller_found = True
    while smaller_found:
        smaller_found = False
        for smaller in _smaller(case):
            if tries == max_tries:
                return case
            tries += 1
            if fails(smaller):
                case, smaller_found = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Yield cases with one thing less, the most telling first."""
    changes: Sequence[dict[str, Any]] = (
        {"follow_up": ""},
        {"num_calls": 1},
        {"events": ()},
        {"profile": {}},
        {"earlier": None},
        {"negative": None, "negative_mask": False},
        {"mask": None},
        {"positions": None},
        {"token_types": None},
        {"form": "place"},
        {"door": "generate"},
    )
    for change in changes:
        if any(getattr(case, name) != value for name, value in change.items()):
            yield _replaced(case, change)
    for number in range(len(case.events)):
        if len(case.events) > 1:
            yield replace(case, events=case.events[:number] + case.events[number + 1 :])
    for name in case.profile:
        others = {key: value for key, value in case.profile.items() if key != name}
        yield replace(case, profile=others)
    for place in ("model_config", "config", "options"):
        named = getattr(case, place)
        for name in named:
            kept = {key: value for key, value in named.items() if key != name}
            if name == "tokenizer" and case.setting("stop_strings"):
                continue
            less = _replaced(case, {place: kept})
            if name not in _LENGTHS or any(less.setting(length) for length in _LENGTHS):
                yield less
            if place != "options":
                yield replace(less, options={name: named[name], **case.options})
    for name in case.lade:
        others = {key: value for key, value in case.lade.items() if key != name}
        if name != "config":
            yield replace(case, lade=others)
            continue
        yield from _with_simpler_config(case)
    if len(case.rows) > 1:
        for row in range(len(case.rows)):
            yield _without_row(case, row)
    if case.rows and len(case.rows[0]) > 1:
        yield _without_column(case, 0)
        yield _without_column(case, -1)
    for name in ("max_new_tokens", "max_length", "num_return_sequences"):
        value = case.options.get(name, "")
        if value.isdigit():
            for number in sorted({int(value) // 2, int(value) - 1} - {0}):
                yield replace(case, options={**case.options, name: repr(number)})
    for name, value in case.options.items():
        yield from _with_fewer_items(case, name, value)
    if not case.architecture:
        if case.model["family"] != "llama":
            yield replace(case, model={**case.model, "family": "llama"})
        return
    for name, usual in (("architecture", "llama"), ("attention", None)):
        if case.model[name] != usual:
            yield replace(case, model={**case.model, name: usual})


def _replaced(case: Case, change: dict[str, Any]) -> Case:
    return replace(case, **change)


def _with_simpler_config(case: Case) -> Iterator[Case]:
    """Leave out what is set; but without a fixed number of draft tokens, time decides."""
    fixed = {"max_draft_tokens": "4", "strict_drafter": "True"}
    call: Any = ast.parse(case.lade["config"], mode="eval").body
    given = {each.arg: ast.unparse(each.value) for each in call.keywords}
    for values in (
        fixed,
        {**given, **fixed},
        *({key: v for key, v in given.items() if key != name} for name in given.keys() - fixed),
    ):
        if values != given:
            simple = ", ".join(f"{name}={value}" for name, value in values.items())
            yield replace(case, lade={**case.lade, "config": f"lade.Config({simple})"})


def _with_fewer_items(case: Case, name: str, value: str) -> Iterator[Case]:
    """Take single processors or criteria out of their list."""
    match = re.fullmatch(r"(\w+List)\(\[(.+\))\]\)", value)
    if match is None:
        return
    items = re.split(r"(?<=\)), (?=[A-Z])", match[2])
    if len(items) < 2:
        return
    for number in range(len(items)):
        kept = ", ".join(items[:number] + items[number + 1 :])
        yield replace(case, options={**case.options, name: f"{match[1]}([{kept}])"})


def _without_row(case: Case, row: int) -> Case:
    cut: dict[str, Any] = {}
    for name in ("rows", "mask", "positions", "token_types", "earlier"):
        rows = getattr(case, name)
        cut[name] = rows if rows is None else rows[:row] + rows[row + 1 :]
    return _replaced(case, cut)


def _without_column(case: Case, column: int) -> Case:
    cut: dict[str, Any] = {}
    for name in ("rows", "mask", "positions", "token_types"):
        rows = getattr(case, name)
        part = slice(1, None) if column == 0 else slice(None, -1)
        cut[name] = rows if rows is None else tuple(row[part] for row in rows)
    return _replaced(case, cut)


def program(case: Case, title: str) -> str:
    """Return a program that compares a case and fails, to be run in the root of the repository."""
    values = ((each, getattr(case, each.name)) for each in fields(case))
    given = [f"    {each.name}={v!r}," for each, v in values if v != _usual(each)]
    lines = [
        f"# {title}",
        "from tests.fuzz.cases import Case",
        "from tests.fuzz.compare import compare",
        "",
        "case = Case(",
        *given,
        ")",
        "verdict = compare(case)",
        'assert verdict.kind != "mismatch", verdict.differences',
    ]
    return "\n".join(lines) + "\n"


def _usual(given: Field[Any]) -> Any:
    return given.default if given.default_factory is MISSING else given.default_factory()
