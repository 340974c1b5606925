"""Traces: recorded answers with the target's likeliest tokens at every position, in a file.

The file is in the safetensors format, which holds numbers and text but never code. It has

    token_ids              int32   [num_tokens]                  all traces, one after another
    starts                 int64   [num_traces + 1]              where each begins; then num_tokens
    prompt_lengths         int64   [num_traces]                  the rest of a trace is the answer
    successor_token_ids    int32   [num_tokens, num_successors]  likeliest next tokens, best first
    successor_probs        float16 [num_tokens, num_successors]  their probabilities

and, as metadata under `lade_traces`, JSON with the version of this format, settings, environment,
and for each trace its id, its category and whether its answer ends in a loop. Next file:
`record.py`.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lade.drafting.successors import Successors

FORMAT_VERSION = 1

_KEY = "lade_traces"
_DTYPES: dict[str, np.dtype[Any]] = {
    "token_ids": np.dtype(np.int32),
    "starts": np.dtype(np.int64),
    "prompt_lengths": np.dtype(np.int64),
    "successor_token_ids": np.dtype(np.int32),
    "successor_probs": np.dtype(np.float16),
}


class Trace(NamedTuple):
    """One prompt, its answer, and the target's successors of each token."""

    id: str
    category: str
    loops: bool  # whether the answer ends in a loop
    token_ids: list[int]  # prompt and answer, at least one token each
    num_prompt_tokens: int
    successors: Successors  # [num_tokens, num_successors]

    @property
    def num_answer_tokens(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True)
class Traces:
    """The traces of one recording; all have the same number of successors."""

    traces: Sequence[Trace]
    settings: dict[str, Any]  # of the recording, ready for JSON
    environment: dict[str, Any]  # of the recording, ready for JSON

    @property
    def max_new_tokens(self) -> int:
        """Maximum length of an answer; shorter ones ended in an EOS token."""
        return int(self.settings["max_new_tokens"])

    @property
    def vocab_size(self) -> int:
        """Vocabulary size; every token id is below it."""
        return int(self.settings["vocab_size"])

    @property
    def num_successors(self) -> int:
        """Number of the likeliest tokens that are known at each position."""
        return int(self.traces[0].successors.token_ids.shape[1])


def write_traces(path: Path, recorded: Traces) -> None:
    """Write a file of traces, completely or, whatever goes wrong, not at all."""
    from safetensors.numpy import save

    traces = recorded.traces
    arrays = {
        "token_ids": np.concatenate([np.array(trace.token_ids) for trace in traces]),
        "starts": np.cumsum([0, *(len(trace.token_ids) for trace in traces)]),
        "prompt_lengths": np.array([trace.num_prompt_tokens for trace in traces]),
        "successor_token_ids": np.concatenate([trace.successors.token_ids for trace in traces]),
        "successor_probs": np.concatenate([trace.successors.probs for trace in traces]),
    }
    described = {
        "version": FORMAT_VERSION,
        "settings": recorded.settings,
        "environment": recorded.environment,
        "traces": [
            {"id": trace.id, "category": trace.category, "loops": trace.loops} for trace in traces
        ],
    }
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_bytes(
            save(
                {
                    name: np.ascontiguousarray(arrays[name], dtype)
                    for name, dtype in _DTYPES.items()
                },
                {_KEY: json.dumps(described)},
            )
        )
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_traces(path: Path) -> Traces:
    """Read a file of traces and check all of it.

    Raises:
        ValueError: it is not such a file, of another version, or damaged; says where.
        OSError: it cannot be read.
    """
    try:
        arrays, described = _load(path)
        _check_arrays(arrays)
        _check_description(arrays, described)
    except _TraceFileError as error:
        raise ValueError(
            f"expected {path.name} to hold traces of lade bench record: {error}"
        ) from None
    starts = arrays["starts"].tolist()
    known_ids = arrays["successor_token_ids"]
    known_probs = arrays["successor_probs"].astype(np.float32)
    traces = [
        Trace(
            **entry,
            token_ids=arrays["token_ids"][start:stop].tolist(),
            num_prompt_tokens=num_prompt_tokens,
            successors=Successors(known_ids[start:stop], known_probs[start:stop]),
        )
        for entry, (start, stop), num_prompt_tokens in zip(
            described["traces"], pairwise(starts), arrays["prompt_lengths"].tolist(), strict=True
        )
    ]
    return Traces(traces, described["settings"], described["environment"])


# --- checks ---------------------------------------------------------------------------------

_Arrays = dict[str, NDArray[Any]]


class _TraceFileError(Exception):
    """A fault in a file of traces."""


def _load(path: Path) -> tuple[_Arrays, dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    with path.open("rb"):  # to tell a missing file from a wrong one
        pass
    try:
        with safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get(_KEY)
            if text is None:
                raise _TraceFileError(f"expected metadata {_KEY!r}, got none")
            described = json.loads(text)
            names = set(file.keys())
            _expect(names == set(_DTYPES), f"the arrays {', '.join(_DTYPES)}", sorted(names))
            return {name: file.get_tensor(name) for name in _DTYPES}, described
    except (SafetensorError, json.JSONDecodeError) as error:
        raise _TraceFileError(str(error)) from None


def _check_arrays(arrays: _Arrays) -> None:
    for name, dtype in _DTYPES.items():
        _expect(arrays[name].dtype == dtype, f"{name} as {dtype}", arrays[name].dtype)
        num_dims = 2 if name.startswith("successor") else 1
        _expect(arrays[name].ndim == num_dims, f"{name} with {num_dims} axes", arrays[name].shape)
    starts, lengths = arrays["starts"], arrays["prompt_lengths"]
    num_tokens = len(arrays["token_ids"])
    _expect(len(lengths) > 0, "a trace or more", "none")
    _expect(
        len(starts) == len(lengths) + 1, f"{len(lengths) + 1} starts for the prompts", len(starts)
    )
    _expect(
        starts[0] == 0 and starts[-1] == num_tokens,
        f"starts from 0 to {num_tokens}, the number of tokens",
        f"{starts[0]} to {starts[-1]}",
    )
    sizes = np.diff(starts)
    wrong = np.flatnonzero((lengths < 1) | (sizes <= lengths))
    if len(wrong):
        number = int(wrong[0])
        _expect(
            False,
            f"a prompt and an answer in trace {number}",
            f"{sizes[number]} tokens, {lengths[number]} of them the prompt",
        )
    token_ids, probs = arrays["successor_token_ids"], arrays["successor_probs"]
    _expect(
        token_ids.shape == probs.shape and len(probs) == num_tokens and probs.shape[1] > 0,
        f"successors of {num_tokens} tokens, with a probability each",
        f"{token_ids.shape} and {probs.shape}",
    )
    _expect(bool(((probs >= 0) & (probs <= 1)).all()), "successor_probs from 0 to 1", "others")
    _expect(bool((np.diff(probs) <= 0).all()), "successors with the likeliest first", "others")


def _check_description(arrays: _Arrays, described: Any) -> None:
    _expect(isinstance(described, dict), "a JSON object as metadata", type(described).__name__)
    version = described.get("version")
    _expect(version == FORMAT_VERSION, f"version {FORMAT_VERSION} of the format", version)
    for name in ("settings", "environment"):
        _expect(
            isinstance(described.get(name), dict), f"{name} in the metadata", described.get(name)
        )
    settings, entries = described["settings"], described.get("traces")
    for name in ("vocab_size", "max_new_tokens"):
        value = settings.get(name)
        _expect(type(value) is int and value > 0, f"{name} of 1 or more in the settings", value)
    for name in ("token_ids", "successor_token_ids"):
        least, most = arrays[name].min(), arrays[name].max()
        _expect(
            least >= 0 and most < settings["vocab_size"],
            f"{name} from 0 and below vocab_size {settings['vocab_size']}",
            f"{least} to {most}",
        )
    longest = (np.diff(arrays["starts"]) - arrays["prompt_lengths"]).max()
    _expect(
        longest <= settings["max_new_tokens"],
        f"answers of at most max_new_tokens {settings['max_new_tokens']}",
        longest,
    )
    num_traces = len(arrays["prompt_lengths"])
    _expect(
        isinstance(entries, list) and len(entries) == num_traces,
        f"{num_traces} traces in the metadata",
        len(entries) if isinstance(entries, list) else entries,
    )
    types = {"id": str, "category": str, "loops": bool}
    for number, entry in enumerate(entries):
        _expect(
            isinstance(entry, dict)
            and {name: type(value) for name, value in entry.items()} == types,
            f"id, category and loops of trace {number} in the metadata",
            entry,
        )


def _expect(is_so: bool, what: str, got: object) -> None:
    if not is_so:
        raise _TraceFileError(f"expected {what}, got {got}")
