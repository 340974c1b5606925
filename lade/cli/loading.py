"""Load models, with progress and in one line why that failed, and open pools to draft from."""

import json
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

import lade
from lade.errors import LadeError, UserError, in_one_line
from lade.garbage import without_collection
from lade.models.embedded import DEFAULT_MODEL, EMBEDDED_MODELS, embedded_model
from lade.models.loading import LoadedModel, check_reachable, find_model, load

if TYPE_CHECKING:
    from ngram_pool import NGramPool

# Progress and notes go to standard error; standard output is for results.
console = Console(stderr=True, highlight=False)

_JSON_FILES = ("*config.json", "*token*.json", "*vocab*.json", "*.index.json")


def note(text: str) -> None:
    """Print something that the user should know but that is no error."""
    console.print(f"note: {text}", markup=False, soft_wrap=True)


def load_with_progress(
    model: str | None,
    device: str | None,
    dtype: str | None,
    threads: int | None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model, showing progress, with a bar for a download.

    Raises:
        UserError: it cannot be loaded; the message says why in one line.
    """
    name = find_model(model)
    console.print("[dim]Loading torch and transformers …[/dim]")  # which is silent for seconds
    check_reachable(name)
    with without_collection():
        import torch
        from transformers.utils import logging

        import lade.hf.api  # which all that load a model call  # noqa: F401

    if threads is not None:
        torch.set_num_threads(threads)
    logging.disable_progress_bar()  # of loading weights, which takes a second
    with _saying_why(name):
        loaded = load(
            name, device=device, dtype=dtype, trust_remote_code=trust_remote_code, progress=tell
        )
    _tell_of_compiling("lade.drafting._kernels")  # the last that a first answer compiles
    return loaded


def load_beside(loaded: LoadedModel, name: str, trust_remote_code: bool) -> LoadedModel:
    """Load another model where one is, in the same number format."""
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    return load_with_progress(name, str(loaded.model.device), dtype, None, trust_remote_code)


def load_tokenizer(model: str | None, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a model alone, showing progress."""
    name = find_model(model)
    check_reachable(name)
    fetch_with_progress(name)
    chosen = DEFAULT_MODEL if name is None else name
    source = str(embedded_model(chosen)) if chosen in EMBEDDED_MODELS else chosen
    console.print(f"[dim]Loading the tokenizer of {chosen} …[/dim]")
    from transformers import AutoTokenizer

    _tell_of_compiling("ngram_pool._kernels")

    with _saying_why(chosen, f"the tokenizer of {chosen} could not be loaded: "):
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)


def _tell_of_compiling(module: str) -> None:
    """Say that kernels are compiled, where none of a module are kept."""
    from ngram_pool.compiling import cache_folder

    folder = cache_folder(import_module(module))
    if folder is None or not any(folder.glob("*.nbi")):
        console.print("[dim]The first run compiles kernels, for up to a minute …[/dim]")


@contextmanager
def _saying_why(name: str | None, what: str = "") -> Iterator[None]:
    """Raise a `ValueError` with a reason for what loading a name raises.

    An unknown reason is the error itself, after `what` or, without it, as it was raised.
    """
    try:
        yield
    except Exception as error:  # readers of damaged files may raise anything
        if isinstance(error, LadeError) and error.__cause__ is None:
            raise  # it says all there is
        reason = None if name is None else _why_not_loaded(name, error)
        if reason is None and not what:
            raise
        raise UserError(f"{what}{reason or in_one_line(error)}") from error


def fetch_with_progress(model: str | None) -> None:
    """Fetch the model if it is an embedded one and missing; load nothing."""
    name = DEFAULT_MODEL if model is None else model
    if name in EMBEDDED_MODELS:
        embedded_model(name, progress=tell)


def _why_not_loaded(name: str, error: Exception) -> str | None:
    """Return what is wrong with a model, or None where the original error says it best."""
    # transformers' message for any other kind of model; it goes on to list all causal LMs.
    other_kind = re.search(r"configuration class <class '[\w.]*\.(\w+)'> for this kind", str(error))
    if other_kind is not None:
        return f"{name} is no causal LM, it has a {other_kind[1]}; lade decodes causal LMs"
    if "trust_remote_code" in str(error):
        return f"{name} comes with code of its own; --trust-remote-code lets it run"
    folder = _folder_of(name)
    if folder is None:
        return None
    damaged = next((path for path in sorted(folder.iterdir()) if _is_damaged(path)), None)
    if damaged is not None:
        return (
            f"the file {damaged.name} in {folder} is incomplete or damaged; fetch or save it again"
        )
    if not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
        return f"the folder {folder} has no model (config.json)"
    return None


def _folder_of(name: str) -> Path | None:
    """Return the folder of a model's files, its own or that in the Hub cache; None without one."""
    from huggingface_hub import try_to_load_from_cache

    if Path(name).is_dir():
        return Path(name)
    cached = try_to_load_from_cache(name, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def _is_damaged(path: Path) -> bool:
    """Return whether a checkpoint file cannot be read in its format."""
    from safetensors import SafetensorError, safe_open

    try:
        if any(path.match(pattern) for pattern in _JSON_FILES):
            json.loads(path.read_bytes())
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                pass
        elif path.match("pytorch_model*.bin"):
            return not zipfile.is_zipfile(path)
    except (ValueError, SafetensorError):
        return True
    return False


def tell(what: str) -> None:
    """Say what is being done."""
    console.print(f"{what} …", style="dim", markup=False, soft_wrap=True)


def bar(*columns: ProgressColumn) -> Progress:
    """Return a progress bar, gone at its end: what is done, how much of it, and more columns."""
    shown = (TextColumn("{task.description}"), BarColumn(), *columns)
    return Progress(*shown, console=console, transient=True)


@contextmanager
def open_pools(
    loaded: LoadedModel, paths: Sequence[Path], save_path: Path | None
) -> "Iterator[list[NGramPool]]":
    """Open the pools of `--pool` and `--save-pool`; save the latter at the end, however that comes.

    Yields:
        The one that learns first, loaded if its file exists, then those that are read.
    """
    from ngram_pool import NGramPool

    model, tokenizer = loaded.model, loaded.tokenizer
    own = NGramPool()
    if save_path is not None and save_path.exists():
        own = lade.load_pool(save_path, tokenizer=tokenizer, model=model)
    kept = None if save_path is None else save_path.resolve()
    layers = [
        lade.load_pool(path, tokenizer=tokenizer, model=model, read_only=True)
        for path in dict.fromkeys(path.resolve() for path in paths)
        if path != kept
    ]
    try:
        yield [own, *layers]
    finally:
        if save_path is not None:
            lade.save_pool(own, save_path, tokenizer=tokenizer, model=model)
            console.print(f"[dim]{len(own):,} tokens kept in {save_path}[/dim]", soft_wrap=True)
