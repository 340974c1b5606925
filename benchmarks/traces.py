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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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
    """Write a file of traces, completely or not at all."""
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
    typed = {name: np.ascontiguousarray(arrays[name], dtype) for name, dtype in _DTYPES.items()}
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_bytes(save(typed, {_KEY: json.dumps(described)}))
    unfinished.replace(path)


def read_traces(path: Path) -> Traces:
    """Read a file of traces.

    Raises:
        ValueError: it is not such a file, of another version, or damaged.
        OSError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    with path.open("rb"):  # to tell a missing file from a wrong one
        pass
    try:
        with safe_open(path, framework="numpy") as file:
            described = json.loads(file.metadata()[_KEY])
            arrays = {name: file.get_tensor(name) for name in _DTYPES}
        if described["version"] != FORMAT_VERSION:
            raise ValueError(f"its version is {described['version']}, not {FORMAT_VERSION}")
        probs = arrays["successor_probs"].astype(np.float32)
        traces = [
            Trace(
                **entry,
                token_ids=arrays["token_ids"][start:stop].tolist(),
                num_prompt_tokens=num_prompt_tokens,
                successors=Successors(arrays["successor_token_ids"][start:stop], probs[start:stop]),
            )
            for entry, (start, stop), num_prompt_tokens in zip(
                described["traces"],
                pairwise(arrays["starts"].tolist()),
                arrays["prompt_lengths"].tolist(),
                strict=True,
            )
        ]
        return Traces(traces, described["settings"], described["environment"])
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"expected {path.name} to hold traces of record: {error!r}") from None
