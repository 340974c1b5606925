"""`PoolDelta`: what a pool learned since a stamp, small enough to be sent to others.

Its bytes are a header of JSON, which says how large everything is, and the compressed arrays:
no pickle, so that bytes of strangers can be read. Nothing here knows pools.

Next file: `pool.py`, which makes deltas (`NGramPool.delta`) and takes them (`NGramPool.merge`).
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ngram_pool._kernels import MAX_COST, MAX_TOKEN_ID, NONE, Int32Array, Int64Array
from ngram_pool.errors import PoolDeltaError

_MAGIC = b"ngramdlt"
_VERSION = 1
_MAX_HEADER = 2**16
_MAX_FINGERPRINT_LENGTH = 1000
_MAX_ORIGIN_LENGTH = 64
# Of 20,000 tokens of prompts in two bytes each, levels 1, 6 and 9 left 64, 61 and 61 %, the last
# one in twice the time, 4 ms.
_COMPRESSION = 1
_BYTES_PER_TEXT = 4 + 16
_BYTES_PER_SUCCESSOR = 4 + 2
#: What a delta may take in memory, unless another number is given.
DEFAULT_MAX_BYTES = 2**28
# By the numbers that describe a delta: the most that any may be. They bound what is unpacked.
_NUMBERS = {
    "num_tokens": 2**29,
    "num_texts": 2**29,
    "num_contexts": 2**26,
    "num_successors": 2**8,
    "num_known": 2**30,
    "num_left_out": 2**62,
}


class PoolStamp(NamedTuple):
    """A moment in the life of one pool."""

    #: Of the pool in memory: a copy of it, and what is loaded from its file, have others.
    origin: str
    num_observed: int  # tokens until then
    epoch: int  # grows with each stamp


@dataclass(frozen=True, slots=True, eq=False)
class PoolDelta:
    """What a pool observed and harvested between two stamps; never changed.

    It can be pickled, at the size of `to_bytes`. It holds text: whoever gets it can read all that
    users wrote and were answered in that time.
    """

    since: PoolStamp
    until: PoolStamp  # `since` of the next one
    tokenizer: str  # fingerprints, "" where unknown
    model: str
    token_ids: Int32Array  # [num_tokens], text after text
    bounds: Int32Array  # [num_texts + 1]: text i is token_ids[bounds[i] : bounds[i + 1]]
    #: int64 [num_texts, 2]: positions in the pool, of the token before a text, NONE where a
    #: sequence begins, and of its last token. They tell which text goes on with which.
    places: Int64Array
    keys: Int64Array  # [num_contexts], as those of a `SuccessorTable`; newest last
    successor_ids: Int32Array  # [num_contexts, num_successors], NONE where fewer are known
    costs: NDArray[np.uint16]  # as `successor_ids`
    num_left_out: int = 0  # tokens and contexts, oldest first, that were too many

    def __repr__(self) -> str:
        return (
            f"PoolDelta({self.since.origin!r}, epochs={self.since.epoch}..{self.until.epoch}, "
            f"num_tokens={self.num_tokens}, num_contexts={self.num_contexts})"
        )

    def __reduce__(self) -> tuple[Callable[[bytes], "PoolDelta"], tuple[bytes]]:
        return PoolDelta.from_bytes, (self.to_bytes(),)

    def __bool__(self) -> bool:
        """Return whether there is anything to take."""
        return bool(self.num_tokens or self.num_contexts)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of text."""
        return len(self.token_ids)

    @property
    def num_texts(self) -> int:
        """Number of texts; a sequence is one, or as many as there are deltas that it runs over."""
        return len(self.places)

    @property
    def num_contexts(self) -> int:
        """Number of contexts whose successors were harvested."""
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays in memory; `len(to_bytes())` is what is sent."""
        return sum(array.nbytes for array in self._arrays())

    def texts(self) -> Iterator[Int32Array]:
        """Return the texts, sequence by sequence, those that began first before others."""
        return (self.token_ids[begin:end] for begin, end in pairwise(self.bounds.tolist()))

    def newest(self, max_bytes: int) -> "PoolDelta":
        """Return a delta of at most so many `nbytes`: the newest text, then the newest contexts.

        Of a text that fits in part, its end is kept.
        """
        if self.nbytes <= max_bytes:
            return self
        sizes = np.diff(self.bounds).astype(np.int64)
        room = max_bytes - 4  # of the first bound
        behind = (4 * sizes + _BYTES_PER_TEXT)[::-1].cumsum()[::-1]  # of each text and those after
        first = int(np.searchsorted(-behind, -room))  # that fits as a whole
        begin, places = int(self.bounds[first]), self.places[first:]
        left = room - (int(behind[first]) if first < len(sizes) else 0) - _BYTES_PER_TEXT
        if first and left >= 4:
            first, begin = first - 1, begin - left // 4
            places = self.places[first:].copy()
            places[0, 0] = NONE
            left = 0
        else:
            left += _BYTES_PER_TEXT
        bounds = np.maximum(self.bounds[first:] - begin, 0)
        per_context = 8 + 6 * self.successor_ids.shape[1]
        from_context = self.num_contexts - min(self.num_contexts, max(0, left) // per_context)
        return PoolDelta(
            self.since,
            self.until,
            self.tokenizer,
            self.model,
            self.token_ids[begin:],
            bounds,
            places,
            self.keys[from_context:],
            self.successor_ids[from_context:],
            self.costs[from_context:],
            self.num_left_out + begin + from_context,
        )

    def to_bytes(self) -> bytes:
        """Return the delta as bytes: two per token of a vocabulary below 65536, less by zlib."""
        is_known = self.successor_ids != NONE
        known_ids = self.successor_ids[is_known]
        pairs = np.stack(np.divmod(self.keys, MAX_TOKEN_ID + 1))  # previous + 1, last
        largest = max(int(array.max(initial=0)) for array in (self.token_ids, known_ids, pairs))
        width = 2 if largest < 2**16 else 4
        header = {
            "version": _VERSION,
            "since": list(self.since),
            "until": list(self.until),
            "tokenizer": self.tokenizer,
            "model": self.model,
            "width": width,
            "num_tokens": self.num_tokens,
            "num_texts": self.num_texts,
            "num_contexts": self.num_contexts,
            "num_successors": self.successor_ids.shape[1],
            "num_known": len(known_ids),
            "num_left_out": self.num_left_out,
        }
        for name in ("tokenizer", "model"):
            _check_fingerprint(name, header[name])
        arrays = {
            "token_ids": self.token_ids,
            "sizes": np.diff(self.bounds),
            "places": self.places,
            "pairs": pairs,
            "nums_known": is_known.sum(1),
            "known_ids": known_ids,
            "known_costs": self.costs[is_known],
        }
        parts = _parts(header)
        body = b"".join(arrays[name].astype(dtype).tobytes() for name, (dtype, _) in parts.items())
        text = json.dumps(header, separators=(",", ":")).encode()
        sent = len(text).to_bytes(4, "little") + text + zlib.compress(body, _COMPRESSION)
        return _MAGIC + zlib.crc32(sent).to_bytes(4, "little") + sent

    @classmethod
    def from_bytes(cls, data: bytes, max_bytes: int = DEFAULT_MAX_BYTES) -> "PoolDelta":
        """Return the delta that `to_bytes` wrote; never more than its header announces.

        Args:
            data: that was sent.
            max_bytes: of all arrays of the delta. What is sent may be a thousandth of it.

        Raises:
            PoolDeltaError: these are not the bytes of a delta, or damaged, or of a newer version,
                or it is too large; nothing was unpacked then.
        """
        header, packed = _unwrapped(bytes(data))
        parts = _parts(header)
        nbytes = sum(np.dtype(dtype).itemsize * size for dtype, size in parts.values())
        num_made = nbytes + _BYTES_PER_SUCCESSOR * header["num_contexts"] * header["num_successors"]
        if num_made > max_bytes:
            raise PoolDeltaError(f"expected arrays of at most {max_bytes} bytes, got {num_made}")
        unpacking = zlib.decompressobj()
        try:
            body = unpacking.decompress(packed, nbytes + 1)
        except zlib.error as error:
            raise PoolDeltaError(f"expected compressed arrays ({error})") from None
        if len(body) != nbytes or not unpacking.eof or unpacking.unused_data:
            raise PoolDeltaError(f"expected arrays of {nbytes} bytes, got others")
        arrays: dict[str, NDArray[Any]] = {}
        offset = 0
        for name, (dtype, size) in parts.items():
            arrays[name] = np.frombuffer(body, dtype, size, offset)
            offset += arrays[name].nbytes
        return cls._of(header, arrays)

    @classmethod
    def _of(cls, header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> "PoolDelta":
        """Return a delta of the arrays that were sent, or raise."""
        sizes, nums_known = arrays["sizes"].astype(np.int64), arrays["nums_known"]
        places = arrays["places"].reshape(-1, 2).astype(np.int64)
        previous, last = arrays["pairs"].reshape(2, -1).astype(np.int64)
        shape = header["num_contexts"], header["num_successors"]
        is_sound = (
            sizes.min(initial=1) > 0
            and sizes.sum() == header["num_tokens"]
            and places.min(initial=0) >= NONE
            and (places[:, 0] < places[:, 1]).all()
            and nums_known.max(initial=0) <= shape[1]
            and nums_known.sum() == header["num_known"]
            and previous.max(initial=0) <= MAX_TOKEN_ID + 1
            and last.max(initial=0) <= MAX_TOKEN_ID
            and max(arrays[name].max(initial=0) for name in ("token_ids", "known_ids"))
            <= MAX_TOKEN_ID
        )
        if not is_sound:
            raise PoolDeltaError("expected token ids and positions, got others")
        successor_ids, costs = np.full(shape, NONE, np.int32), np.full(shape, MAX_COST, np.uint16)
        is_known = np.arange(shape[1]) < nums_known[:, None]
        successor_ids[is_known], costs[is_known] = arrays["known_ids"], arrays["known_costs"]
        return cls(
            PoolStamp(*header["since"]),
            PoolStamp(*header["until"]),
            header["tokenizer"],
            header["model"],
            arrays["token_ids"].astype(np.int32),
            np.concatenate([[0], sizes.cumsum()]).astype(np.int32),
            places,
            previous * (MAX_TOKEN_ID + 1) + last,
            successor_ids,
            costs,
            header["num_left_out"],
        )

    def _arrays(self) -> tuple[NDArray[Any], ...]:
        text = self.token_ids, self.bounds, self.places
        return *text, self.keys, self.successor_ids, self.costs


def _parts(header: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """Return the arrays in the order in which they are sent: type and size of each."""
    id_type = f"<u{header['width']}"
    num_contexts, num_known = header["num_contexts"], header["num_known"]
    return {
        "token_ids": (id_type, header["num_tokens"]),
        "sizes": ("<u4", header["num_texts"]),
        "places": ("<i8", 2 * header["num_texts"]),
        "pairs": (id_type, 2 * num_contexts),
        "nums_known": ("<u1", num_contexts),
        "known_ids": (id_type, num_known),
        "known_costs": ("<u2", num_known),
    }


def _unwrapped(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the compressed arrays of a delta, or raise."""
    if not data.startswith(_MAGIC) or len(data) < len(_MAGIC) + 8:
        raise PoolDeltaError("expected bytes that PoolDelta.to_bytes returned, got others")
    checksum, sent = data[len(_MAGIC) : len(_MAGIC) + 4], data[len(_MAGIC) + 4 :]
    if zlib.crc32(sent).to_bytes(4, "little") != checksum:
        raise PoolDeltaError("expected a whole delta, got one that does not match its checksum")
    end = 4 + int.from_bytes(sent[:4], "little")
    if end > min(_MAX_HEADER, len(sent)):
        raise PoolDeltaError(f"expected a header of at most {_MAX_HEADER} bytes, got {end}")
    try:
        header = json.loads(sent[4:end])
    except (ValueError, RecursionError) as error:
        raise PoolDeltaError(f"expected a header of JSON ({error})") from None
    _check_header(header)
    return header, sent[end:]


def _check_header(header: Any) -> None:
    if not isinstance(header, dict) or type(header.get("version")) is not int:
        raise PoolDeltaError("expected the header of a delta, got another")
    if header["version"] != _VERSION:
        raise PoolDeltaError(f"expected a delta of version {_VERSION}, got {header['version']}")
    names = {"version", "since", "until", "tokenizer", "model", "width", *_NUMBERS}
    if header.keys() != names:
        raise PoolDeltaError(f"expected a header of {sorted(names)}, got {sorted(header)}")
    for name, most in _NUMBERS.items():
        if type(header[name]) is not int or not 0 <= header[name] <= most:
            raise PoolDeltaError(f"expected {name} from 0 to {most}, got {header[name]!r:.40}")
    if type(header["width"]) is not int or header["width"] not in (2, 4):
        raise PoolDeltaError(f"expected a width of 2 or 4, got {header['width']!r:.40}")
    if header["num_known"] > header["num_contexts"] * header["num_successors"]:
        raise PoolDeltaError(f"expected fewer successors, got {header['num_known']}")
    # Rows are allocated in full, whatever is known.
    if header["num_contexts"] * header["num_successors"] > _NUMBERS["num_known"]:
        raise PoolDeltaError(f"expected fewer contexts, got {header['num_contexts']}")
    for name in ("tokenizer", "model"):
        _check_fingerprint(name, header[name])
    for name in ("since", "until"):
        if not _is_stamp(header[name]):
            raise PoolDeltaError(f"expected a stamp, got {header[name]!r:.80}")
    since, until = header["since"], header["until"]
    if since[0] != until[0] or since[1] > until[1] or since[2] >= until[2]:
        raise PoolDeltaError(f"expected a stamp after {since}, got {until}")


def _is_stamp(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and isinstance(value[0], str)
        and 0 < len(value[0]) <= _MAX_ORIGIN_LENGTH
        and all(type(number) is int and 0 <= number < 2**62 for number in value[1:])
    )


def _check_fingerprint(name: str, value: Any) -> None:
    if not isinstance(value, str) or len(value) > _MAX_FINGERPRINT_LENGTH:
        raise PoolDeltaError(
            f"expected the fingerprint {name!r} to be a string of at most "
            f"{_MAX_FINGERPRINT_LENGTH} characters, got {value!r:.40}"
        )
