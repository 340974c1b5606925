"""Load models with progress; the messages of commands beside their results."""

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

if TYPE_CHECKING:
    from lade.models.loading import LoadedModel

# Progress and notes go to standard error; standard output is for results.
console = Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """Print something that the user should know but that is no error."""
    console.print(f"note: {text}", markup=False, soft_wrap=True)


def tell(what: str) -> None:
    """Print what is being done."""
    console.print(f"{what} …", style="dim", markup=False, soft_wrap=True)


def bar(*columns: ProgressColumn) -> Progress:
    """Return a progress bar that disappears at its end: a task, its share, and more columns."""
    shown = (TextColumn("{task.description}"), BarColumn(), *columns)
    return Progress(*shown, console=console, transient=True)


def load_with_progress(model: str | None, **options: Any) -> "LoadedModel":
    """Load a model as `lade.models.load` does, showing progress."""
    from lade.models.loading import load

    return load(model, progress=tell, **options)


def check(loaded: "LoadedModel") -> None:
    """Do the one-time work of a model now, so that it does not count for the first answer."""
    from lade.prewarming.warming import warm_up

    tell("Checking how the model verifies drafts")
    warm_up(loaded.model)


def load_tokenizer(model: str | None, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a model alone, showing progress."""
    from lade.models.loading import load_tokenizer as load

    tell("Loading the tokenizer")
    return load(model, trust_remote_code=trust_remote_code, progress=tell)
