"""The page of the command line, written from the program's own commands, options and help texts."""

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import typer

from lade.cli.app import app


def markdown() -> str:
    """Return a section for every command."""
    return "\n\n".join(_sections(typer.main.get_command(app), "lade"))


# What stands behind an option that takes a value, by the type of its parameter.
_PLACEHOLDERS = {str: "TEXT", int: "INTEGER", float: "NUMBER", Path: "PATH"}


def _sections(command: Any, name: str) -> Iterator[str]:
    subcommands = getattr(command, "commands", {})
    if name != "lade":
        yield f"## {name}"
    yield _text(command.help or "")
    types = get_type_hints(command.callback) if command.callback else {}
    parameters = [each for each in command.params if each.name in types and not each.hidden]
    if not subcommands:
        yield f"```\n{' '.join([name, *_usage(parameters, types)])}\n```"
    rows = [_row(each, types) for each in parameters]
    if rows:
        yield "\n".join(["| option | meaning |", "| --- | --- |", *rows])
    for each in subcommands.values():
        if not each.hidden:
            yield from _sections(each, f"{name} {each.name}")


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
    return "\n\n".join(" ".join(part.split()) for part in escaped.strip().split("\n\n"))
