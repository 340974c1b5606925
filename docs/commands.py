"""The page of the command line, written from the program's own commands, options and help texts."""

import re
from collections.abc import Collection, Iterator
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import typer

from lade.apps.cli.app import app


def markdown() -> str:
    """Return a section for every command, and one for the options that several of them have."""
    commands = [*_commands(typer.main.get_command(app), "lade")]
    found: dict[str, list[str]] = {}
    for name, command in commands:
        for row in _rows(command):
            found.setdefault(row, []).append(name.removeprefix("lade "))
    shared = {row: names for row, names in found.items() if len(names) > 1}
    parts = [part for name, command in commands for part in _section(name, command, shared)]
    rows = [
        row.replace(" | ", f" | {', '.join(names)} | ", 1)
        for row, names in sorted(shared.items(), key=lambda each: -len(each[1]))
    ]
    table = ["| option | commands | meaning |", "| --- | --- | --- |", *rows]
    return "\n\n".join([*parts, "## Common options", "\n".join(table)])


# What stands behind an option that takes a value, by the type of its parameter.
_PLACEHOLDERS = {str: "TEXT", int: "INTEGER", float: "NUMBER", Path: "PATH"}


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, command
    for each in getattr(command, "commands", {}).values():
        if not each.hidden:
            yield from _commands(each, f"{name} {each.name}")


def _section(name: str, command: Any, shared: Collection[str]) -> Iterator[str]:
    if name != "lade":
        yield f"## {name}"
    yield _text(command.help or "")
    if not hasattr(command, "commands"):
        yield f"```\n{' '.join([name, *_usage(*_parameters(command))])}\n```"
    rows = [*_rows(command)]
    if alone := [row for row in rows if row not in shared]:
        yield "\n".join(["| option | meaning |", "| --- | --- |", *alone])
    if others := [row.split("`")[1] for row in rows if row in shared]:
        names = ", ".join(f"`{each}`" for each in others)
        yield f"[Common options](#common-options): {names}."


def _parameters(command: Any) -> tuple[list[Any], dict[str, Any]]:
    types = get_type_hints(command.callback) if command.callback else {}
    return [each for each in command.params if each.name in types and not each.hidden], types


def _rows(command: Any) -> Iterator[str]:
    parameters, types = _parameters(command)
    return (_row(each, types) for each in parameters)


def _usage(parameters: list[Any], types: dict[str, Any]) -> Iterator[str]:
    for each in parameters:
        if each.param_type_name == "argument":
            shown = (each.metavar or each.name).upper() + "..." * (each.nargs == -1)
            yield shown if each.required else f"[{shown}]"
        elif each.required:
            yield f"{each.opts[0]} {_value_of(each, types[each.name])}"
    yield "[OPTIONS]"


def _row(parameter: Any, types: dict[str, Any]) -> str:
    is_argument = parameter.param_type_name == "argument"
    names = [(parameter.metavar or parameter.name).upper()] if is_argument else parameter.opts
    words = ", ".join(f"`{each}`" for each in names)
    if not is_argument and not parameter.is_flag:
        words += f" {_value_of(parameter, types[parameter.name])}".replace("|", "\\|")
    meaning = _text(getattr(parameter, "help", None) or "")
    default = parameter.default
    if meaning.endswith("]."):  # where a screen has no room for a line of its own
        meaning, _, told = meaning.removesuffix("].").rpartition(" [")
        meaning, default = f"{meaning}. Default: `{told}`.", None
    if isinstance(default, int | float | str) and not isinstance(default, bool):
        meaning += f" Default: `{getattr(default, 'value', default)}`."
    if parameter.required and not is_argument:
        meaning += " Required."
    return f"| {words} | {meaning} |"


def _value_of(parameter: Any, annotation: Any) -> str:
    """Return what stands for a value, of `list[Path] | None` say."""
    while inner := [each for each in get_args(annotation) if each is not NoneType]:
        annotation = inner[0]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "|".join(str(choice.value) for choice in annotation)
    return str(parameter.metavar or _PLACEHOLDERS.get(annotation, "TEXT"))


def _text(help_text: str) -> str:
    """Return a help text as Markdown: paragraphs kept, characters that mean something escaped."""
    escaped = (
        help_text.replace("\b", "").replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")
    )
    paragraphs = (" ".join(part.split()) for part in escaped.strip().split("\n\n"))
    return "\n\n".join(re.sub(" - (?=[a-zA-Z/ ]+: )", "\n- ", each) for each in paragraphs)
