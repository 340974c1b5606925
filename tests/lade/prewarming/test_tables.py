"""Files of tables: none that is damaged or made to do harm raises, takes memory or takes time."""

import json
import os
import random
import struct
import subprocess
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import lade
from lade.prewarming import run as prewarming
from lade.prewarming import tables
from lade.prewarming.run import Prewarmed, PrewarmProgress
from lade.prewarming.tables import (
    Effort,
    StoredTable,
    load_table,
    merge_table,
    path_of_table,
    read_table,
    table_for,
    tables_folder,
    write_table,
)
from lade.probing.profile import profile_of
from ngram_pool import SuccessorTable
from tests.lade.tiny import VOCAB_SIZE, tiny_model

MIB = 2**20


def raw_file(header: Any, content: bytes = b"") -> bytes:
    """Return a file of safetensors with this header, whatever it says."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


def head(dtype: str, shape: list[int], start: int = 0, stop: int = 0) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def without_rows(num_successors: int, description: Any) -> bytes:
    return raw_file(
        {
            "__metadata__": {"lade_table": json.dumps(description)},
            "keys": head("I64", [0]),
            "counts": head("I32", [0]),
            "token_ids": head("I32", [0, num_successors]),
            "costs": head("U16", [0, num_successors]),
        }
    )


def rewrite(written: SimpleNamespace, text: str | None = None, **arrays: Any) -> None:
    """Write the file with other arrays, or another description."""
    text = json.dumps(written.described) if text is None else text
    safetensors.numpy.save_file(written.table.arrays() | arrays, written.path, {"lade_table": text})


def with_effort(**effort: Any) -> Callable[[SimpleNamespace], None]:
    def write(written: SimpleNamespace) -> None:
        described = written.described | {"effort": asdict(written.effort) | effort}
        rewrite(written, json.dumps(described))

    return write


def of_no_rows(num_successors: int) -> Callable[[SimpleNamespace], None]:
    def write(written: SimpleNamespace) -> None:
        written.path.write_bytes(without_rows(num_successors, written.described))

    return write


def of_dtype(name: str, num_bytes: int) -> Callable[[SimpleNamespace], None]:
    """Write two rows of token ids in a dtype that numpy may not have."""

    def write(written: SimpleNamespace) -> None:
        header = {
            "__metadata__": {"lade_table": json.dumps(written.described)},
            "keys": head("I64", [2], 0, 16),
            "counts": head("I32", [2], 16, 24),
            "token_ids": head(name, [2, 8], 24, 24 + num_bytes),
            "costs": head("U16", [2, 8], 24 + num_bytes, 56 + num_bytes),
        }
        written.path.write_bytes(raw_file(header, bytes(56 + num_bytes)))

    return write


def described_as(**changes: Any) -> Callable[[SimpleNamespace], None]:
    return lambda written: rewrite(written, json.dumps(written.described | changes))


def impossible_tokens(written: SimpleNamespace) -> None:
    token_ids = written.table.arrays()["token_ids"].copy()
    token_ids[0, 0] = VOCAB_SIZE
    rewrite(written, token_ids=token_ids)


BAD_FILES: dict[str, Callable[[SimpleNamespace], None]] = {
    "cut": lambda written: written.path.write_bytes(written.path.read_bytes()[:-9]) and None,
    "empty": lambda written: written.path.write_bytes(b"") and None,
    "foreign": lambda written: safetensors.numpy.save_file({"x": np.zeros(3)}, written.path),
    "by a newer lade": described_as(format=3),
    "by another model": described_as(fingerprint="0" * 64),
    "with other fields": described_as(effort={"hours": 3}),
    "with impossible tokens": impossible_tokens,
    "of 2^23 successors": of_no_rows(2**23),
    "of 2^40 successors": of_no_rows(2**40),
    "of no successors": of_no_rows(0),
    "of 65 successors": of_no_rows(65),
    "of float8": of_dtype("F8_E4M3", 16),
    "of float4": of_dtype("F4", 8),
    "of bfloat16": of_dtype("BF16", 32),
    "of complex numbers": of_dtype("C64", 128),
    "nested": lambda written: rewrite(written, "[" * 100_000),
    "nested within bounds": lambda written: rewrite(written, "[" * 16_000),
    "long": lambda written: rewrite(written, json.dumps(written.described) + " " * 2**14),
    "with a long number": lambda written: rewrite(written, "9" * 10_000),
    "of no description": lambda written: rewrite(written, "null"),
    "of an unhashable format": lambda written: rewrite(written, '{"format": {}}'),
    "with an array more": lambda written: rewrite(written, more=np.zeros(3)),
    "with one row less": lambda written: rewrite(written, keys=np.ones(1, np.int64)),
    "of one dimension": lambda written: rewrite(written, token_ids=np.ones(2, np.int32)),
    "with negative keys": lambda written: rewrite(written, keys=np.full(2, -7, np.int64)),
    "with effort in a list": lambda written: rewrite(
        written, json.dumps(written.described | {"effort": [1, 2]})
    ),
    **{
        f"with {name} {value}": with_effort(**{name: value})
        for name, value in [
            ("prefix_token_id", VOCAB_SIZE),
            ("prefix_token_id", -1),
            ("prefix_token_id", "9"),
            ("num_tokens", None),
            ("num_tokens", [3]),
            ("num_tokens", -1),
            ("num_tokens", 2**64),
            ("num_tokens", True),
            ("num_tokens", 0.5),
            ("seconds", float("nan")),
            ("seconds", float("inf")),
            ("seconds", -1.0),
            ("seconds", True),
            ("seconds", "1"),
        ]
    },
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_named_by_prewarm_and_ignored_with_one_warning_by_decoding(
    written: SimpleNamespace, kind: str
) -> None:
    BAD_FILES[kind](written)
    size = written.path.stat().st_size
    tracemalloc.start()
    began = time.monotonic()
    try:
        with pytest.raises(ValueError, match="remove it to begin anew"):
            read_table(written.path, written.model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert table_for(written.model, written.path.parent) is None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert ["does not use its table for LlamaForCausalLM" in str(w.message) for w in caught] == [
        True
    ]
    assert peak < MIB + 10 * size  # it was 6 GiB for a file of 515 bytes
    assert time.monotonic() - began < 5  # it was 31 s
    content = written.path.read_bytes()
    with pytest.raises(ValueError, match="remove it to begin anew") as raised:
        lade.prewarm(written.model, 1, folder=written.path.parent)
    assert str(written.path) in str(raised.value)
    assert written.path.read_bytes() == content


@pytest.mark.parametrize(
    "kind", [kind for kind in BAD_FILES if "of " in kind and "format" not in kind]
)
def test_a_table_read_without_its_model_is_checked_too(written: SimpleNamespace, kind: str) -> None:
    BAD_FILES[kind](written)
    if kind == "of no description":
        assert len(load_table(written.path, VOCAB_SIZE)) == 2  # it needs none
        return
    with pytest.raises(ValueError, match="expected a table that lade prewarm made in"):
        load_table(written.path, VOCAB_SIZE)


def test_a_good_file_is_read_to_its_limits(written: SimpleNamespace) -> None:
    effort = {"prefix_token_id": None, "num_tokens": 2**53}
    with_effort(**effort, seconds=3)(written)
    stored = read_table(written.path, written.model)
    assert asdict(stored.effort) == asdict(written.effort) | effort | {"seconds": 3}
    assert len(stored.table) == 2
    of_no_rows(64)(written)
    assert len(read_table(written.path, written.model).table) == 0


def corrupted(content: bytes, rng: random.Random) -> bytes:
    """Return the file cut, with flipped bits, or with another header."""
    if rng.random() < 0.2:
        return content[: rng.randrange(len(content))]
    if rng.random() < 0.4:
        flipped = bytearray(content)
        for _ in range(rng.choice([1, 1, 2, 8, 64])):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    parts: list[Any] = [header, header["__metadata__"], *header.values()]
    described = json.loads(header["__metadata__"]["lade_table"])
    values: list[Any] = [
        *(0, 1, -1, 2**31, 2**40, 2**63, 2**64, 10**400, 0.5, float("nan"), True, None, "", "F4"),
        *([], {}, [0], [2**40, 0], [0, 2**23], [[]], "I64", "F8_E5M2", "[" * 2000, "1" * 5000),
    ]
    for _ in range(rng.choice([1, 1, 2, 3])):
        if rng.random() < 0.5:
            part = rng.choice([described, described["effort"]])
            if isinstance(part, dict) and part:
                part[rng.choice([*part, "more"])] = rng.choice(values)
            described = described if isinstance(described.get("effort"), dict) else {"effort": {}}
        else:
            part = rng.choice(parts)
            part[rng.choice([*part, "more"])] = rng.choice(values)
    if isinstance(header.get("__metadata__"), dict) and rng.random() < 0.8:
        header["__metadata__"]["lade_table"] = json.dumps(described)
    return raw_file(header, content[8 + length :])


@pytest.mark.exhaustive
def test_no_corruption_raises_anything_else_or_takes_memory(written: SimpleNamespace) -> None:
    content = written.path.read_bytes()
    rng = random.Random(0)
    outcomes = {"read": 0, "refused": 0}
    read_table(written.path, written.model)  # compiles
    tracemalloc.start()
    began = time.monotonic()
    try:
        for _ in range(2000):
            written.path.write_bytes(corrupted(content, rng))
            for read in (
                lambda: read_table(written.path, written.model),
                lambda: load_table(written.path, VOCAB_SIZE),
            ):
                try:
                    read()
                    outcomes["read"] += 1
                except (ValueError, OSError):
                    outcomes["refused"] += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert min(outcomes.values()) > 100, outcomes
    assert peak < 8 * MIB
    assert time.monotonic() - began < 60


def test_whatever_a_table_raises_decoding_goes_on_with_one_warning(
    written: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written.path.parent
    for name in ("fingerprint_of", "read_table", "mesh_of"):
        for error in (MemoryError("no room"), AttributeError("F8"), RuntimeError("no device")):
            with monkeypatch.context() as patch:
                patch.setattr(tables, name, raising(error))
                with pytest.warns(UserWarning, match=f"{type(error).__name__}: {error}") as caught:
                    assert table_for(written.model, folder) is None
                assert len(caught) == 1
    monkeypatch.setattr(tables, "read_table", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        table_for(written.model, folder)


def test_without_platformdirs_there_are_no_tables_and_one_warning(
    written: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "tables_folder", tables_folder)  # not that of all tests
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.warns(UserWarning, match="ModuleNotFoundError.*platformdirs") as caught:
        assert table_for(written.model) is None
    assert len(caught) == 1


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    return fail


def test_a_folder_that_cannot_be_one_has_no_tables(written: SimpleNamespace) -> None:
    for folder in (written.path / "tables", written.path.parent / ("long" * 100)):
        assert table_for(written.model, folder) is None


# --- writing --------------------------------------------------------------------------------


def test_files_of_killed_saves_are_swept_by_the_next_one(written: SimpleNamespace) -> None:
    folder = written.path.parent
    left = folder / f"{written.path.stem}.making-{'0' * 16}"
    other = folder / f"{'0' * 64}.making-0123456789abcdef"
    unrelated = folder / "film.making-of"
    in_the_way = folder / f"{'1' * 64}.making-{'2' * 16}"
    in_the_way.mkdir()
    for path in (left, other, unrelated):
        path.write_bytes(b"half")
    write_table(written.path, written.model, StoredTable(written.table, written.effort))
    assert {*folder.iterdir()} == {written.path, unrelated, in_the_way}


# In a process of its own, which a signal could end.
CUT_IN_PLACE = """
import os, sys
from pathlib import Path
from lade.prewarming.tables import load_table
from ngram_pool import NGramPool

path = Path(sys.argv[1])
table, pool = load_table(path, int(sys.argv[2])), NGramPool()
sequence = pool.open_sequence(table)
contexts = [[last] for _, last in table.contexts().tolist()]

def drafts():
    return [pool.draft(each, 8, sequence=sequence).candidates() for each in contexts]

before = drafts()
assert any(before)
os.truncate(path, 10)
assert drafts() == before
print("drafted")
"""


@pytest.mark.exhaustive
def test_a_table_in_use_goes_on_when_its_file_is_cut_in_place(written: SimpleNamespace) -> None:
    command = [sys.executable, "-c", CUT_IN_PLACE, str(written.path), str(VOCAB_SIZE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "drafted\n"), done.stderr[-3000:]


def test_a_disk_that_is_full_meanwhile_costs_no_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves fail until the last one, after Ctrl-C; then all that was done is in the file."""
    is_full, num_done = True, 0

    def save(path: Path, model: Any, stored: StoredTable) -> None:
        if is_full:
            raise OSError(28, "No space left on device")
        write(path, model, stored)

    def interrupt(step: PrewarmProgress) -> None:
        nonlocal is_full, num_done
        num_done = step.made.num_tokens
        if num_done >= 500:
            is_full = False
            raise KeyboardInterrupt

    write = write_table
    monkeypatch.setattr(tables, "write_table", save)
    monkeypatch.setattr(prewarming, "_SAVE_EVERY_SEC", 0.0)
    model = tiny_model("llama")
    with (
        pytest.warns(UserWarning, match="could not save its table yet.*No space left") as caught,
        pytest.raises(KeyboardInterrupt),
    ):
        lade.prewarm(model, 60, folder=tmp_path, progress=interrupt)
    assert len(caught) == 1
    (path,) = tmp_path.glob("*.safetensors")
    assert read_table(path, model).effort.num_tokens == num_done >= 500


def test_a_disk_that_is_full_in_the_end_is_an_error_and_leaves_the_old_table(
    written: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = written.path.read_bytes()
    monkeypatch.setattr(os, "fsync", raising(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        lade.prewarm(written.model, 0.1, folder=written.path.parent)
    lock = written.path.with_suffix(".lock")
    assert {*written.path.parent.iterdir()} == {written.path, lock}
    assert written.path.read_bytes() == content


# --- adding by several processes ------------------------------------------------------------


def added(*contexts: tuple[int, int], prob: float = 0.5, **effort: Any) -> StoredTable:
    """A table that has learned of each of these contexts that its last token repeats."""
    table = SuccessorTable(2**12)
    table.put([*contexts], [[last] for _, last in contexts], [[prob] for _ in contexts])
    return StoredTable(table, Effort(**effort))


def test_what_is_added_joins_what_is_in_the_file(written: SimpleNamespace) -> None:
    """A context that both know is averaged: the file's has (6: 0.5, 7: 0.25) behind token 5."""
    new = added((-1, 5), (1, 2), prob=1.0, prefix_token_id=3, num_tokens=30, seconds=0.5)
    merged = merge_table(written.path, written.model, new)
    on_disk = read_table(written.path, written.model)
    assert on_disk.effort == merged.effort == Effort(9, 100, 2.0)  # its own prefix, not 3
    for table in (merged.table, on_disk.table):
        assert {*map(tuple, table.contexts().tolist())} == {(-1, 5), (4, 5), (1, 2)}
        token_ids, probs = table.get(-1, 5) or ((), ())
        assert [*token_ids] == [5, 6, 7]
        np.testing.assert_allclose(probs, [0.5, 0.25, 0.125], rtol=2e-3)
    assert len(new.table) == 2  # as it was


def test_what_is_added_is_averaged_and_a_run_goes_on_from_there(tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = path_of_table(model, tmp_path)
    for prob in (0.75, 0.25):
        merge_table(path, model, added((-1, 5), (4, 5), prob=prob))
    table = table_for(model, tmp_path)
    assert table is not None
    token_ids, probs = table.get(4, 5) or ((), ())
    assert [*token_ids] == [5]
    np.testing.assert_allclose(probs, [0.5], rtol=2e-3)
    made = lade.prewarm(model, 0.2, folder=tmp_path)
    assert made.num_contexts > len(table) == 2


def test_a_table_that_was_read_is_read_again_once_it_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "table_for", partial(table_for, folder=tmp_path))
    model = tiny_model("llama")
    assert tables.prewarmed_table_of(model, profile_of(model)) is None
    merge_table(path_of_table(model, tmp_path), model, added((4, 5)))
    assert tables.prewarmed_table_of(model, profile_of(model)) is None  # read already
    tables.forget_prewarmed_table(model)
    table = tables.prewarmed_table_of(model, profile_of(model))
    assert table is not None
    assert table.contexts().tolist() == [[4, 5]]


def test_what_cannot_be_of_the_model_is_not_added(tmp_path: Path) -> None:
    model = tiny_model("llama")
    table = SuccessorTable(64)
    table.put([[4, 5]], [[VOCAB_SIZE]], [[0.5]])
    with pytest.raises(
        ValueError, match=f"expected token ids below {VOCAB_SIZE}, got {VOCAB_SIZE}"
    ):
        merge_table(path_of_table(model, tmp_path), model, StoredTable(table, Effort()))
    assert [*tmp_path.iterdir()] == []


def test_a_file_never_gets_more_contexts_than_it_may(tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = path_of_table(model, tmp_path)
    for start in range(0, 60, 20):
        contexts = [(previous, last) for previous in range(20) for last in range(start, start + 20)]
        merged = merge_table(path, model, added(*contexts), max_contexts=256)
        assert len(merged.table) <= 256
    assert len(read_table(path, model).table) > 128


ADDING = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from lade.prewarming.tables import Effort, StoredTable, merge_table, path_of_table
from ngram_pool import SuccessorTable
from tests.lade.tiny import tiny_model
model, folder, number = tiny_model("llama"), Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
for last in range(int(sys.argv[3])):
    table = SuccessorTable(64)
    table.put([[number, last]], [[last]], [[0.5]])
    added = StoredTable(table, Effort(num_tokens=1))
    merge_table(path_of_table(model, folder), model, added)
    print(last, flush=True)
"""


def adding(folder: Path, number: int, times: int) -> subprocess.Popen[str]:
    """Start a process that adds to the table of a tiny model, so many times."""
    root = Path(__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, "-c", ADDING, str(folder), str(number), str(times)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


@pytest.mark.exhaustive
def test_processes_that_add_at_once_lose_nothing(tmp_path: Path) -> None:
    """Every file that is read meanwhile is whole, and the last one holds what each has added."""
    model = tiny_model("llama")
    path = path_of_table(model, tmp_path)
    processes = [adding(tmp_path, number, 20) for number in range(2)]
    num_read = 0
    while any(process.poll() is None for process in processes):
        if path.exists():
            num_read += len(read_table(path, model).table) > 0
        time.sleep(0.005)
    assert [process.communicate()[0].split()[-1] for process in processes] == ["19"] * 2
    assert num_read > 3
    stored = read_table(path, model)
    expected = {(number, last) for number in range(2) for last in range(20)}
    assert {*map(tuple, stored.table.contexts().tolist())} == expected
    assert stored.effort.num_tokens == 40


@pytest.mark.exhaustive
def test_a_process_that_is_killed_while_it_adds_holds_up_no_other(tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = path_of_table(model, tmp_path)
    with adding(tmp_path, 1, 10**6) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "3":
            assert process.poll() is None
        process.kill()
    began = time.monotonic()
    merge_table(path, model, added((7, 7)))
    assert time.monotonic() - began < 10  # it does not wait for the dead
    contexts = {*map(tuple, read_table(path, model).table.contexts().tolist())}
    assert contexts >= {(7, 7), *((1, last) for last in range(4))}


def test_two_runs_at_once_keep_the_work_of_both(tmp_path: Path) -> None:
    """The second one begins, ends and saves in the middle of the first."""
    model, other = tiny_model("llama"), tiny_model("llama")
    outer: list[Prewarmed] = []
    inner: list[Prewarmed] = []

    def interpose(step: PrewarmProgress) -> None:
        if not inner and step.made.num_tokens > 0:
            outer.append(step.made)
            inner.append(lade.prewarm(other, 0.2, folder=tmp_path))

    made = lade.prewarm(model, 1.0, folder=tmp_path, progress=interpose)
    stored = read_table(made.path, model)
    assert stored.effort.num_tokens == made.num_tokens
    assert stored.effort.seconds == pytest.approx(made.seconds)
    # On a slow machine, the second one takes what was left of the time of the first.
    (before,), (meanwhile,) = outer, inner
    assert made.num_tokens >= before.num_tokens + meanwhile.num_tokens > before.num_tokens > 0
    assert made.seconds >= before.seconds + meanwhile.seconds > before.seconds > 0
