"""The file of a pool: safetensors, with the arrays that a pool works on.

`docs/internals/files.md` describes the format. What a file says of its arrays is held against what
a pool of its size must have before anything is allocated; then every block is held against its
checksum, and every position against the others, before any of it is used.

Next file: `writing.py`.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ngram_pool._kernels import (
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
_VERSION = 1
_BLOCK = 2**22  # bytes of an array that share a checksum
_MAX_HEADER = 2**20  # bytes; enough for the checksums of half a terabyte
_ALIGNMENT = 64
# Far above weights and counts, and so low that sums of products of them are finite in float64.
_MAX_FLOAT = float(np.finfo(np.float32).max)
# By the numbers that describe a pool: their bounds.
_NUMBERS = {
    "max_ngram_size": (1, 2**31 - 1),
    "capacity_tokens": (1, 2**31 - 1),
    "num_observed": (0, 2**31 - 1),
    "hash_seed": (0, 2**60 - 1),
}
# Arrays in the order of a file, which keeps all of them aligned: the widest numbers come first.
DTYPES = {
    "harvested.keys": "I64",
    "unigrams.counts": "F64",
    "weights": "F64",
    "sequence": "I64",
    "text": "I32",
    "links": "I32",
    "heads": "I32",
    "harvested.counts": "I32",
    "harvested.token_ids": "I32",
    "unigrams.token_ids": "I32",
    "harvested.costs": "U16",
}
_NUMPY_DTYPES = {"I64": np.int64, "F64": np.float64, "I32": np.int32, "U16": np.uint16}
_METADATA = "__metadata__"
_CHECKSUM = "crc32."  # begins the names of checksums
_BEFORE_CHECKSUM = b'"crc32.header":"'  # cannot be part of a string in JSON
_NO_CHECKSUM = "00000000"
_IS_ANOTHER = "expected a file that NGramPool.save wrote, got another"


class StoredPool(NamedTuple):
    """What a file holds of a pool."""

    max_ngram_size: int
    capacity_tokens: int
    num_observed: int  # the next position
    hash_seed: int
    tokenizer: str  # fingerprints, "" where unknown
    model: str
    arrays: Mapping[str, NDArray[Any]]  # contiguous, by the names in `DTYPES`


def write_pool(path: Path, stored: StoredPool) -> None:
    """Write a pool's file, as `write_whole` does.

    Raises:
        OSError: the file cannot be written; the old one is as it was.
        TypeError: a fingerprint is not a string.
        ValueError: a fingerprint is longer than a header may be.
    """
    for name in ("tokenizer", "model"):
        text = getattr(stored, name)
        if not isinstance(text, str):
            raise TypeError(f"expected the fingerprint {name!r} to be a string, got {text!r}")
    arrays = {name: stored.arrays[name] for name in DTYPES}
    described = {name: str(value) for name, value in stored._asdict().items() if name != "arrays"}
    described |= {"format": _FORMAT, "version": str(_VERSION), "lade": _version_of_lade()}
    for name, array in arrays.items():
        described[_CHECKSUM + name] = "".join(_checksums(array))
    begin = _begin_of_file(described, {name: array.shape for name, array in arrays.items()})
    write_whole(path, begin, *(array.data for array in arrays.values()))


def read_pool(path: Path) -> StoredPool:
    """Read a pool's file into memory of this process, whatever becomes of the file later.

    Raises:
        OSError: the file cannot be read.
        PoolFileError: it is no pool's file, of a newer format, or damaged.
    """
    if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would be waited for
        raise PoolFileError(f"{path}: expected a file")
    with open(path, "rb") as file:
        try:
            return _read(file)
        except PoolFileError as error:
            raise type(error)(f"{path}: {error}") from None


def check_begin(path: Path) -> None:
    """Raise for a file that does not begin as a pool's does; the rest of it is not read.

    Raises:
        OSError: the file cannot be read.
        PoolFileError: it is no pool's file, or of a newer format.
    """
    with open(path, "rb") as file:
        try:
            _parsed(_read_begin(file, os.fstat(file.fileno()).st_size))
        except PoolFileError as error:
            raise type(error)(f"{path}: {error}") from None


def stamp_of(path: Path) -> str | None:
    """Return what tells the contents of a pool's file from others; None if there is no file.

    It is a hash of the header, which has the checksums of all the rest.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(begin := file.read(8), "little")
            return hashlib.sha256(begin + file.read(min(length, _MAX_HEADER))).hexdigest()
    except FileNotFoundError:
        return None


def _read(file: BinaryIO) -> StoredPool:
    size = os.fstat(file.fileno()).st_size
    begin = _read_begin(file, size)
    header = _parsed(begin)
    described = header[_METADATA]
    numbers = {name: _number(described, name, *bounds) for name, bounds in _NUMBERS.items()}
    shapes = _shapes(header, **numbers)
    _compare(header, shapes)
    expected_size = len(begin) + sum(_nbytes(name, shape) for name, shape in shapes.items())
    if size != expected_size:
        raise PoolFileError(f"expected {expected_size} bytes, got {size}")
    arrays = {
        name: _read_array(file, name, shape, described[_CHECKSUM + name])
        for name, shape in shapes.items()
    }
    tokenizer, model = described["tokenizer"], described["model"]
    stored = StoredPool(**numbers, tokenizer=tokenizer, model=model, arrays=arrays)
    _check_content(stored)
    return stored


# --- header -----------------------------------------------------------------------------------


def _begin_of_file(described: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """Return a file up to its arrays: the length of the header, and the header."""
    header = {_METADATA: {**described, "crc32.header": _NO_CHECKSUM}, **_entries(shapes)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > _MAX_HEADER:
        raise ValueError(f"expected a header of at most {_MAX_HEADER} bytes, got {len(text)}")
    begin = len(text).to_bytes(8, "little") + text
    at = begin.index(_BEFORE_CHECKSUM) + len(_BEFORE_CHECKSUM)
    return begin[:at] + _checksum(begin).encode() + begin[at + len(_NO_CHECKSUM) :]


def _read_begin(file: BinaryIO, size: int) -> bytes:
    """Return a file up to its arrays, or raise unless it is what a pool's file begins with."""
    begin = file.read(8)
    length = int.from_bytes(begin, "little")
    if len(begin) < 8 or length > _MAX_HEADER:
        raise PoolFileError(_IS_ANOTHER)
    begin += file.read(length)
    if len(begin) < 8 + length:
        raise PoolFileError(f"header: expected bytes 8 to {8 + length}, got {size} bytes in all")
    at = begin.find(_BEFORE_CHECKSUM)
    if at < 0:
        raise PoolFileError(_IS_ANOTHER)
    at += len(_BEFORE_CHECKSUM)
    without = begin[:at] + _NO_CHECKSUM.encode() + begin[at + len(_NO_CHECKSUM) :]
    if begin[at : at + len(_NO_CHECKSUM)] != _checksum(without).encode():
        raise PoolFileError(f"header, bytes 0 to {8 + length}: it does not match its checksum")
    return begin


def _parsed(begin: bytes) -> dict[str, Any]:
    """Return a header whose metadata is that of a pool in this format, or raise."""
    try:
        header = json.loads(begin[8:].decode(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise PoolFileError(f"header: expected JSON ({error})") from None
    if not isinstance(header, dict) or not isinstance(header.get(_METADATA), dict):
        raise PoolFileError(_IS_ANOTHER)
    described = header[_METADATA]
    if described.get("format") != _FORMAT:
        raise PoolFileError(_IS_ANOTHER)
    if (found := _number(described, "version", 1, 2**31)) > _VERSION:
        raise NewerPoolFileError(
            f"it has format {found}, of a newer version of lade ({described.get('lade')!r:.40}); "
            f"this one reads format {_VERSION}"
        )
    names = {*_NUMBERS, "tokenizer", "model", "format", "version", "lade", "crc32.header"}
    names |= {_CHECKSUM + name for name in DTYPES}
    if {*described} != names or not all(isinstance(text, str) for text in described.values()):
        raise PoolFileError(f"header: expected the strings {sorted(names)} as metadata, got others")
    return header


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is repeated")
    return found


def _number(described: Mapping[str, Any], name: str, least: int, most: int) -> int:
    text = described.get(name)
    if isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) < 20:
        number = int(text)
        if least <= number <= most:
            return number
    raise PoolFileError(f"header: expected {name} from {least} to {most}, got {text!r:.40}")


def _shapes(
    header: Mapping[str, Any],
    max_ngram_size: int,
    capacity_tokens: int,
    num_observed: int,
    hash_seed: int,
) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the arrays of a pool must have, or raise.

    Only how far each has grown is taken from the arrays themselves.
    """
    num_rows = _size(header, "text", 0)
    # Text that has not reached the capacity was never overwritten.
    if not min(max(num_observed, 1), capacity_tokens) <= num_rows <= capacity_tokens:
        raise PoolFileError(
            f"part 'text': expected rows for {num_observed} tokens and at most {capacity_tokens}, "
            f"got {num_rows}"
        )
    num_buckets = _size(header, "heads", 1, is_power_of_two=True)
    num_unigrams = _size(header, "unigrams.counts", 0, is_power_of_two=True, least=WAYS)
    num_contexts = _size(header, "harvested.keys", 0, is_power_of_two=True, least=WAYS)
    shapes = {
        "text": (num_rows, 3),
        "links": (num_rows, max_ngram_size),
        "heads": (max_ngram_size, num_buckets),
        "sequence": (3,),
        "weights": (NUM_WEIGHT_ROWS, NUM_WEIGHTS),
        "unigrams.token_ids": (num_unigrams,),
        "unigrams.counts": (num_unigrams,),
        "harvested.keys": (num_contexts,),
        "harvested.counts": (num_contexts,),
        "harvested.token_ids": (num_contexts, DEFAULT_NUM_SUCCESSORS),
        "harvested.costs": (num_contexts, DEFAULT_NUM_SUCCESSORS),
    }
    return {name: shapes[name] for name in DTYPES}


def _size(
    header: Mapping[str, Any], name: str, axis: int, is_power_of_two: bool = False, least: int = 1
) -> int:
    """Return the size of an array along an axis, or raise."""
    entry = header.get(name)
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if isinstance(shape, list) and len(shape) > axis and type(shape[axis]) is int:
        size: int = shape[axis]
        if size >= least and (size.bit_count() == 1 or not is_power_of_two):
            return size
    kind = "a power of two" if is_power_of_two else "a number"
    raise PoolFileError(f"part {name!r}: expected {kind} from {least}, got {entry!r:.80}")


def _entries(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return what a header says of arrays."""
    entries = {}
    begin = 0
    for name, shape in shapes.items():
        end = begin + _nbytes(name, shape)
        offsets = [begin, end]
        entries[name] = {"dtype": DTYPES[name], "shape": [*shape], "data_offsets": offsets}
        begin = end
    return entries


def _compare(header: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise unless a header says of the arrays what it should, and nothing else."""
    entries = _entries(shapes)
    for name, expected in entries.items():
        # As text, because 1 equals 1.0 and True.
        if json.dumps(header.get(name), sort_keys=True) != json.dumps(expected, sort_keys=True):
            raise PoolFileError(
                f"part {name!r}: expected {expected}, got {header.get(name)!r:.120}"
            )
    if others := {*header} - {*entries, _METADATA}:
        raise PoolFileError(f"header: expected no other parts, got {sorted(others)!r:.80}")


def _version_of_lade() -> str:
    try:
        return version("lade-decoding")
    except PackageNotFoundError:  # run from a folder of its source
        return "unknown"


# --- arrays -----------------------------------------------------------------------------------


def _nbytes(name: str, shape: tuple[int, ...]) -> int:
    return prod(shape) * np.dtype(_NUMPY_DTYPES[DTYPES[name]]).itemsize


def _read_array(file: BinaryIO, name: str, shape: tuple[int, ...], checksums: str) -> NDArray[Any]:
    """Return the array that a file goes on with, or raise unless it matches its checksums."""
    offset = file.tell()
    array: NDArray[Any] = np.empty(shape, _NUMPY_DTYPES[DTYPES[name]])
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
    """Return the checksums of an array's blocks, which are read first if a file is given."""
    checksums, data = [], array.data.cast("B")
    for begin in range(0, len(data), _BLOCK):
        block = data[begin : begin + _BLOCK]
        # Shorter where the file was cut while it is read.
        if file is not None and file.readinto(block) < len(block):  # type: ignore[attr-defined]
            raise PoolFileError(f"arrays: the file ends at byte {file.tell()}, within them")
        checksums.append(_checksum(block))
    return checksums


# --- content ----------------------------------------------------------------------------------
#
# No accident passes the checksums, but a file may be made to. The kernels stay within the arrays
# and end whatever these hold (`test_files.py` lets them run on noise); what is checked here is what
# everything else may rely on: that positions lead where they should, and ids are ids.


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
    _check_range("weights", arrays, -_MAX_FLOAT, _MAX_FLOAT)
    _check_range("unigrams.counts", arrays, 0, _MAX_FLOAT)
    _check_range("unigrams.token_ids", arrays, NONE, MAX_TOKEN_ID)
    _check_range("harvested.keys", arrays, NONE, (MAX_TOKEN_ID + 1) ** 2 + MAX_TOKEN_ID)
    _check_range("harvested.counts", arrays, 0, MAX_TOKEN_ID)
    _check_range("harvested.token_ids", arrays, NONE, MAX_TOKEN_ID)


def check_text(
    text: NDArray[Any], links: NDArray[Any], heads: NDArray[Any], num_observed: int
) -> None:
    """Raise unless a text is as the pool leaves it.

    Ids are ids or places empty, every position is one that was observed, those before and after a
    token name each other, and every chain leads to ever older positions.
    """
    num_rows = len(text)
    first = max(0, num_observed - num_rows)
    positions = np.arange(first, num_observed)
    rows = positions % num_rows
    ids, before, after = text[rows].T
    is_last = after == NONE
    is_sound = (ids >= NONE) & (before >= NONE) & (before < positions)
    is_sound &= (ids != NONE) | ((before == NONE) & is_last)  # forgotten
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


def _check_range(name: str, arrays: Mapping[str, NDArray[Any]], least: float, most: float) -> None:
    array = arrays[name]
    if not (least <= array.min() and array.max() <= most):  # False for NaN
        raise PoolFileError(f"part {name!r}: expected values from {least} to {most}")
