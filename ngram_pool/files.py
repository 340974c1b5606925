"""The file of a pool: safetensors, with the arrays that a pool works on.

`docs/internals/drafting.md` describes the format. A file is used whole or refused: its digest must
match, and its numbers, shapes and positions must be those of a pool.

Next file: `writing.py`.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ngram_pool._kernels import (
    MAX_CAPACITY_TOKENS,
    MAX_COUNT,
    MAX_TOKEN_ID,
    NEVER,
    NEXT,
    NONE,
    NUM_WEIGHT_ROWS,
    NUM_WEIGHTS,
    PREVIOUS,
    WAYS,
)
from ngram_pool.errors import NewerPoolFileError, PoolFileError
from ngram_pool.table import DEFAULT_NUM_SUCCESSORS
from ngram_pool.writing import write_whole

_FORMAT, _VERSION = "ngram_pool", 4
# A file begins with its version and the digest of all its other bytes. safetensors writes metadata
# first, and this is the first of it.
_BEGIN = re.compile(
    rb'.{8}\{"__metadata__":\{"ngram_pool":"\{'
    rb'\\"version\\":(\d{1,9}),\\"sha256\\":\\"([0-9a-f]{64})\\"',
    re.DOTALL,
)
_BEGIN_BYTES = 2**10  # which hold it
_MAX_DESCRIBED = 2**20  # characters; a header of safetensors has at most 100 MB
# Far above weights and counts, but low enough for sums of their products to be finite in float64.
_MAX_FLOAT = float(np.finfo(np.float32).max)
# The bounds of the numbers that describe a pool.
_NUMBERS = {
    "max_ngram_size": (1, 2**31 - 1),
    "capacity_tokens": (1, MAX_CAPACITY_TOKENS),
    "num_observed": (0, 2**31 - 1),
    "hash_seed": (0, 2**60 - 1),
}
_TEXTS = "tokenizer", "model", "note"
# The types of the arrays, and their shapes, in terms of a pool's sizes.
_CONTEXTS, _UNIGRAMS, _ROWS, _N, _BUCKETS = "contexts", "unigrams", "rows", "N", "buckets"
ARRAYS: dict[str, tuple[type, tuple[str | int, ...]]] = {
    "text": (np.int32, (_ROWS, 3)),
    "links": (np.int32, (_ROWS, _N)),
    "heads": (np.int32, (_N, _BUCKETS)),
    "sequence": (np.int64, (3,)),
    "weights": (np.float64, (NUM_WEIGHT_ROWS, NUM_WEIGHTS)),
    "harvested.keys": (np.int64, (_CONTEXTS,)),
    "harvested.token_ids": (np.int32, (_CONTEXTS, DEFAULT_NUM_SUCCESSORS)),
    "harvested.costs": (np.uint16, (_CONTEXTS, DEFAULT_NUM_SUCCESSORS)),
    "harvested.counts": (np.int32, (_CONTEXTS,)),
    "unigrams.token_ids": (np.int32, (_UNIGRAMS,)),
    "unigrams.counts": (np.float64, (_UNIGRAMS,)),
}


class StoredPool(NamedTuple):
    """The contents of a pool's file."""

    max_ngram_size: int
    capacity_tokens: int
    num_observed: int  # the next position
    hash_seed: int
    tokenizer: str  # fingerprints, "" where unknown
    model: str
    note: str  # of the owner
    arrays: Mapping[str, NDArray[Any]]  # contiguous, by the names in `ARRAYS`


def packed(stored: StoredPool) -> bytes:
    """Return the contents of a pool's file, but for its digest; the arrays are copied.

    Raises:
        TypeError: a fingerprint or the note is not a string.
        ValueError: they are far too long.
    """
    for name in _TEXTS:
        if not isinstance(text := getattr(stored, name), str):
            raise TypeError(f"expected {name!r} to be a string, got {text!r}")
    described = {"version": _VERSION, "sha256": "0" * 64, **stored._asdict()}
    del described["arrays"]
    text = json.dumps(described, separators=(",", ":"))
    if len(text) > _MAX_DESCRIBED:
        raise ValueError(f"expected at most {_MAX_DESCRIBED} characters, got {len(text)}")
    return save({**stored.arrays}, {_FORMAT: text})


def write_pool(path: Path, data: bytes) -> None:
    """Write what `packed` returned, as `write_whole` does."""
    found = _BEGIN.match(data)
    assert found is not None, "safetensors puts metadata elsewhere"
    begin, end = found.span(2)
    whole = memoryview(data)
    write_whole(path, whole[:begin], _digest(data, begin, end).encode(), whole[end:])


def read_pool(path: Path) -> StoredPool:
    """Read a pool's file into memory; later changes of the file have no effect.

    Raises:
        OSError: the file cannot be read.
        PoolFileError: it is no pool's file, of another version of the format, or damaged.
    """
    with _opened(path) as file:
        found = _begin_of(file.read(_BEGIN_BYTES))
        file.seek(0)
        data = file.read()
        if found[2].decode() != _digest(data, *found.span(2)):
            raise PoolFileError(f"damaged: its {len(data)} bytes do not match their digest")
        return _parsed(data)


def check_begin(path: Path) -> None:
    """Raise for a file that does not begin as a pool's file; the rest is not read.

    Raises:
        OSError: the file cannot be read.
        PoolFileError: it is no pool's file, or of another version of the format.
    """
    with _opened(path) as file:
        _begin_of(file.read(_BEGIN_BYTES))


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a pool's file; every `PoolFileError` names the file."""
    if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would block
        raise PoolFileError(f"{path}: expected a file")
    with open(path, "rb") as file:
        try:
            yield file
        except PoolFileError as error:
            raise type(error)(f"{path}: {error}") from None


def _begin_of(begin: bytes) -> re.Match[bytes]:
    """Return the version and the digest with which a file begins, or raise if it is no pool's."""
    found = _BEGIN.match(begin)
    is_older = int(found[1]) < _VERSION if found else b'"format":"ngram_pool"' in begin
    if is_older:
        raise PoolFileError("it has the format of an older version; make it anew")
    if found is None:
        raise PoolFileError("it is not a pool file")
    if int(found[1]) > _VERSION:
        raise NewerPoolFileError(
            f"it has format {int(found[1])}, of a newer version; this one reads format {_VERSION}"
        )
    return found


def _digest(data: bytes, begin: int, end: int) -> str:
    """Return the digest of all bytes but its own, `data[begin:end]`."""
    digest = hashlib.sha256(memoryview(data)[:begin])
    digest.update(memoryview(data)[end:])
    return digest.hexdigest()


# --- content ----------------------------------------------------------------------------------
#
# No accident passes the digest, but a forged file may. For any contents, the kernels stay within
# the arrays and end (`test_files.py` runs them on noise). These checks are for all other code: the
# arrays are those of a pool, ids are valid, and positions are consistent.


def _parsed(data: bytes) -> StoredPool:
    """Return the pool of a file's bytes, with arrays of its own, or raise."""
    try:
        arrays = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        described = json.loads(header["__metadata__"][_FORMAT])
        labels = {name: described[name] for name in (*_NUMBERS, *_TEXTS)}
        stored = StoredPool(**labels, arrays=arrays)
    except (SafetensorError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise PoolFileError(f"header: expected that of a pool ({error!r:.200})") from None
    for name, (least, most) in _NUMBERS.items():
        number = described[name]
        if type(number) is not int or not least <= number <= most:
            raise PoolFileError(
                f"header: expected {name} from {least} to {most}, got {number!r:.40}"
            )
    if not all(isinstance(described[name], str) for name in _TEXTS):
        raise PoolFileError("header: expected texts")
    _check_shapes(stored)
    _check_content(stored)
    return stored


def _check_shapes(stored: StoredPool) -> None:
    """Raise unless the arrays have the types and shapes of a pool of its sizes."""
    if {*stored.arrays} != {*ARRAYS}:
        raise PoolFileError(f"header: expected the parts {[*ARRAYS]}, got others")
    sizes = {_N: stored.max_ngram_size}
    for name, (kind, shape) in ARRAYS.items():
        found = stored.arrays[name]
        for size, length in zip(shape, found.shape, strict=False):
            if isinstance(size, str):
                sizes.setdefault(size, length)
        expected = tuple(size if isinstance(size, int) else sizes.get(size) for size in shape)
        if found.dtype != kind or found.shape != expected:
            raise PoolFileError(
                f"header: expected {name!r} in {kind.__name__} of shape {expected}, got "
                f"{found.dtype} of shape {found.shape!s:.60}"
            )
    num_observed, capacity_tokens = stored.num_observed, stored.capacity_tokens
    # Text that has not reached the capacity was never overwritten.
    is_sound = min(max(num_observed, 1), capacity_tokens) <= sizes[_ROWS] <= capacity_tokens
    for name, least in ((_BUCKETS, 1), (_UNIGRAMS, WAYS), (_CONTEXTS, WAYS)):
        is_sound = is_sound and sizes[name] >= least and sizes[name].bit_count() == 1
    if not is_sound:
        raise PoolFileError(f"header: expected sizes of a pool, got {sizes} and {capacity_tokens}")


def _check_content(stored: StoredPool) -> None:
    arrays = stored.arrays
    text, num_observed = arrays["text"], stored.num_observed
    check_text(text, arrays["links"], arrays["heads"], num_observed)
    tail, prompt, answer = arrays["sequence"].tolist()
    first = num_observed - len(text)
    if not (
        NONE <= tail < num_observed
        and (tail < max(first, 0) or text[tail % len(text), NEXT] == NONE)
        and 0 <= prompt <= answer <= NEVER
    ):
        raise PoolFileError(f"part 'sequence': expected positions, got {[tail, prompt, answer]}")
    for name, least, most in (
        ("weights", -_MAX_FLOAT, _MAX_FLOAT),
        ("unigrams.counts", 0, _MAX_FLOAT),
        ("unigrams.token_ids", NONE, MAX_TOKEN_ID),
        ("harvested.keys", NONE, (MAX_TOKEN_ID + 1) ** 2 + MAX_TOKEN_ID),
        ("harvested.counts", 0, MAX_COUNT),
        ("harvested.token_ids", NONE, MAX_TOKEN_ID),
    ):
        if not (least <= arrays[name].min() and arrays[name].max() <= most):  # False for NaN
            raise PoolFileError(f"part {name!r}: expected values from {least} to {most}")


def check_text(
    text: NDArray[Any], links: NDArray[Any], heads: NDArray[Any], num_observed: int
) -> None:
    """Raise unless a text is consistent.

    Token ids are valid, every position was observed, next and previous positions lead back to each
    other, and every chain leads to ever older positions.
    """
    num_rows = len(text)
    first = max(0, num_observed - num_rows)
    positions = np.arange(first, num_observed)
    rows = positions % num_rows
    ids, before, after = text[rows].T
    is_last = after == NONE
    is_sound = (ids >= 0) & (before >= NONE) & (before < positions)
    is_sound &= is_last | ((positions < after) & (after < num_observed))
    is_sound &= is_last | (text[after % num_rows, PREVIOUS] == positions)
    is_sound &= (before < first) | (text[before % num_rows, NEXT] == positions)
    is_linked = ((links[rows] >= NONE) & (links[rows] < positions[:, None])).all(axis=1)
    is_headed = ((heads >= NONE) & (heads < num_observed)).all(axis=1)
    of_parts = ("text", is_sound, rows), ("links", is_linked, rows), ("heads", is_headed, None)
    for name, is_whole, of in of_parts:
        if not is_whole.all():
            place = int(is_whole.argmin())
            raise PoolFileError(
                f"part {name!r}, row {place if of is None else of[place]}: expected token ids and "
                f"positions of a text of {num_observed} tokens"
            )
