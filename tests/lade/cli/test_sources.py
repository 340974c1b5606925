"""What pools are built from: which files are read, and what text is found in them."""

import gzip
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lade.cli.chats import Message, chat_of, transcript_of
from lade.cli.sources import PIECE, TextPiece, UnreadableError, find_files, opened, pieces_of

ASKED = {"role": "user", "content": "Why?"}
ANSWERED = {"role": "assistant", "content": "Because."}


def render(messages: list[Message]) -> str:
    return "|".join(f"{message['role']}:{message['content']}" for message in messages)


def read(path: Path) -> list[TextPiece]:
    with opened(path) as (_, content):
        return [*pieces_of(path, content, render)]


def texts(path: Path) -> list[str]:
    found: list[str] = []
    for piece in read(path):
        if piece.begins:
            found.append("")
        found[-1] += piece.text
    return found


# --- files ----------------------------------------------------------------------------------


def test_folders_are_read_without_what_is_hidden_or_made(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.txt", ".git/config", ".venv/x.py", "a/.env", "env/pyvenv.cfg"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("text")
    for name in ("env/y.py", "__pycache__/z.py", "node_modules/w.js", "own.pool"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("text")
    os.symlink(tmp_path / "a", tmp_path / "linked")
    os.symlink(tmp_path / "b.py", tmp_path / "d.py")
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for ever
    found = find_files([tmp_path, tmp_path / "b.py"], excluded=[tmp_path / "own.pool"])
    assert [path.relative_to(tmp_path.resolve()).as_posix() for path in found.files] == [
        "b.py",
        "a/c.txt",
    ]
    assert found.left_out == {
        "folders, hidden or made by tools": 6,
        "links and devices": 2,
        "hidden files": 1,
    }
    named = find_files([tmp_path / "a" / ".env", tmp_path / ".git"])
    assert [path.name for path in named.files] == [".env", "config"]


def test_text_is_cut_at_ends_of_lines_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    text = "".join(f"line {i} with ä\n" for i in range(5000)) + "x" * (3 * PIECE)
    path.write_text(text, encoding="utf-8")
    pieces = read(path)
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert max(len(piece.text) for piece in pieces) <= 2 * PIECE
    assert all(a.text.endswith("\n") for a, b in pairwise(pieces) if "x" * 9 not in a.text)
    path.write_bytes(b"\xef\xbb\xbfwith a mark\r\nand more")
    assert texts(path) == ["with a mark\nand more"]
    path.write_bytes(b"")
    assert read(path) == []


def test_gzip_is_read_as_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl.GZ"
    path.write_bytes(gzip.compress(json.dumps({"messages": [ASKED, ANSWERED]}).encode()))
    assert texts(path) == ["user:Why?|assistant:Because."]


# The time of each gzip is fixed: it is part of the test's name, which all workers must share.
@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.bin", b"MZ\0\x01", "binary"),
        ("a.txt", "Grüße".encode("utf-16"), "binary"),
        ("a.txt", "Grüße".encode("latin-1"), "not UTF-8"),
        ("a.gz", b"no gzip", "damaged gzip"),
        ("a.gz", gzip.compress(b"text" * 1000, mtime=0)[:-9], "damaged gzip"),
        ("a.gz", gzip.compress(b"\0" * 100, mtime=0), "binary"),
        ("a.gz", gzip.compress(b"t" * 100, mtime=0)[:20] + b"\xff" * 30, "damaged gzip"),
    ],
)
def test_what_is_no_text_says_why(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UnreadableError, match=f"^{why}$"):
        read(path)


def test_json_that_is_too_large_to_hold_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lade.cli.sources._MAX_JSON", 2**20)
    for name in ("a.json", "a.jsonl"):
        path = tmp_path / name
        path.write_text("[" + "1," * 2**20 + "1]")
        with pytest.raises(UnreadableError, match="more than 1 MB"):
            read(path)


def test_lines_of_json_are_chats_texts_or_themselves(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines: list[Any] = [
        {"messages": [ASKED, ANSWERED]},
        {"text": "a text"},
        "another",
        {"level": "info"},
        [1, 2],
    ]
    broken = '{"half": '
    path.write_text("\n".join([*map(json.dumps, lines), broken, json.dumps(lines[0])]))
    assert texts(path) == [
        "user:Why?|assistant:Because.",
        "a text",
        "another",
        '{"level": "info"}\n[1, 2]\n{"half": \n',
        "user:Why?|assistant:Because.",
    ]
    path.write_text("".join(f'{{"level": "info", "number": {i}}}\n' for i in range(3000)))
    assert texts(path) == [path.read_text()]
    assert len(read(path)) < 10  # not a piece for every line


def test_json_is_chats_or_text(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"conversations": [{"from": "human", "value": "Hi"}]}, {"a": 1}]))
    assert texts(path) == ["user:Hi", '{"a": 1}']
    path.write_text('{\n  "name": "package"\n}\n')
    assert texts(path) == [path.read_text()]
    path.write_text("{ no json")
    assert texts(path) == ["{ no json"]
    path.write_text("[" * 100_000)
    assert texts(path) == [path.read_text()]


# --- chats ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        {"messages": [ASKED, ANSWERED]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}, ANSWERED]},
        {
            "conversations": [
                {"from": "human", "value": "Why?"},
                {"from": "gpt", "value": "Because."},
            ]
        },
        {"turns": [{"role": "user", "content": "Why?"}, ANSWERED]},
        {"prompt": "Why?", "response": "Because."},
        {"prompt": [ASKED], "completion": [ANSWERED]},
        {"question": "Why?", "answer": "Because.", "id": 3},
        {"instruction": "Why?", "input": "", "output": "Because."},
    ],
)
def test_chats_have_many_shapes(entry: dict[str, Any]) -> None:
    assert chat_of(entry) == [ASKED, ANSWERED]


def test_turns_may_be_texts_of_the_user() -> None:
    assert chat_of({"turns": ["Why?", "And?"]}) == [ASKED, {"role": "user", "content": "And?"}]
    chat = chat_of({"instruction": "Sum up.", "input": "A text.", "output": "Text."})
    assert chat is not None
    assert chat[0]["content"] == "Sum up.\n\nA text."


@pytest.mark.parametrize(
    "entry",
    [
        *(None, 1, "text", [], {}, {"prompt": "Why?"}, {"messages": []}, {"messages": [1]}),
        {"messages": [{"role": "narrator", "content": "x"}]},
        {"messages": [{"role": "user", "content": None}]},
    ],
)
def test_all_else_is_no_chat(entry: Any) -> None:
    assert chat_of(entry) is None


@pytest.mark.parametrize(
    "text",
    [
        "User: Why?\nAssistant: Because.\n",
        "\n**Human:** Why?\n\n**AI**: Because.",
        "## user:\nWhy?\n\n## model:\nBecause.",
    ],
)
def test_transcripts_begin_each_turn_with_who_speaks(text: str) -> None:
    assert transcript_of(text) == [ASKED, ANSWERED]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Notes\nUser: Why?\nAssistant: Because.",
        "User: a\nUser: b",
        "usera: x",
        "Model: a new car",
    ],
)
def test_other_texts_are_no_transcripts(text: str, tmp_path: Path) -> None:
    assert transcript_of(text) is None
    path = tmp_path / "a.txt"
    path.write_text(text)
    assert texts(path) == ([text] if text else [])


def test_a_transcript_in_a_file_is_a_chat(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("User: Why?\nAssistant: Because.\n")
    assert texts(path) == ["user:Why?|assistant:Because."]
