"""Files of pools: what they keep, what is refused, and that no accident costs a pool."""

import hashlib
import json
import os
import random
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from ngram_pool import (
    NewerPoolFileError,
    NGramPool,
    PoolFileError,
    files,
    writing,
)
from tests.grids import thinned
from tests.ngram_pool.checking import check_pool
from tests.ngram_pool.test_copies import KNOWN, used
from tests.ngram_pool.test_pool import as_tuple, noisy_text

TEXT = noisy_text(900, alphabet=12)


def used_pool(capacity: int = 500, max_ngram_size: int = 4, num_tokens: int = 900) -> NGramPool:
    pool = NGramPool(capacity, max_ngram_size, seed=7)
    sequence = pool.open_sequence()
    for start in range(0, num_tokens, 10):  # interleaved
        pool.observe(TEXT[start : start + 5], sequence)
        pool.observe(TEXT[start + 5 : min(start + 10, num_tokens)], is_answer=True)
    pool.harvest(*KNOWN)
    pool.tokenizer, pool.model = "tokenizer A", 'model "A"'
    return pool


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "my.pool"


def arrays_of(pool: NGramPool) -> dict[str, list[Any]]:
    """What a file has of a pool."""
    arrays = pool._stored().arrays
    return {name: arrays[name].tolist() for name in files.ARRAYS}


def everything_said_by(pool: NGramPool) -> list[Any]:
    contexts = [TEXT[end - 4 : end] for end in range(4, 200, 9)]
    drafts: list[Any] = [as_tuple(pool.draft(context, 12, sequence=0)) for context in contexts]
    sampled = pool.sample(TEXT[:4], 12, np.random.default_rng(0), sequence=0)
    return [*drafts, sampled.token_ids.tolist(), sampled.probs.tolist(), pool.unigrams()]


# --- what is kept ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", thinned([0, 1, 300, 900], 0, 300))
@pytest.mark.parametrize(("capacity", "max_ngram_size"), [(1, 1), (500, 4), (10_000, 9)])
def test_a_loaded_pool_goes_on_like_the_saved_one(
    path: Path, capacity: int, max_ngram_size: int, num_tokens: int
) -> None:
    pool = used_pool(capacity, max_ngram_size, num_tokens)
    pool.save(path)
    loaded = NGramPool.load(path)
    check_pool(loaded)
    assert (loaded.capacity_tokens, loaded.max_ngram_size) == (capacity, max_ngram_size)
    assert (loaded.tokenizer, loaded.model) == ("tokenizer A", 'model "A"')
    assert (len(loaded), loaded.num_open_sequences) == (len(pool), 0)
    assert arrays_of(loaded) == arrays_of(pool)
    for _ in range(2):
        assert everything_said_by(loaded) == everything_said_by(pool)
        for each in (pool, loaded):
            each.observe(TEXT[50:90], is_answer=True)
            each.harvest([[-1, t] for t in range(40)], [[t] for t in range(40)], [[0.9]] * 40)
            check_pool(each)


def test_a_file_is_for_its_owner_alone_and_its_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "my.pool"
    used_pool().save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    used_pool().save(str(path))
    assert [*path.parent.iterdir()] == [path]


def test_a_pool_in_use_is_saved_whole(path: Path) -> None:
    pool = NGramPool(2000)
    with used(pool):
        for _ in range(10):
            pool.save(path)
            check_pool(NGramPool.load(path))


# --- whose it is ----------------------------------------------------------------------------


def test_another_tokenizers_pool_is_refused_by_name(path: Path) -> None:
    used_pool().save(path)
    for tokenizer in ("", "tokenizer A"):
        assert NGramPool.load(path, tokenizer=tokenizer).tokenizer == "tokenizer A"
    expected = "expected text of the tokenizer 'B', got text of 'tokenizer A'"
    with pytest.raises(PoolFileError, match=expected):
        NGramPool.load(path, tokenizer="B")


def test_what_another_model_found_likely_is_left_out_and_said(path: Path) -> None:
    pool = used_pool()
    pool.save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in ("", 'model "A"'):
            loaded = NGramPool.load(path, model=model)
            assert loaded.model == 'model "A"'
            assert arrays_of(loaded) == arrays_of(pool)
    with pytest.warns(UserWarning, match="they are of the model 'model \"A\"', not 'B'; the text"):
        loaded = NGramPool.load(path, model="B")
    assert loaded.model == "B"
    check_pool(loaded)
    found, fresh, saved = arrays_of(loaded), arrays_of(NGramPool(500, 4)), arrays_of(pool)
    for name in found:
        is_of_text = name in ("text", "links", "heads", "sequence")
        assert found[name] == (saved if is_of_text else fresh)[name]


# --- damage ---------------------------------------------------------------------------------

Described = dict[str, Any]
Arrays = dict[str, Any]


def forged(content: bytes, change: Callable[[Described, Arrays], None]) -> bytes:
    """Change a file so that its digest fits again."""
    size = 8 + int.from_bytes(content[:8], "little")
    described = json.loads(json.loads(content[8:size])["__metadata__"]["ngram_pool"])
    arrays = safetensors.numpy.load(content)
    change(described, arrays)
    text = json.dumps(described, separators=(",", ":"))
    return sealed(safetensors.numpy.save(arrays, {"ngram_pool": text}))


def sealed(content: bytes) -> bytes:
    """Put a digest that fits in its place, if there is one."""
    begin, mark, after = content.partition(b'\\"sha256\\":\\"')
    digest = hashlib.sha256(begin + mark + after[64:]).hexdigest().encode()
    return begin + mark + digest + after[64:] if mark else content


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("pool") / "my.pool"
    used_pool().save(path)
    return path.read_bytes()


def with_header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


FOREIGN = {
    "nothing": b"",
    "text": b"To be, or not to be, that is the question" * 9,
    "zip": b"PK\x03\x04" + bytes(1000),
    "a long header": (2**60).to_bytes(8, "little") + bytes(2**20),
    "a table of an older version": with_header('{"__metadata__":{"lade_table":"{}"}}'),
    "its name alone": with_header('{"__metadata__":{"ngram_pool":"{}"}}'),
    "another's metadata": safetensors.numpy.save({"text": np.zeros(3)}, {"format": "pt"}),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files_are_refused(path: Path, kind: str) -> None:
    path.write_bytes(FOREIGN[kind])
    with pytest.raises(PoolFileError, match=f"^{path}: it is not a pool file"):
        NGramPool.load(path)


def test_files_of_older_versions_are_refused_with_what_to_do(content: bytes, path: Path) -> None:
    first = '{"__metadata__":{"format":"ngram_pool","version":"2","crc32.text":"0"}}'
    # Of the version before this one, whole but for weights of another shape.
    narrow = forged(content, exchange("weights", np.zeros((21, 13))))
    before = forged(narrow, put("version", files._VERSION - 1))
    for older in (with_header(first), before):
        path.write_bytes(older)
        for read in (NGramPool.load, files.check_begin):
            with pytest.raises(PoolFileError, match="of an older version; make it anew") as raised:
                read(path)
            assert not isinstance(raised.value, NewerPoolFileError)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        NGramPool.load(tmp_path / "none.pool")
    with pytest.raises(IsADirectoryError):
        NGramPool.load(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", tmp_path / "pipe"):
        with pytest.raises(PoolFileError, match="expected a file"):
            NGramPool.load(path)


def corrupted(content: bytes, rng: random.Random) -> bytes:
    """Damage a file as disks, copies and transfers do, half of the time in its small header."""
    data = bytearray(content)
    end = rng.choice([len(data), 8 + int.from_bytes(data[:8], "little")])
    at, length = rng.randrange(end), rng.choice([1, 8, 512])
    kind, other = rng.randrange(5), rng.randrange(len(data))
    if kind == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif kind < 4:  # noise, zeros, or a block in another's place
        size = len(data[at : at + length])
        data[at : at + size] = (rng.randbytes(size), bytes(size), data[other : other + size])[
            kind - 1
        ]
    else:
        del data[at : at + length]
    return bytes(data)


@pytest.mark.parametrize("num", [300, pytest.param(3000, marks=pytest.mark.exhaustive)])
def test_no_corruption_goes_unnoticed(content: bytes, path: Path, num: int) -> None:
    rng = random.Random(num)
    for _ in range(num):
        damaged = corrupted(content, rng)
        if damaged != content:
            path.write_bytes(damaged)
            with pytest.raises(PoolFileError):
                NGramPool.load(path)


def put(name: str, value: Any) -> Callable[[Described, Arrays], None]:
    """Set an entry of what describes a pool."""
    return lambda described, arrays: described.update({name: value})


def fill(name: str, index: Any, value: Any) -> Callable[[Described, Arrays], None]:
    """Set an item of an array."""

    def change(described: Described, arrays: Arrays) -> None:
        arrays[name][index] = value

    return change


def exchange(name: str, array: Any) -> Callable[[Described, Arrays], None]:
    """Put another array in an array's place; None for none."""
    return lambda described, arrays: (
        arrays.pop(name) if array is None else arrays.update({name: array})
    )


# What is changed, so that the digest fits, and what is said of it. The pool of `content` has 500
# tokens and rows, the next position 900, N = 4, 256 buckets and 256 harvested rows or so.
SIZES = "header: expected sizes of a pool, got {'N': 4,"
HOSTILE: dict[str, tuple[Callable[[Described, Arrays], None], str]] = {
    "newer": (put("version", files._VERSION + 1), "it has format [0-9]+, of a newer version"),
    "no number": (put("capacity_tokens", "500"), "expected capacity_tokens from 1"),
    "true": (put("max_ngram_size", True), "expected max_ngram_size from 1 to"),
    "no text": (put("model", 7), "header: expected texts"),
    "deep": (put("note", [[[]]]), "header: expected texts"),
    "nothing of it": (lambda described, arrays: described.pop("note"), "header: .*KeyError"),
    "capacity 0": (put("capacity_tokens", 0), "expected capacity_tokens from 1"),
    "capacity 10**4000": (put("capacity_tokens", 10**4000), "expected capacity_tokens"),
    "capacity 2**30": (put("capacity_tokens", 2**30), "expected capacity_tokens from 1"),
    "capacity 2**29": (put("capacity_tokens", 2**29), SIZES),
    "capacity too small": (put("capacity_tokens", 499), SIZES),
    "N 5": (put("max_ngram_size", 5), r"expected 'links' in int32 of shape \(500, 5\), got int32"),
    "position -1": (put("num_observed", -1), "expected num_observed from 0"),
    "position 899": (put("num_observed", 899), "part 'text', row [0-9]+: expected token ids and"),
    "seed": (put("hash_seed", 2**60), "expected hash_seed from 0"),
    "an array less": (exchange("links", None), "header: expected the parts"),
    "an array more": (exchange("more", np.zeros(3)), "header: expected the parts"),
    "no shape": (exchange("text", np.array(3, np.int32)), "expected 'text' in int32 of shape"),
    "a longer text": (exchange("text", np.zeros((501, 3), np.int32)), "expected 'links' in int32"),
    "buckets 3": (exchange("heads", np.zeros((4, 3), np.int32)), SIZES),
    "contexts 4": (exchange("harvested.keys", np.zeros(4, np.int64)), "'harvested.token_ids' in"),
    "another dtype": (exchange("text", np.zeros((500, 3), np.float32)), "'text' in int32 .* float"),
    "a dtype of torch": (exchange("text", np.zeros((500, 3), bool)), "'text' in int32 .* got bool"),
    "a token -1": (fill("text", (3, 0), -1), "part 'text', row 3: expected token ids and"),
    "after itself": (fill("text", (3, 2), 503), "part 'text', row [23]"),
    "a link below": (fill("links", (3, 0), -2), "part 'links', row 3"),
    "a head below": (fill("heads", (2, 7), -2), "part 'heads', row 2"),
    "a tail above": (fill("sequence", 0, 900), "part 'sequence': expected positions, got .900,"),
    "a tail in the middle": (fill("sequence", 0, 600), "part 'sequence'"),
    "an answer before its prompt": (fill("sequence", slice(1, 3), [9, 3]), "part 'sequence'"),
    "weights of nan": (fill("weights", (0, 0), np.nan), "part 'weights': expected values from"),
    "counts of nan": (fill("unigrams.counts", 9, np.nan), "part 'unigrams.counts': expected"),
    "a unigram -2": (fill("unigrams.token_ids", 9, -2), "part 'unigrams.token_ids': expected"),
    "a key 2**63": (fill("harvested.keys", 9, 2**63 - 1), "part 'harvested.keys': expected"),
    "a successor -2": (fill("harvested.token_ids", (9, 0), -2), "'harvested.token_ids': expected"),
    "put -1 times": (fill("harvested.counts", 9, -1), "part 'harvested.counts': expected"),
    "put 11 times": (fill("harvested.counts", 9, 11), "part 'harvested.counts': expected"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_a_pool_cannot_be_is_refused_with_its_place(
    content: bytes, path: Path, kind: str
) -> None:
    change, expected = HOSTILE[kind]
    path.write_bytes(forged(content, change))
    with pytest.raises(PoolFileError, match=expected) as raised:
        NGramPool.load(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert len(str(raised.value)) < 1000


# What is written into the header, so that the digest fits.
HEADERS = {
    "rows 2**62": (b'"shape":[500,3]', b'"shape":[%d,3]' % 2**62),
    "offsets": (
        b'"text":{"dtype":"I32","shape":[500,3],"data_offsets":[',
        b'"text":{"dtype":"I32","shape":[500,3],"data_offsets":[1',
    ),
    "no dtype": (b'"dtype":"I32"', b'"dtype":"I33"'),
    "another dtype": (b'"dtype":"U16"', b'"dtype":"F16"'),
    "a dtype that numpy lacks": (b'"dtype":"U16"', b'"dtype":"BF16"'),
    "no JSON": (b'"shape"', b'"shape'),
    "no text": (b'"shape"', b'"\xff"'),
    "deep": (b'{\\"version', b"{" + b'\\"a\\":[' * 9 + b'\\"version'),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_that_says_something_else_is_refused(
    content: bytes, path: Path, kind: str
) -> None:
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].replace(*HEADERS[kind])
    assert header != content[8 : 8 + size]
    path.write_bytes(sealed(len(header).to_bytes(8, "little") + header + content[8 + size :]))
    with pytest.raises(PoolFileError, match=f"^{path}: (header|it is not a pool file)"):
        NGramPool.load(path)


def test_a_short_file_of_a_large_n_takes_little_memory(path: Path) -> None:
    """A file of 24 MB, of a pool of one row, whose first arrays would take 24 GB."""
    NGramPool(1, 2**20, seed=1).save(path)
    content = forged(path.read_bytes(), put("capacity_tokens", 2**20))
    path.write_bytes(content)
    assert NGramPool.load(path).nbytes < 300 * 2**20


def test_a_file_cut_anywhere_is_refused(content: bytes, path: Path) -> None:
    ends = [*range(0, 2500, 7), *range(2500, len(content), 2999), len(content) - 1]
    for end in ends:
        path.write_bytes(content[:end])
        with pytest.raises(PoolFileError, match=f"its {end} bytes do not|not a pool file"):
            NGramPool.load(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(PoolFileError, match=f"its {len(content) + 1} bytes do not match"):
        NGramPool.load(path)


# --- interruptions --------------------------------------------------------------------------


class FaultyOs:
    """The module os, which acts at one of the operations that change files."""

    def __init__(self, act: Callable[[], None], at: int, after: bool) -> None:
        self.act, self.at, self.after = act, at, after
        self.done: list[str] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ("open", "write", "fsync", "replace", "close"):
            return real

        def operation(*args: Any) -> Any:
            self.done.append(name)
            is_here = len(self.done) == self.at
            if is_here and not self.after:
                self.act()
            result = real(*args)
            if is_here and self.after:
                self.act()
            return result

        return operation


@pytest.fixture
def old_and_new(path: Path) -> tuple[bytes, bytes]:
    """What the path has, and what `used_pool(num_tokens=50)` is to write there."""
    used_pool(num_tokens=50).save(path)
    new = path.read_bytes()
    used_pool().save(path)
    return path.read_bytes(), new


def operations(path: Path, pool: NGramPool) -> list[str]:
    """Return the operations that saving takes."""
    with pytest.MonkeyPatch.context() as patch:
        faulty = FaultyOs(lambda: None, 0, False)
        patch.setattr(writing, "os", faulty)
        pool.save(path)
    return faulty.done


def test_content_is_on_disk_before_its_name_is(old_and_new: Any, path: Path) -> None:
    done = operations(path, used_pool())
    num_writes = done.count("write")
    assert num_writes == 3  # what comes before the digest, it, and what comes after
    written = ["open", *["write"] * num_writes, "fsync"]
    assert done == [*written, "replace", "open", "fsync", "close"]


def full_disk() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("after", [False, True])
def test_a_save_that_fails_anywhere_leaves_one_file_whole(
    old_and_new: tuple[bytes, bytes], path: Path, after: bool
) -> None:
    (old, new), pool = old_and_new, used_pool(num_tokens=50)
    done = operations(path, pool)
    for at in range(1, len(done) + 1):
        path.write_bytes(old)
        is_new = at > done.index("replace") + (0 if after else 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writing, "os", FaultyOs(full_disk, at, after))
            try:
                pool.save(path)
            except OSError:
                assert not is_new or after
            else:
                assert is_new
        assert path.read_bytes() == (new if is_new else old)
        assert [*path.parent.iterdir()] == [path]


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
may_fork = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@needs_fork
@may_fork
@pytest.mark.parametrize("after", thinned([False, True], True))
def test_a_process_killed_at_any_write_leaves_the_old_or_the_new_file(
    old_and_new: tuple[bytes, bytes], path: Path, after: bool
) -> None:
    (old, new), pool = old_and_new, used_pool(num_tokens=50)
    done = operations(path, pool)
    for at in range(1, len(done) + 1):
        path.write_bytes(old)
        child = os.fork()
        if child == 0:
            pytest.MonkeyPatch().setattr(writing, "os", FaultyOs(kill_myself, at, after))
            try:
                pool.save(path)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        is_new = at > done.index("replace") + (0 if after else 1)
        assert path.read_bytes() == (new if is_new else old)
        for left in {*path.parent.iterdir()} - {path}:
            assert left.name.startswith("my.making-")
            left.unlink()


def test_files_of_killed_saves_are_swept_after_a_day_and_no_others(path: Path) -> None:
    folder = path.parent
    old, new = (folder / f"my.making-{str(i) * 16}" for i in range(2))
    other, unrelated = folder / f"yours.making-{'0' * 16}", folder / "my.making-of"
    for each in (old, new, other, unrelated):
        each.write_bytes(b"half")
    for each in (old, other, unrelated):
        os.utime(each, (0, 0))
    used_pool().save(path)
    assert {*folder.iterdir()} == {path, new, other, unrelated}


def test_names_that_look_like_patterns_sweep_nothing_else(tmp_path: Path) -> None:
    other = tmp_path / f"my.making-{'0' * 16}"
    other.write_bytes(b"half")
    os.utime(other, (0, 0))
    used_pool().save(tmp_path / "[m]?*.pool")
    assert other.exists()
