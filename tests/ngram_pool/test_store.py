"""Many pools in one folder: nothing lost, nothing mixed up, nothing deleted that comes back.

Two stores of one folder in one process are to each other what two processes are.
"""

import math
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from ngram_pool import (
    NamedPool,
    NewerPoolFileError,
    NGramPool,
    PoolFileError,
    PoolStore,
)
from tests.ngram_pool.checking import check_pool
from tests.ngram_pool.threads import in_threads

SECRET = [70_001, 70_002, 70_003, 70_004]
USED = NGramPool(1000)
USED.observe([1], None)
USED.draft([1], 1)
ONE_POOL = USED.nbytes  # memory for drafts comes with the first one


def store_at(folder: Path, **options: object) -> PoolStore:
    """A store of small pools that saves only when `save` is called."""
    settings = {"capacity_tokens": 1000, "save_every_sec": math.inf, **options}
    return PoolStore(folder, **settings)  # type: ignore[arg-type]


def observe(store: PoolStore, name: str, *texts: list[int]) -> None:
    with store.open(name) as pool:
        for text in texts:
            pool.observe(text, None)


def texts_of(store: PoolStore, name: str) -> list[list[int]]:
    with store.open(name) as pool:
        check_pool(pool)
        return [text.tolist() for text in pool.texts()]


def bytes_of(token_ids: list[int]) -> list[bytes]:
    """How files may hold any of the token ids: as such, and in either half of a context's key."""
    halves = [half for t in token_ids for half in (t, t | 2**31, (t + 1) >> 1)]
    return [half.to_bytes(4, "little") for half in halves]


def files_with(folder: Path, token_ids: list[int]) -> list[str]:
    """The files, whatever they are for, that hold any of the token ids."""
    found = []
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        if any(each in content for each in bytes_of(token_ids)):
            found.append(path.name)
    return sorted(found)


# --- names ----------------------------------------------------------------------------------


def test_names_are_listed_as_they_were_given(tmp_path: Path) -> None:
    names = [
        "alice",
        "Alice",
        "../../bob",
        "/etc/passwd",
        "..",
        ".",
        "a\0b",
        "C:\\con",
        "con",
        "%41",
    ]
    names = sorted(
        [*names, "a/b", "a%2fb", "é", "e\u0301", "é" * 200, "\ud800", "x" * 199, "x" * 200]
    )
    with store_at(tmp_path / "pools") as store:
        for i, name in enumerate(names):
            observe(store, name, [i])
        assert store.names() == names
        with store.open("empty"):
            pass
        assert store.names() == names
    assert store_at(tmp_path / "pools").names() == names
    assert [texts_of(store_at(tmp_path / "pools"), name) for name in names] == [
        [[i]] for i in range(len(names))
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["pools"]
    stems = {path.stem.casefold() for path in (tmp_path / "pools").glob("*.pool")}
    assert len(stems) == len(names)  # whatever a file system tells apart
    (tmp_path / "pools" / "%zz.pool").write_bytes(b"")
    (tmp_path / "pools" / "FOREIGN.pool").write_bytes(b"")
    assert store_at(tmp_path / "pools").names() == names


# --- one process ----------------------------------------------------------------------------


def test_all_that_have_a_name_open_share_a_pool(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    named = store.named("alice")
    assert isinstance(named, NamedPool)
    with named.open() as one, store.open("alice") as two, store.open("bob") as three:
        assert one is two
        assert one is not three
        assert store.stats.num_in_use == 2
    assert store.stats.num_in_use == 0


def test_new_pools_are_as_the_store_was_told(tmp_path: Path) -> None:
    options = {"tokenizer": "words", "model": "m", "max_ngram_size": 3}
    with store_at(tmp_path, **options) as store, store.open("alice") as pool:
        assert (pool.capacity_tokens, pool.max_ngram_size) == (1000, 3)
        assert (pool.tokenizer, pool.model) == ("words", "m")
        pool.observe([1, 2])
    with (
        store_at(tmp_path, tokenizer="letters") as store,
        pytest.raises(PoolFileError, match="expected text of the tokenizer letters, got text of w"),
        store.open("alice"),
    ):
        pass
    assert (tmp_path / "alice.pool").exists()
    with store_at(tmp_path, model="n") as store, pytest.warns(UserWarning, match="of the model"):
        assert texts_of(store, "alice") == [[1, 2]]


def test_the_pool_that_was_used_longest_ago_leaves_memory_first(tmp_path: Path) -> None:
    with store_at(tmp_path, memory_bytes=3 * ONE_POOL) as store:
        for name in ("a", "b", "c", "a", "d"):
            observe(store, name, [ord(name)])
        assert store.stats.num_evicted == 1
        assert store.stats.memory_bytes <= 3 * ONE_POOL
        for name in "acd":
            texts_of(store, name)
        assert store.stats.num_loaded == 0
        assert texts_of(store, "b") == [[ord("b")]]  # it was saved before it went
        # Another left memory to make room for it; it was saved when it was closed, and left, too.
        assert (store.stats.num_loaded, store.stats.num_evicted) == (1, 3)


def test_pools_in_use_stay_in_memory(tmp_path: Path) -> None:
    with store_at(tmp_path, memory_bytes=1) as store:
        with store.open("a") as pool:
            observe(store, "b", [1])
            assert store.stats.num_in_memory == 1
            with store.open("a") as again:
                assert again is pool
        assert store.stats.num_in_memory == 0
        assert store.stats.num_evicted == 2


def test_the_least_valuable_files_go_first(tmp_path: Path) -> None:
    with store_at(tmp_path, memory_bytes=1) as store:
        for name in ("a", "b", "c", "X" * 200):
            observe(store, name, [1])
            time.sleep(0.01)
        with store.open("a"):
            pass
        size = (tmp_path / "a.pool").stat().st_size
    with store_at(tmp_path, disk_bytes=2 * size + 10) as store:
        observe(store, "d", [1])
        store.save()
        assert store.names() == ["a", "d"]
        assert store.stats.disk_bytes <= 2 * size + 10
        assert store.stats.num_dropped == 3
    assert sorted(path.name for path in tmp_path.glob("*.*")) == ["a.pool", "d.pool"]


def test_pools_are_saved_regularly_while_they_are_in_use(tmp_path: Path) -> None:
    with store_at(tmp_path, save_every_sec=0.1) as store, store.open("a") as pool:
        pool.observe([1, 2, 3])
        deadline = time.monotonic() + 20
        while not (tmp_path / "a.pool").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert texts_of(store_at(tmp_path), "a") == [[1, 2, 3]]


def test_what_is_learned_while_a_file_is_written_is_saved_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, late = NGramPool.save, [[2]]

    def slow(pool: NGramPool, path: Path) -> None:
        save(pool, path)
        if late:
            pool.observe(late.pop(), None)

    monkeypatch.setattr(NGramPool, "save", slow)
    store = store_at(tmp_path)
    observe(store, "a", [1])
    store.save()
    assert store.stats.num_in_memory == 1
    store.save()
    assert store.stats.num_in_memory == 0
    assert texts_of(store_at(tmp_path), "a") == [[1], [2]]


def test_a_time_of_0_saves_at_every_close(tmp_path: Path) -> None:
    store, other = store_at(tmp_path, save_every_sec=0), store_at(tmp_path)
    for i in range(3):
        observe(store, "a", [i])
        assert texts_of(other, "a") == [[j] for j in range(i + 1)]


def test_a_store_that_nobody_closed_is_saved_when_python_ends(tmp_path: Path) -> None:
    program = (
        "import sys; from ngram_pool import PoolStore\n"
        f"store = PoolStore({str(tmp_path)!r}, capacity_tokens=1000)\n"
        "with store.open('a') as pool: pool.observe([1, 2, 3])\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert texts_of(store_at(tmp_path), "a") == [[1, 2, 3]]


def test_a_closed_store_opens_nothing_but_saves_what_is_still_open(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    with store.open("a") as pool:
        pool.observe([1])
        store.close()
        pool.observe([2])
    with pytest.raises(ValueError, match="expected an open store"), store.open("a"):
        pass
    store.close()
    assert texts_of(store_at(tmp_path), "a") == [[1, 2]]


# --- damage ---------------------------------------------------------------------------------


def test_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    with store_at(tmp_path) as store:
        observe(store, "alice", [1, 2])
    path = tmp_path / "alice.pool"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with (
        store_at(tmp_path) as store,
        pytest.warns(UserWarning, match=r"'alice' begins anew, .* cannot be used: .*digest"),
    ):
        observe(store, "alice", [3])
    assert texts_of(store_at(tmp_path), "alice") == [[3]]


def test_a_file_of_a_newer_version_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ngram_pool.files._VERSION", 10**6)
        with store_at(tmp_path) as store:
            observe(store, "alice", [1, 2])
    before = (tmp_path / "alice.pool").read_bytes()
    with (
        store_at(tmp_path) as store,
        pytest.raises(NewerPoolFileError, match="of a newer version"),
        store.open("alice"),
    ):
        pass
    assert store.stats.num_in_use == 0
    assert (tmp_path / "alice.pool").read_bytes() == before


# --- several processes ----------------------------------------------------------------------


def test_a_name_has_one_writer_and_others_read_its_file(tmp_path: Path) -> None:
    one, two = store_at(tmp_path), store_at(tmp_path)
    with one.open("a") as pool:
        pool.observe([1], None)
        with two.open("a") as read:
            assert (read.is_read_only, len(read)) == (True, 0)
            with two.open("a") as again:
                assert again is read
        one.save()
        assert texts_of(two, "a") == [[1]]
        pool.observe([2], None)
    assert texts_of(two, "a") == [[1]]  # closed, but not saved
    one.save()
    observe(two, "a", [3])  # saved and closed, so that another may write
    assert texts_of(one, "a") == [[1], [2]]
    two.close()
    observe(one, "a", [4])
    one.close()
    assert texts_of(store_at(tmp_path), "a") == [[1], [2], [3], [4]]
    assert [path.name for path in tmp_path.iterdir()] == ["a.pool"]


def test_what_lies_beside_a_file_is_deleted_with_it(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    observe(store, "a", [1, *SECRET])
    observe(store, "b", [1, *SECRET])
    store.save()
    content = (tmp_path / "a.pool").read_bytes()
    (tmp_path / f"a.making-{'0' * 16}").write_bytes(content)  # of a process that was killed
    assert store.delete("a")
    assert files_with(tmp_path, SECRET) == ["b.pool"]
    assert texts_of(store, "b") == [[1, *SECRET]]


def test_a_deleted_pool_is_gone_and_does_not_come_back(tmp_path: Path) -> None:
    for name in ("a", "X" * 200):
        one, two = store_at(tmp_path), store_at(tmp_path)
        observe(one, name, SECRET)
        one.save()
        assert texts_of(two, name) == [SECRET]
        with one.open(name) as pool, pytest.raises(BlockingIOError, match="another process writes"):
            two.delete(name)
        assert files_with(tmp_path, SECRET)
        with two.open(name) as pool:
            pool.observe(SECRET)
            assert two.delete(name)
            pool.observe(SECRET)  # a pool that is open stays
            assert len(pool) == 3 * len(SECRET)
        for store in (two, one):
            store.save()
            assert (store.names(), store.stats.num_in_memory) == ([], 0)
        assert [*tmp_path.iterdir()] == []
        assert texts_of(one, name) == texts_of(two, name) == []
        assert not one.delete(name)


WORKER = """
import sys
from ngram_pool import PoolStore
store = PoolStore(sys.argv[1], capacity_tokens=20_000, memory_bytes=1, save_every_sec=3600)
for i in range(20):
    with store.open(f"name {i % 3}") as pool:
        if pool.is_read_only:
            print(-1, flush=True)
        else:
            pool.observe([int(sys.argv[2]), i], None)
    if not pool.is_read_only:
        print(i, flush=True)  # it left memory, so it is saved
store.close()
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_several_processes_use_the_same_names_and_one_is_killed(tmp_path: Path) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path), str(number)], stdout=subprocess.PIPE
        )
        for number in range(3)
    ]
    killed = workers[0]
    assert killed.stdout is not None
    outputs = [[int(killed.stdout.readline()) for _ in range(7)]]
    killed.kill()
    outputs[0] += map(int, killed.stdout.read().split())
    outputs += [[int(i) for i in worker.communicate()[0].split()] for worker in workers[1:]]
    killed.communicate()
    assert [worker.returncode for worker in workers] == [-signal.SIGKILL, 0, 0]
    assert [len(output) for output in outputs[1:]] == [20, 20]
    store = store_at(tmp_path, capacity_tokens=20_000)
    held = [tuple(text) for i in range(3) for text in texts_of(store, f"name {i}")]
    assert len(held) == len({*held})  # each once
    assert {(n, i) for n, output in enumerate(outputs) for i in output if i >= 0} <= {*held}


def test_no_more_pools_are_in_memory_than_lock_files_may_be_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ngram_pool.store._MOST_IN_MEMORY", 3)
    with store_at(tmp_path) as store:
        for i in range(5):
            observe(store, f"name {i}", [i])
        assert (store.stats.num_in_memory, store.stats.num_saved) == (3, 2)
        assert texts_of(store, "name 0") == [[0]]


# --- threads --------------------------------------------------------------------------------


def test_threads_lose_nothing_under_pressure(tmp_path: Path) -> None:
    num_threads, num_rounds = 6, 25
    store = store_at(tmp_path, memory_bytes=2 * ONE_POOL, save_every_sec=0.05)

    def work(number: int) -> None:
        rng = random.Random(number)
        for i in range(num_rounds):
            with store.open(f"name {rng.randrange(4)}") as pool:
                pool.observe([number, i], None)
                pool.draft([number], 5)

    assert in_threads(*(partial(work, i) for i in range(num_threads)), seconds=None) == []
    stats = store.stats
    assert stats.num_in_use == 0
    assert stats.memory_bytes <= 2 * ONE_POOL
    store.close()
    store = store_at(tmp_path)
    texts = [tuple(text) for i in range(4) for text in texts_of(store, f"name {i}")]
    assert sorted(texts) == [(n, i) for n in range(num_threads) for i in range(num_rounds)]
