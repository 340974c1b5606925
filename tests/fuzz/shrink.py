"""Make a failing case small, and print one as a program."""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, replace
from typing import Any

from tests.fuzz.cases import Case

_LENGTHS = ("max_new_tokens", "max_length")  # without any, `generate` warns and adds 20 tokens
_CONFIG = "lade.Config(max_draft_tokens=4, strict_drafter=True)"  # else time decides how many
_KEPT = "model", "seed", "rows"
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
            if smaller == case:
                continue
            tries += 1
            if fails(smaller):
                case, smaller_found = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Yield cases with one thing less, the most telling first."""
    for each in fields(case)[::-1]:
        value, usual = getattr(case, each.name), _usual(each)
        if each.name not in (*_KEPT, "lade") and value != usual:
            yield _with(case, each.name, usual)
        if isinstance(value, dict) and each.name != "model":
            for name in value:
                yield _with(case, each.name, {key: value[key] for key in value if key != name})
            if each.name in ("config", "model_config"):  # in the call instead
                moved: Any = {each.name: {}, "options": value | case.options}
                yield replace(case, **moved)
    for number in range(len(case.events)):
        yield _with(case, "events", case.events[:number] + case.events[number + 1 :])
    yield _with(case, "lade", {**case.lade, "config": _CONFIG})
    if len(case.rows) > 1:
        for row in range(len(case.rows)):
            yield _cut(case, lambda rows, row=row: rows[:row] + rows[row + 1 :])  # type: ignore[misc]
    if case.rows and len(case.rows[0]) > 1:
        for kept in (slice(1, None), slice(None, -1)):
            yield _cut(case, lambda rows, kept=kept: tuple(row[kept] for row in rows))  # type: ignore[misc]
    kind = "architecture" if case.architecture else "family"
    yield _with(case, "model", {**case.model, kind: "llama"})


def _with(case: Case, name: str, value: Any) -> Case:
    """Return a case with another value, or the same one where it could not be run or would vary."""
    other: Any = replace(case, **{name: value})
    has_length = any(other.setting(length) for length in _LENGTHS)
    is_told = other.setting("tokenizer") or not other.setting("stop_strings")
    is_sound = has_length and is_told and ("config" in other.lade or "config" not in case.lade)
    return other if is_sound else case


def _cut(case: Case, change: Callable[[Any], Any]) -> Case:
    """Cut the prompt and all that goes with its tokens."""
    held = {name: getattr(case, name) for name in ("rows", "mask", "positions", "token_types")}
    changed: Any = {name: rows and change(rows) for name, rows in held.items()}
    return replace(case, **changed)


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
