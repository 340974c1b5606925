"""Options that several commands share, in groups.

Help texts are short, so that a command's fit on a screen. Defaults stand in them, in brackets:
typer's own take a line each.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import partial, wraps
from pathlib import Path
from secrets import randbelow
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, get_args

import typer

from lade.errors import UserError
from lade.models.settings import Settings

if TYPE_CHECKING:
    from lade.models.loading import LoadedModel
    from ngram_pool import NGramPool

# Options by their panels of the help.
option = partial(typer.Option, show_default=False)
of_model = partial(option, rich_help_panel="Model")
_of_sampling = partial(option, rich_help_panel="Sampling")
of_drafting = partial(option, rich_help_panel="Drafting")

# Metavars of options by the type of their values, unless an option has its own.
_METAVARS: dict[type, str] = {int: "N", float: "T", Path: "FILE", bool: " "}
# Of an option that is a file to read.
IS_FILE: Any = {"exists": True, "dir_okay": False}


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the fields of a command's option groups into its parameters: typer knows no groups.

    Args:
        command: called with keywords; a parameter whose type is a dataclass is made of its fields.
            Defaults are options.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Any, list[str]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        if is_dataclass(group := parameter.annotation):
            fields = inspect.signature(group).parameters  # type: ignore[arg-type]
            groups[parameter.name] = group, [*fields]
            parameters += fields.values()
        else:
            parameters.append(parameter)

    @wraps(command)
    def run(**values: Any) -> None:
        for name, (group, fields) in groups.items():
            values[name] = group(**{field: values.pop(field) for field in fields})
        command(**values)

    for each in parameters:
        kinds = _parts(each.annotation) & _METAVARS.keys()
        each.default.metavar = (
            each.default.metavar or "".join(map(_METAVARS.__getitem__, kinds)) or None
        )
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _parts(annotation: Any) -> set[Any]:
    """Return the types in an annotation, such as `Path` of `list[Path] | None`."""
    return {annotation}.union(*map(_parts, get_args(annotation)))


# --- the model ------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadOptions:
    """Which model to load, and how."""

    model: str | None = of_model(
        None, metavar="ID", help="Hub id, folder or GGUF file [smollm2-135m-instruct]."
    )
    device: str | None = of_model(
        None, metavar="NAME", help="cpu, cuda or cuda:1 [a GPU if present]."
    )
    dtype: str | None = of_model(
        None, metavar="NAME", help="float32, bfloat16 or float16 [as stored]."
    )
    threads: int | None = of_model(None, help="CPU threads [torch's number].")
    trust_remote_code: bool = of_model(
        False, "--trust-remote-code", help="Run the model's own code."
    )

    def load(self) -> "LoadedModel":
        """Load the model."""
        return load_model(**vars(self))


def load_model(model: str | None, **how: Any) -> "LoadedModel":
    """Load a model; torch is imported only now, inside a command."""
    from lade.apps.cli.loading import compiling_beside, tell
    from lade.models.loading import load

    with compiling_beside():
        return load(model, **how, progress=tell)


# --- texts, read before any work --------------------------------------------------------------


def read_prompt(argument: str) -> Any:
    """Return a prompt, read from standard input if the argument is `-`; as `read_typed`."""
    if argument == "-":
        return _decoded(sys.stdin.buffer.read(), "on standard input").replace("\r\n", "\n")
    return read_typed(argument)


def read_typed(typed: Any) -> Any:
    """Return a text given on the command line, or several, or None.

    Raises:
        UserError: one is not UTF-8.
    """
    if isinstance(typed, list):
        return [*map(read_typed, typed)]
    # Bytes that are not UTF-8 arrive as surrogates, which no tokenizer knows.
    return typed and _decoded(typed.encode(errors="surrogateescape"), "as prompt")


def read_prediction(path: Path | None) -> str | None:
    """Return the prediction in a file, without the line break at its end.

    Raises:
        OSError, UserError: the file cannot be read, is not UTF-8, or has no text.
    """
    if path is None:
        return None
    text = _decoded(path.read_bytes(), f"in {path}").replace("\r\n", "\n").removesuffix("\n")
    if not text:
        raise UserError(f"expected a prediction in {path}, got no text")
    return text


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"expected UTF-8 {where}, got byte 0x{data[error.start]:02x} after {error.start} bytes"
        ) from None


def check_text(text: str, *, is_raw: bool = False) -> None:
    """Raise a `UserError` for a prompt that has nothing to say, before a model is loaded."""
    if not (text if is_raw else text.strip()):
        raise UserError("the prompt is empty")


# --- the answer -----------------------------------------------------------------------------

SYSTEM: Any = option(None, metavar="TEXT", help="System prompt.", callback=read_typed)
TEMPERATURE: Any = _of_sampling(0.0, help="Sample at this temperature [0: greedy].")


def length(most: int) -> Any:
    """Return the option of the longest answer, with a default."""
    return option(most, help=f"Longest answer, in tokens [{most}].")


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen.

    Raises:
        UserError: a share of the likeliest tokens is asked for beside greedy decoding.
    """

    temperature: float = TEMPERATURE
    top_p: float = _of_sampling(
        1.0, metavar="P", help="Sample from the likeliest, this share [1: all]."
    )
    top_k: int = _of_sampling(0, help="Sample from the N likeliest tokens [0: all].")
    seed: int | None = _of_sampling(
        None, help="Seed, to get the same text again [a new one, shown]."
    )

    def __post_init__(self) -> None:
        for name, off in (("top_p", 1.0), ("top_k", 0)):
            if self.temperature == 0 and (value := getattr(self, name)) != off:
                raise UserError(
                    f"expected a temperature above 0 with {name}={value}, as greedy decoding has "
                    "no use for it; got temperature 0"
                )

    def settings(self, max_new_tokens: int) -> Settings:
        """Return settings of answers; without a seed, they have a random one, short to type."""
        seed = randbelow(10**6) if self.seed is None else self.seed
        return Settings(max_new_tokens, **{**vars(self), "seed": seed})


@dataclass(frozen=True)
class ChatSamplingOptions(SamplingOptions):
    """How tokens of a chat are chosen: by sampling, as greedy small models end in loops."""

    temperature: float = _of_sampling(0.7, help="Sample at this temperature; 0 is greedy [0.7].")


# --- files, checked before any work ----------------------------------------------------------


def check_writable(path: Path | None) -> Path | None:
    """Raise if a file could not be written at a path later; leave no file behind.

    Raises:
        UserError: its folder does not exist.
        OSError: nothing can be written to it.
    """
    if path is not None:
        if not path.parent.is_dir():
            raise UserError(f"no such folder: {path.parent}")
        with path.open("a") if path.exists() else TemporaryFile(dir=path.parent):
            pass
    return path


def check_pools(paths: list[Path] | None) -> list[Path]:
    """Raise a `ngram_pool.PoolFileError` for a file that is none of a pool."""
    for path in paths or []:
        from ngram_pool.files import check_begin  # imports Numba

        check_begin(path)
    return paths or []


def check_writable_pool(path: Path | None) -> Path | None:
    """Raise as `check_writable`, and for a file that is none of a pool."""
    if check_writable(path) is not None and path is not None and path.exists():
        check_pools([path])
    return path


JSON: Any = option(
    None, help="Also write the results to this file.", dir_okay=False, callback=check_writable
)


# --- drafts ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftOptions:
    """The pools that drafts are taken from."""

    pools: list[Path] | None = of_drafting(
        None,
        "--pool",
        help="Also draft from this pool; may be repeated.",
        callback=check_pools,
        **IS_FILE,
    )
    save_pool: Path | None = of_drafting(
        None,
        help="Draft from this pool, learn into it, save it.",
        dir_okay=False,
        callback=check_writable_pool,
    )

    @contextmanager
    def open_pools(self, loaded: "LoadedModel") -> "Iterator[list[NGramPool]]":
        """Open the pools; at the end, also after an error, save the one of `--save-pool`.

        Yields:
            First the pool that learns, loaded if its file exists, then the read-only pools.
        """
        import lade
        from lade.apps.cli.loading import console

        named: dict[str, Any] = {"tokenizer": loaded.tokenizer, "model": loaded.model}
        path = self.save_pool
        learning = lade.load_pool(path, **named) if path and path.exists() else lade.NGramPool()
        read = dict.fromkeys(each.resolve() for each in self.pools or [])
        if path is not None:
            read.pop(path.resolve(), None)
        layers = [lade.load_pool(each, **named, read_only=True) for each in read]
        try:
            yield [learning, *layers]
        finally:
            if path is not None:
                lade.save_pool(learning, path, **named)
                console.print(f"[dim]{len(learning):,} tokens kept in {path}[/dim]", soft_wrap=True)
