"""`lade pool build`: which files it reads, and what of them."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ngram_pool import NGramPool
from tests.lade.apps.cli.command import run
from tests.lade.apps.cli.conftest import TEMPLATE
from tests.lade.tiny import byte_tokenizer

ASKED = {"role": "user", "content": "Why?"}
ANSWERED = {"role": "assistant", "content": "Because."}
CHAT = "<u>Why?<a>Because."


def texts(path: Path) -> list[str]:
    """Return what a pool on disk holds."""
    pool = NGramPool.load(path, read_only=True)
    return [byte_tokenizer().decode(ids.tolist()) for ids in pool.texts()]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of three files, one of them binary."""
    path = tmp_path / "source"
    path.mkdir()
    (path / "a.py").write_text("def a(): return 1\n" * 3)
    (path / "b.txt").write_text("Grüße aus Wien\n")
    (path / "c.png").write_bytes(b"\x89PNG\0\0")
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "code.pool"


# --- which files --------------------------------------------------------------------------------


def test_a_pool_is_built_from_a_folder(folder: str, source: Path, out: Path) -> None:
    done = run("pool", "build", source, "--out", out, "--model", folder)
    assert done.code == 0
    assert "71 tokens of 2 files" in done.out
    assert "left out: no text in UTF-8: 1" in done.err
    assert texts(out) == ["def a(): return 1\n" * 3, "Grüße aus Wien\n"]
    assert out.stat().st_mode & 0o077 == 0
    assert str(source) not in out.read_bytes().decode("latin-1")


def test_a_pool_that_exists_is_not_written_over(folder: str, source: Path, out: Path) -> None:
    command = ["pool", "build", source, "--out", out, "--model", folder]
    run(*command)
    before = out.read_bytes()
    assert "already exists" in run(*command).error_line
    assert out.read_bytes() == before


def test_folders_are_read_without_what_is_hidden_or_made(
    folder: str, out: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    names = ("b.py", "a/c.txt", ".git/config", ".venv/x.py", "a/.env", "env/pyvenv.cfg")
    for name in (*names, "env/y.py", "__pycache__/z.py", "node_modules/w.js"):
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_text(name)
    os.symlink(root / "a", root / "linked")
    os.symlink(root / "b.py", root / "d.py")
    os.mkfifo(root / "pipe")  # to open it would wait for ever
    done = run("pool", "build", root, root / "b.py", "--out", out, "--model", folder)
    assert texts(out) == ["b.py", "a/c.txt"]
    said = "left out: hidden, made by tools, or links: 9"
    assert said in done.err.replace("\n", " ")
    out.unlink()
    run("pool", "build", root / "a" / ".env", "--out", out, "--model", folder)
    assert texts(out) == ["a/.env"]  # named


def test_what_is_no_text_is_left_out_and_told(folder: str, out: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for name, content in {
        "a.bin": b"MZ\0\x01",
        "b.txt": "Grüße".encode("latin-1"),
        "c.gz": gzip.compress(b"text"),
        "d.txt": b"",
    }.items():
        (root / name).write_bytes(content)
    command = ["pool", "build", root, "--out", out, "--model", folder]
    done = run(*command)
    assert "expected text for code.pool in the files, got none" in done.error_line
    assert "left out: no text in UTF-8: 3" in done.err
    assert not out.exists()
    (root / "f.jsonl").write_bytes(b'{"text": "text"}\n' * 1000 + "ü".encode("latin-1"))
    assert "no text in UTF-8: 4" in run(*command).err
    assert {*texts(out)} == {"text"}  # what could be read


# --- which text ---------------------------------------------------------------------------------


def built(tmp_path: Path, model: Any, name: str, content: str | bytes) -> list[str]:
    """Return the texts that a file gives."""
    path, out = tmp_path / name, tmp_path / "built.pool"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    out.unlink(missing_ok=True)
    done = run("pool", "build", path, "--out", out, "--model", model)
    assert done.code == 0, done.err
    return texts(out)


def test_text_is_whole_however_long(folder: str, tmp_path: Path) -> None:
    text = "".join(f"line {i} with ä\n" for i in range(5000)) + "x" * 50_000
    assert built(tmp_path, folder, "long.py", text) == [text]
    marked = b"\xef\xbb\xbfwith a mark\r\nand more"
    assert built(tmp_path, folder, "a.txt", marked) == ["with a mark\nand more"]


def test_lines_of_json_are_chats_texts_or_themselves(templated: Any, tmp_path: Path) -> None:
    model = templated(
        "{% if messages[0].role == 'assistant' %}{{ raise_exception('') }}{% endif %}" + TEMPLATE
    )
    chat = {"messages": [ASKED, ANSWERED]}
    lines: list[Any] = [chat, {"text": "a text"}, {"messages": [ANSWERED, ASKED]}]
    lines += [{"level": "info"}, {"messages": [{"role": "user"}]}, [1, 2]]
    content = "\n".join([*map(json.dumps, lines), '{"half": ', "[" * 20_000, json.dumps(chat)])
    rest = content.splitlines(keepends=True)[3:-1]
    expected = [CHAT, "a text", "Because.\n\nWhy?", *rest, CHAT]
    for name in ("a.jsonl", "a.NDJSON"):
        assert built(tmp_path, model, name, content) == expected
    assert built(tmp_path, model, "a.json", json.dumps(chat)) == [json.dumps(chat)]


# --- how far ------------------------------------------------------------------------------------


def test_a_full_pool_holds_the_newest_and_says_so(folder: str, source: Path, out: Path) -> None:
    command = ["pool", "build", source, "--out", out, "--model", folder]
    done = run(*command, "--capacity-tokens", "20")
    assert "the oldest 51 tokens were forgotten" in done.err
    assert "a larger --capacity-tokens holds all" in done.err.replace("\n", " ")
    assert "".join(texts(out)).endswith("Grüße aus Wien\n")
