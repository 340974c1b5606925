"""The reference of the library, written from the signatures and docstrings of what it names."""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from typing import Any

_SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example", "Examples")
_HEADING = re.compile(rf"^({'|'.join(_SECTIONS)}):$", re.MULTILINE)
_ENTRY = re.compile(r"^(?=[\w*][\w*., ]*:\s)", re.MULTILINE)
_MODULES = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])")
_OBJECT = re.compile(r"<[^<>]+>")
_ARRAY = re.compile(r"ndarray\[tuple\[Any, \.\.\.\], dtype\[(\w+)\]\]")
_WIDTH = 96


def markdown(*names: str) -> str:
    """Return a section for everything named, as `package.Class` or `package.Class:method,…`.

    Without a list of methods a class is shown with all that are public and its own; with an empty
    one, with none.
    """
    return "\n\n".join(part for name in names for part in _parts(*name.partition(":")))


def _parts(path: str, colon: str, members: str) -> Iterator[str]:
    thing = resolve_name(path)
    yield f"### {path}"
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        yield f"`{thing!r}`"
        return
    bases = thing.__bases__ if inspect.isclass(thing) else ()
    is_error = any(issubclass(base, BaseException) for base in bases)
    if is_error:
        yield f"Based on {' and '.join(f'`{base.__name__}`' for base in bases)}."
    else:
        yield _signature(path, thing)
    yield from _text(inspect.getdoc(thing) or "")
    if not inspect.isclass(thing) or is_error:
        return
    chosen = members.split(",") if colon else [*vars(thing)]
    for name in chosen:
        member = inspect.getattr_static(thing, name) if name else None
        if name.startswith("_") or not (documented := inspect.getdoc(member)):
            continue
        is_called = callable(member) or isinstance(member, classmethod | staticmethod)
        if is_called or isinstance(member, property):
            yield f"#### {thing.__name__}.{name}"
            if is_called:
                yield _signature(f"{thing.__name__}.{name}", getattr(thing, name))
            yield from _paragraphs(_HEADING.split(documented)[0].strip().split("\n\n")[0])


def summary(*names: str) -> str:
    """Return for everything named its signature, one paragraph, and a line for each method."""
    return "\n\n".join(part for name in names for part in _brief(name))


def _brief(path: str) -> Iterator[str]:
    thing = resolve_name(path)
    yield f"### {path}"
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        yield f"`{thing!r}`"
        return
    if inspect.isclass(thing) and not issubclass(thing, BaseException):
        yield _signature(path, thing)
    yield from _paragraphs((inspect.getdoc(thing) or "").split("\n\n")[0])
    if not inspect.isclass(thing):
        return
    lines = []
    for name, member in vars(thing).items():
        documented = inspect.getdoc(member)
        if name.startswith("_") or not documented:
            continue
        is_called = callable(member) or isinstance(member, classmethod | staticmethod)
        if is_called or isinstance(member, property):
            parameters = inspect.signature(getattr(thing, name)).parameters if is_called else ()
            called = f"({', '.join(each for each in parameters if each != 'self')})"
            first = _joined(documented.split("\n\n")[0])
            lines.append(f"- `{name}{called if is_called else ''}`: {first}")
    if lines:
        yield "\n".join(lines)


def _signature(name: str, function: Callable[..., Any]) -> str:
    """Return how something is called, a parameter a line where one line is too long."""
    signature = inspect.signature(function)
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    whole = signature.replace(parameters=parameters)
    if inspect.isclass(function):
        whole = whole.replace(return_annotation=inspect.Signature.empty)
    line = name + _plain(str(whole))
    if len(line) > _WIDTH:
        returned = _plain(str(whole.replace(parameters=[])))[2:]
        names = "".join(f"    {_plain(each)},\n" for each in _each(parameters))
        line = f"{name}(\n{names}){returned}"
    return f"```text\n{line}\n```"


def _each(parameters: list[inspect.Parameter]) -> Iterator[str]:
    has_star = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    for number, each in enumerate(parameters):
        if each.kind is each.KEYWORD_ONLY and not has_star:
            has_star = True
            yield "*"
        yield str(each)
        following = parameters[number + 1 : number + 2]
        if each.kind is each.POSITIONAL_ONLY and all(
            after.kind is not each.kind for after in following
        ):
            yield "/"


def _plain(signature: str) -> str:
    """Return a signature without modules of types, addresses and shapes of arrays."""
    names = _MODULES.sub("", _OBJECT.sub("...", signature)).replace("~", "")
    return _ARRAY.sub(r"ndarray[\1]", names)


def _text(docstring: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring, and its sections as lists."""
    begin, *sections = _HEADING.split(docstring)
    yield from _paragraphs(begin)
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        # What follows without an indent is of the whole again.
        of_section, *rest = re.split(r"\n(?=\S)", body.strip("\n"), maxsplit=1)
        of_section = textwrap.dedent(of_section)
        yield f"**{title}**"
        if title in ("Args", "Attributes", "Raises"):
            yield "\n".join(_entry(each) for each in _ENTRY.split(of_section) if each.strip())
        else:
            yield from _paragraphs(of_section)
        for text in rest:
            yield from _paragraphs(text)


def _entry(text: str) -> str:
    name, _, meaning = text.partition(":")
    return f"- `{name}`: {_joined(meaning)}"


def _paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs, and what is indented or a session of Python as code."""
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        if not part.strip():
            continue
        if part.startswith((">>>", "    ")):
            language = "pycon" if ">>>" in part else "python"
            yield f"```{language}\n{textwrap.dedent(part)}\n```"
        elif part.lstrip().startswith("- "):
            yield part
        else:
            yield _joined(part).replace("::", ":")


def _joined(text: str) -> str:
    """Return a paragraph in one line, what Markdown would take for more than text escaped."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [part.replace("<", "\\<").replace("**", r"\*\*") for part in parts[::2]]
    return "`".join(parts)
