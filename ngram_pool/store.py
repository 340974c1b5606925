"""`PoolStore`: many named pools in one folder, within a budget of memory and one of disk.

A name has one writing process at a time: it holds a lock file as long as it has the pool in memory,
which is until all of it is saved and nobody has it open. Other processes read the file meanwhile.

Next files: `pool.py`, the pools of a store; `files.py`, the file of a pool.
"""

import atexit
import hashlib
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from filelock import FileLock, Timeout
from sortedcontainers import SortedKeyList

from ngram_pool.arrays import positive
from ngram_pool.errors import NewerPoolFileError, PoolFileError
from ngram_pool.pool import DEFAULT_CAPACITY_TOKENS, DEFAULT_MAX_NGRAM_SIZE, NGramPool
from ngram_pool.writing import MAX_STEM_LENGTH, sweep, write_whole

MAX_NAME_LENGTH = 200
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-")
# Windows has no files of these names.
_RESERVED = {"con", "prn", "aux", "nul", *(f"{d}{i}" for d in ("com", "lpt") for i in range(10))}
_HASHED = "="  # begins the stems of names that are hashed
# Each pool in memory keeps a lock file open, and many systems allow a process 1,024 open files.
_MOST_IN_MEMORY = 256


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The contents of a store, and its counts in this process."""

    num_in_memory: int
    num_in_use: int
    memory_bytes: int
    num_on_disk: int
    disk_bytes: int
    num_loaded: int  # pools read from their files
    num_saved: int
    num_failed: int  # attempts to save that failed
    num_evicted: int  # pools that left memory
    num_dropped: int  # files removed to keep within the budget


@dataclass(slots=True, eq=False)
class _Entry:
    """A name that somebody has open, or whose pool is in memory."""

    name: str
    path: Path
    lock: Any = field(default_factory=threading.RLock)  # held while the pool is loaded or saved
    num_users: int = 0
    pool: NGramPool | None = None
    writing: FileLock | None = None  # while this process alone may write the file
    saved: tuple[int, float] = 0, 0.0  # `_learned` of the pool when it was last saved or loaded
    used: float = 0.0  # time of the last use

    @property
    def has_learned(self) -> bool:
        """Whether the pool has observed or harvested anything."""
        return self.pool is not None and any(self.pool._learned)


@dataclass(frozen=True, slots=True)
class NamedPool:
    """A pool of a store, by its name; opened for each use."""

    store: "PoolStore"
    name: str

    def open(self) -> Any:
        """Return `PoolStore.open` of the name."""
        return self.store.open(self.name)


class PoolStore:
    """Many named pools in a folder, within budgets of memory and of disk.

    Opening a name gives its pool, from memory, from its file, or a new one. All users of a name in
    a process share one pool. A pool leaves memory once it is saved and nobody has it open. If
    memory runs out, those used longest ago are saved at once; likewise, such files leave the disk.

    Several processes may use a folder. Each name has one that writes at a time, the first to open
    it, as long as it has the pool in memory. Meanwhile others get a read-only pool of the file, for
    layers. A killed process loses at most the text of the last `save_every_sec` seconds, and keeps
    no name.

    Methods may be called from several threads; a forked child must make its own store.

    Args:
        folder: folder of the files; if it is missing, it is made so that only its owner may read.
        memory_bytes: budget for all pools in memory. Pools in use stay, so these may exceed it.
        disk_bytes: budget for all files; the text of a removed file is lost.
        save_every_sec: how often pools are saved while they learn, in seconds; 0 to save each pool
            when it is closed, `math.inf` to save as late as possible.
        tokenizer: fingerprint of the tokenizer of all text, "" if unknown.
        model: fingerprint of the model of all harvested successors, "" if unknown.
        capacity_tokens, max_ngram_size: of new pools, as for `NGramPool`.

    Raises:
        OSError: the folder cannot be made.
        TypeError, ValueError: a budget is not a positive integer, or the time is negative.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, PoolStore(folder) as store:
    ...     with store.open("alice") as pool:
    ...         pool.observe([5, 6, 7])
    ...     with store.open("bob") as pool:
    ...         print(len(pool))
    ...     print(store.names())
    0
    ['alice']
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        memory_bytes: int = 2**30,
        disk_bytes: int = 2**34,
        save_every_sec: float = 60.0,
        tokenizer: str = "",
        model: str = "",
        *,
        capacity_tokens: int = DEFAULT_CAPACITY_TOKENS,
        max_ngram_size: int = DEFAULT_MAX_NGRAM_SIZE,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.memory_bytes = positive("memory_bytes", memory_bytes)
        self.disk_bytes = positive("disk_bytes", disk_bytes)
        if not save_every_sec >= 0:  # NaN too
            raise ValueError(f"expected save_every_sec of at least 0, got {save_every_sec!r}")
        self.save_every_sec = save_every_sec
        self.tokenizer, self.model = tokenizer, model
        self.capacity_tokens = positive("capacity_tokens", capacity_tokens)
        self.max_ngram_size = positive("max_ngram_size", max_ngram_size)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep(self.folder)
        self._is_closed = False
        self._lock = threading.RLock()  # for all attributes below; never held during a wait
        self._entries: dict[str, _Entry] = {}  # by stem
        # The entries without users, the one used longest ago first.
        self._idle: SortedKeyList[_Entry, float] = SortedKeyList(key=attrgetter("used"))
        self._disk_bytes = self.disk_bytes + 1  # at least the bytes of all files; not known yet
        self._counted = dict.fromkeys(("loaded", "saved", "failed", "evicted", "dropped"), 0)
        self._done = threading.Event()
        self._saver: threading.Thread | None = None
        if 0 < save_every_sec < threading.TIMEOUT_MAX:
            # Twice as often, so that text learned just after a save is saved in time.
            args = weakref.ref(self), self._done, save_every_sec / 2
            self._saver = threading.Thread(target=_save_regularly, args=args, daemon=True)
            self._saver.start()
        _stores.add(self)

    def __repr__(self) -> str:
        return f"PoolStore({str(self.folder)!r}, in_memory={len(self._entries)})"

    def __enter__(self) -> "PoolStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one name ---------------------------------------------------------------------------

    @contextmanager
    def open(self, name: str) -> Iterator[NGramPool]:
        """Open a pool by its name, or a new one, for the duration of a `with` block.

        The pool is read-only (`is_read_only`) while another process writes the name.

        Args:
            name: any string of 1 to 200 characters.

        Raises:
            OSError: the file cannot be read.
            PoolFileError: the file is of another tokenizer, or of a newer version.
            TypeError, ValueError: the name is invalid, or the store is closed.

        Warns:
            UserWarning: the file is damaged; a new pool begins, whose file will replace it.
        """
        entry = self._entry(name)
        try:
            with entry.lock:
                if entry.pool is None:
                    entry.pool = self._read(entry)
                pool = entry.pool
            self._settle()
            yield pool
        finally:
            try:
                if self.save_every_sec == 0 or self._is_closed:
                    self._save_one(entry)
            finally:
                self._release(entry)
                self._settle()
                with suppress(OSError):  # so that recently used files stay longest
                    os.utime(entry.path)

    def named(self, name: str) -> NamedPool:
        """Return a handle to a name, to be opened for each use."""
        stem_of(name)
        return NamedPool(self, name)

    def delete(self, name: str) -> bool:
        """Remove a pool, its file and all traces of its name; return whether there was one.

        Code that has the pool open continues with it, outside of the store.

        Raises:
            BlockingIOError: another process writes the name; nothing is removed.
        """
        entry = self._entry(name)
        try:
            with entry.lock:
                if not self._claim(entry):
                    raise BlockingIOError(f"another process writes the pool {name!r}")
                is_there = entry.path.exists() or entry.has_learned
                # No process is writing unfinished files, since the lock is held.
                unfinished = self.folder.glob(f"{entry.path.stem}.making-*")
                for path in (entry.path, _name_path(entry.path), *unfinished):
                    path.unlink(missing_ok=True)
                entry.pool = None
                return is_there
        finally:
            self._release(entry)

    # --- all names --------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return all names that have a file, or a pool in memory that has learned; sorted."""
        with self._lock:
            found = {entry.name for entry in self._entries.values() if entry.has_learned}
        return sorted({*found, *filter(None, map(_name_of, self.folder.glob("*.pool")))})

    def save(self) -> None:
        """Save all pools that have learned since their last save.

        Raises:
            OSError: a file cannot be written; all others were.
            PoolFileError: as for `open`.
        """
        errors = self._save_all()
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Save all pools and drop them; the store cannot be used again.

        Pools that are still open are saved again when they are closed.
        """
        self._is_closed = True
        self._done.set()
        saver = self._saver
        if saver is not None and saver is not threading.current_thread():
            saver.join()
        self.save()

    @property
    def stats(self) -> StoreStats:
        """The contents and counts of the store; linear in the number of files."""
        files = self._files()
        with self._lock:
            pools = [e.pool for e in self._entries.values() if e.pool is not None]
            return StoreStats(
                num_in_memory=len(pools),
                num_in_use=sum(bool(entry.num_users) for entry in self._entries.values()),
                memory_bytes=sum(pool.nbytes for pool in pools),
                num_on_disk=len(files),
                disk_bytes=sum(size for _, size, _ in files),
                **{f"num_{name}": number for name, number in self._counted.items()},
            )

    # --- opening and closing ----------------------------------------------------------------

    def _entry(self, name: str) -> _Entry:
        """Return the entry of a name, which stays in memory until it is released."""
        stem = stem_of(name)
        with self._lock:
            if self._is_closed:
                raise ValueError("expected an open store, got a closed one")
            entry = self._entries.setdefault(stem, _Entry(name, self.folder / f"{stem}.pool"))
            self._idle.discard(entry)
            entry.num_users += 1
        return entry

    def _release(self, entry: _Entry) -> None:
        with self._lock:
            entry.num_users -= 1
            if not entry.num_users:
                entry.used = time.monotonic()
                self._idle.add(entry)
            self._let_go(entry)

    def _let_go(self, entry: _Entry) -> None:
        """Drop a pool that is saved and that nobody has open; then other processes may write it."""
        with self._lock:
            pool = entry.pool
            has_unsaved = pool is not None and pool._learned != entry.saved
            if entry.num_users or has_unsaved or self._entries.get(entry.path.stem) is not entry:
                return
            del self._entries[entry.path.stem]
            self._idle.discard(entry)
            self._counted["evicted"] += pool is not None
            entry.pool, lock, entry.writing = None, entry.writing, None
            if lock is not None:
                with suppress(OSError):  # Windows does so itself, after the release
                    os.unlink(lock.lock_file)
                lock.release()

    def _settle(self) -> None:
        """Save the pools used longest ago, which leave memory, while all exceed its budget."""
        with self._lock:
            idle = [*self._idle]
        for entry in idle:
            with self._lock:
                pools = [e.pool for e in self._entries.values() if e.pool is not None]
            taken = sum(pool.nbytes for pool in pools)
            if taken <= self.memory_bytes and len(pools) <= _MOST_IN_MEMORY:
                break
            try:
                self._save_one(entry)
            except (OSError, ValueError) as error:
                self._count("failed")
                warnings.warn(
                    f"the pool {entry.name!r} stays in memory because it cannot be saved: {error}",
                    stacklevel=2,
                )
                break
        self._trim_disk()

    def _count(self, what: str, disk_bytes: int = 0) -> None:
        with self._lock:
            self._counted[what] += 1
            self._disk_bytes += disk_bytes

    # --- pools and files --------------------------------------------------------------------
    #
    # The caller of `_claim` and `_read` holds the lock of the entry.

    def _claim(self, entry: _Entry) -> bool:
        """Return whether this process may write a name; other processes may not from now on."""
        if entry.writing is None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = entry.path.with_suffix(".lock")
            lock = FileLock(path, timeout=0, mode=0o600, thread_local=False)
            with suppress(Timeout):
                lock.acquire()
                entry.writing = lock
        return entry.writing is not None

    def _read(self, entry: _Entry) -> NGramPool:
        """Read a pool's file; return a new pool if it is missing or damaged.

        The pool is read-only if another process writes the name.
        """
        is_reader = not self._claim(entry)
        entry.saved = 0, 0.0
        try:
            pool = NGramPool.load(entry.path, model=self.model, read_only=is_reader)
        except FileNotFoundError:
            pass
        except NewerPoolFileError:
            raise
        except PoolFileError as error:
            warnings.warn(
                f"the pool {entry.name!r} begins anew, as its file cannot be used: {error}",
                stacklevel=2,
            )
        else:
            if self.tokenizer and pool.tokenizer and self.tokenizer != pool.tokenizer:
                raise PoolFileError(
                    f"{entry.path}: expected text of the tokenizer {self.tokenizer}, got text of "
                    f"{pool.tokenizer}"
                )
            pool.tokenizer = pool.tokenizer or self.tokenizer
            entry.saved = pool._learned
            self._count("loaded")
            return pool
        pool = NGramPool(self.capacity_tokens, self.max_ngram_size)
        pool.tokenizer, pool.model = self.tokenizer, self.model
        return pool.as_read_only() if is_reader else pool

    # --- regularly --------------------------------------------------------------------------

    def _save_all(self) -> list[Exception]:
        """Save every pool that has learned; return what went wrong."""
        errors: list[Exception] = []
        for entry in list(self._entries.values()):
            try:
                self._save_one(entry)
            except (OSError, ValueError) as error:
                self._count("failed")
                errors.append(error)
        self._settle()
        return errors

    def _save_one(self, entry: _Entry) -> None:
        """Save a pool that has learned; it leaves memory if nobody has it open."""
        with entry.lock:
            pool = entry.pool
            if pool is not None and (learned := pool._learned) != entry.saved:
                if entry.path.stem.startswith(_HASHED):
                    name = entry.name.encode("utf-8", "surrogatepass")
                    write_whole(_name_path(entry.path), name)
                pool.save(entry.path)
                entry.saved = learned
                self._count("saved", entry.path.stat().st_size)
            self._let_go(entry)

    def _files(self) -> list[tuple[float, int, Path]]:
        """Return the time of the last use, the size in bytes, and the path of each pool's file."""
        found = []
        for path in self.folder.glob("*.pool"):
            with suppress(FileNotFoundError):
                at = path.lstat()
                found.append((at.st_mtime, at.st_size, path))
        return found

    def _trim_disk(self) -> None:
        """Remove the files used longest ago while all files exceed the budget of disk."""
        if self._disk_bytes <= self.disk_bytes:
            return
        files = sorted(self._files())
        taken = sum(size for _, size, _ in files)
        for used, size, path in files:
            if taken <= self.disk_bytes:
                break
            with suppress(FileNotFoundError):
                if path.stat().st_mtime > used:
                    continue  # used meanwhile
                path.unlink()
                _name_path(path).unlink(missing_ok=True)
                taken -= size
                self._count("dropped")
        self._disk_bytes = taken


_stores: weakref.WeakSet[PoolStore] = weakref.WeakSet()


def _save_regularly(ref: "weakref.ref[PoolStore]", done: threading.Event, seconds: float) -> None:
    while not done.wait(seconds):
        store = ref()
        if store is None:
            return
        store._disk_bytes = store.disk_bytes + 1  # others write too
        for error in store._save_all():
            warnings.warn(f"a pool of {store!r} could not be saved: {error}", stacklevel=1)
        del store


def _close_all() -> None:
    for store in list(_stores):
        with suppress(Exception):
            store.close()


atexit.register(_close_all)


def stem_of(name: str) -> str:
    """Return the stem of a pool's file: lower-case ASCII, and different for each name.

    Raises:
        TypeError: the name is no string.
        ValueError: it is empty or too long.
    """
    if not isinstance(name, str):
        raise TypeError(f"expected a name to be a string, got {name!r}")
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise ValueError(f"expected a name of 1 to {MAX_NAME_LENGTH} characters, got {name!r:.80}")
    encoded = name.encode("utf-8", "surrogatepass")
    # Capital letters are escaped, too: some file systems ignore case.
    stem = "".join(chr(byte) if chr(byte) in _PLAIN else f"%{byte:02x}" for byte in encoded)
    if len(stem) <= MAX_STEM_LENGTH and stem not in _RESERVED:
        return stem
    return _HASHED + hashlib.blake2b(encoded, digest_size=24).hexdigest()


def _name_of(path: Path) -> str | None:
    """Return the name whose pool a file holds; None if it is no pool's file."""
    try:
        if path.stem.startswith(_HASHED):
            encoded = _name_path(path).read_bytes()
        else:
            encoded = unquote_to_bytes(path.stem)
        name = encoded.decode("utf-8", "surrogatepass")
        return name if stem_of(name) == path.stem else None
    except (OSError, ValueError):
        return None


def _name_path(path: Path) -> Path:
    return path.with_suffix(".name")
