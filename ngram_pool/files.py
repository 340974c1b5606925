"""The file of a pool: safetensors, with the arrays that a pool works on.

`docs/internals/drafting.md` describes the format. Reading compares the header with that of a pool
of its sizes before allocating anything. Then it checks every block's checksum, and that positions
are consistent, before using any of it.

Next file: `writing.py`.
"""

import hashlib
import json
import operator
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

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

_FORMAT = "ngram_pool"
_VERSION = 2
_BLOCK = 2**22  # bytes of an array that share a checksum
_MAX_HEADER = 2**20  # bytes; enough for the checksums of half a terabyte
_ALIGNMENT = 64
# Far above weights and counts, but low enough for sums of their products to be finite in float64.
_MAX_FLOAT = float(np.finfo(np.float32).max)
# The bounds of the numbers that describe a pool.
_NUMBERS = {
    "max_ngram_size": (1, 2**31 - 1),
    "capacity_tokens": (1, MAX_CAPACITY_TOKENS),
    "num_observed": (0, 2**31 - 1),
    "hash_seed": (0, 2**60 - 1),
}
# Arrays in the order of a file, the widest numbers first, which keeps all of them aligned: their
# types and their shapes, in terms of a pool's sizes.
_CONTEXTS, _UNIGRAMS, _ROWS, _N, _BUCKETS = "contexts", "unigrams", "rows", "N", "buckets"
ARRAYS: dict[str, tuple[str, tuple[str | int, ...]]] = {
    "harvested.keys": ("I64", (_CONTEXTS,)),
    "unigrams.counts": ("F64", (_UNIGRAMS,)),
    "weights": ("F64", (NUM_WEIGHT_ROWS, NUM_WEIGHTS)),
    "sequence": ("I64", (3,)),
    "text": ("I32", (_ROWS, 3)),
    "links": ("I32", (_ROWS, _N)),
    "heads": ("I32", (_N, _BUCKETS)),
    "harvested.counts": ("I32", (_CONTEXTS,)),
    "harvested.token_ids": ("I32", (_CONTEXTS, DEFAULT_NUM_SUCCESSORS)),
    "unigrams.token_ids": ("I32", (_UNIGRAMS,)),
    "harvested.costs": ("U16", (_CONTEXTS, DEFAULT_NUM_SUCCESSORS)),
}
_DTYPES = {"I64": np.int64, "F64": np.float64, "I32": np.int32, "U16": np.uint16}
_METADATA = "__metadata__"
_CHECKSUM = "crc32."  # begins the names of checksums
_STRINGS = (
    *(*_NUMBERS, "tokenizer", "model", "note", "format", "version", "lade"),
    *(_CHECKSUM + name for name in ARRAYS),
)
_BEFORE_CHECKSUM = b'"crc32.header":"'  # cannot be part of a string in JSON
_NO_CHECKSUM = b"00000000"
_IS_ANOTHER = "it is not a pool file"


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


def write_pool(path: Path, stored: StoredPool) -> None:
    """Write a pool's file, as `write_whole` does.

    Raises:
        OSError: the file cannot be written; the old one is as it was.
        TypeError: a fingerprint or the note is not a string.
        ValueError: they are longer than a header may be.
    """
    for name in ("tokenizer", "model", "note"):
        text = getattr(stored, name)
        if not isinstance(text, str):
            raise TypeError(f"expected {name!r} to be a string, got {text!r}")
    described = {name: str(value) for name, value in stored._asdict().items() if name != "arrays"}
    described |= {"format": _FORMAT, "version": str(_VERSION), "lade": _version_of_lade()}
    arrays = {name: stored.arrays[name] for name in ARRAYS}
    for name, array in arrays.items():
        described[_CHECKSUM + name] = "".join(_checksums(array))
    begin = _begin_of_file(described, {name: array.shape for name, array in arrays.items()})
    if len(begin) > 8 + _MAX_HEADER:
        raise ValueError(f"expected a header of at most {_MAX_HEADER} bytes, got {len(begin) - 8}")
    write_whole(path, begin, *(array.data for array in arrays.values()))


def read_pool(path: Path) -> StoredPool:
    """Read a pool's file into memory; later changes of the file have no effect.

    Raises:
        OSError: the file cannot be read.
        PoolFileError: it is no pool's file, of a newer format, or damaged.
    """
    with _opened(path) as file:
        return _read(file)


def check_begin(path: Path) -> None:
    """Raise for a file that does not begin as a pool's file; the rest is not read.

    Raises:
        OSError: the file cannot be read.
        PoolFileError: it is no pool's file, or of a newer format.
    """
    with _opened(path) as file:
        _read_begin(file)


def stamp_of(path: Path) -> str | None:
    """Return a hash that identifies the contents of a pool's file; None if there is no file.

    It is a hash of the header, which has the checksums of all arrays.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(begin := file.read(8), "little")
            return hashlib.sha256(begin + file.read(min(length, _MAX_HEADER))).hexdigest()
    except FileNotFoundError:
        return None


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


def _read(file: BinaryIO) -> StoredPool:
    begin, header = _read_begin(file)
    described = header[_METADATA]
    numbers = {name: _number(described, name, *bounds) for name, bounds in _NUMBERS.items()}
    strings = {name: described.get(name) for name in _STRINGS}
    shapes = _shapes(header, numbers)
    are_strings = all(isinstance(text, str) for text in strings.values())
    # The header of such a pool, byte for byte: nothing is said twice, left out or added.
    if not are_strings or begin != _begin_of_file(strings, shapes):
        raise PoolFileError(f"header: expected that of a pool with {numbers}, got another")
    size = os.fstat(file.fileno()).st_size
    expected_size = len(begin) + sum(_nbytes(name, shape) for name, shape in shapes.items())
    if size != expected_size:
        raise PoolFileError(f"expected {expected_size} bytes, got {size}")
    arrays = {
        name: _read_array(file, name, shape, strings[_CHECKSUM + name])
        for name, shape in shapes.items()
    }
    tokenizer, model, note = (strings[name] for name in ("tokenizer", "model", "note"))
    stored = StoredPool(**numbers, tokenizer=tokenizer, model=model, note=note, arrays=arrays)
    _check_content(stored)
    return stored


# --- header -----------------------------------------------------------------------------------

_Shapes = dict[str, tuple[int, ...]]  # in the order of `ARRAYS`


def _begin_of_file(described: Mapping[str, str], shapes: _Shapes) -> bytes:
    """Return a file up to its arrays: the length of the header, and the header."""
    header: dict[str, Any] = {_METADATA: {**described, "crc32.header": _NO_CHECKSUM.decode()}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + _nbytes(name, shape)
        header[name] = {"dtype": ARRAYS[name][0], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return _sealed(len(text).to_bytes(8, "little") + text)


def _sealed(begin: bytes) -> bytes:
    """Return the beginning of a file with its checksum, computed with zeros in its place."""
    before, mark, after = begin.partition(_BEFORE_CHECKSUM)
    after = after[len(_NO_CHECKSUM) :]
    return before + mark + _checksum(before + mark + _NO_CHECKSUM + after).encode() + after


def _read_begin(file: BinaryIO) -> tuple[bytes, dict[str, Any]]:
    """Return a file up to its arrays, and its header; raise if it is no pool in this format."""
    begin = file.read(8)
    length = int.from_bytes(begin, "little")
    if length > _MAX_HEADER:
        raise PoolFileError(_IS_ANOTHER)
    begin += file.read(length)
    if _BEFORE_CHECKSUM not in begin:
        raise PoolFileError(_IS_ANOTHER)
    if begin != _sealed(begin):
        raise PoolFileError(f"header, bytes 0 to {8 + length}: it does not match its checksum")
    try:
        header = json.loads(begin[8:].decode())
    except (ValueError, RecursionError) as error:
        raise PoolFileError(f"header: expected JSON ({error})") from None
    described = header.get(_METADATA) if isinstance(header, dict) else None
    if not isinstance(described, dict) or described.get("format") != _FORMAT:
        raise PoolFileError(_IS_ANOTHER)
    if (found := _number(described, "version", 1, 2**31)) > _VERSION:
        raise NewerPoolFileError(
            f"it has format {found}, of a newer version of lade ({described.get('lade')!r:.40}); "
            f"this version reads format {_VERSION}"
        )
    if found < _VERSION:
        raise PoolFileError(f"it has format {found}, of an older version of lade; make it anew")
    return begin, header


def _number(described: Mapping[str, Any], name: str, least: int, most: int) -> int:
    text = str(described.get(name))
    is_number = text.isascii() and text.isdecimal() and len(text) < 20
    if is_number and least <= int(text) <= most:
        return int(text)
    raise PoolFileError(f"header: expected {name} from {least} to {most}, got {text!r:.40}")


def _shapes(header: Mapping[str, Any], numbers: Mapping[str, int]) -> _Shapes:
    """Return the shapes that the arrays of a pool must have, or raise.

    Only the number of allocated rows is taken from the arrays.
    """
    sizes = {_N: numbers["max_ngram_size"]}
    try:
        for name, (_, shape) in ARRAYS.items():
            for size, found in zip(shape, header[name]["shape"], strict=True):
                if isinstance(size, str):
                    sizes.setdefault(size, operator.index(found))
    except (LookupError, TypeError, ValueError):
        raise PoolFileError(f"header: expected the shape of {name!r}") from None
    num_observed, capacity_tokens = numbers["num_observed"], numbers["capacity_tokens"]
    # Text that has not reached the capacity was never overwritten.
    is_sound = min(max(num_observed, 1), capacity_tokens) <= sizes[_ROWS] <= capacity_tokens
    for name, least in ((_BUCKETS, 1), (_UNIGRAMS, WAYS), (_CONTEXTS, WAYS)):
        is_sound = is_sound and sizes[name] >= least and sizes[name].bit_count() == 1
    if not is_sound:
        raise PoolFileError(f"header: expected sizes of a pool with {numbers}, got {sizes!r:.200}")
    return {
        name: tuple(size if isinstance(size, int) else sizes[size] for size in shape)
        for name, (_, shape) in ARRAYS.items()
    }


def _version_of_lade() -> str:
    try:
        return version("lade-decoding")
    except PackageNotFoundError:  # run from a folder of its source
        return "unknown"


# --- arrays -----------------------------------------------------------------------------------


def _nbytes(name: str, shape: tuple[int, ...]) -> int:
    return prod(shape) * np.dtype(_DTYPES[ARRAYS[name][0]]).itemsize


def _read_array(file: BinaryIO, name: str, shape: tuple[int, ...], checksums: str) -> NDArray[Any]:
    """Return the next array of a file; raise if it does not match its checksums."""
    offset = file.tell()
    array: NDArray[Any] = np.empty(shape, _DTYPES[ARRAYS[name][0]])
    for i, found in enumerate(_checksums(array, file)):
        if found != checksums[8 * i : 8 * i + 8]:
            begin, end = offset + i * _BLOCK, offset + min((i + 1) * _BLOCK, array.nbytes)
            raise PoolFileError(
                f"part {name!r}, bytes {begin} to {end}: it does not match its checksum"
            )
    return array


def _checksum(data: bytes | memoryview) -> str:
    return f"{zlib.crc32(data):08x}"


def _checksums(array: NDArray[Any], file: BinaryIO | None = None) -> list[str]:
    """Return the checksums of an array's blocks; if a file is given, read each block first."""
    checksums, data = [], array.data.cast("B")
    for begin in range(0, len(data), _BLOCK):
        block = data[begin : begin + _BLOCK]
        # Shorter if the file was cut during the read.
        if file is not None and file.readinto(block) < len(block):  # type: ignore[attr-defined]
            raise PoolFileError(f"arrays: the file ends at byte {file.tell()}, within them")
        checksums.append(_checksum(block))
    return checksums


# --- content ----------------------------------------------------------------------------------
#
# No accident passes the checksums, but a forged file may. For any contents, the kernels stay within
# the arrays and end (`test_files.py` runs them on noise). These checks are for all other code: ids
# are valid, and positions are consistent.


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
