"""Baselines: transformers' own `generate`, and the types that all methods share.

Nothing here imports numba or the pool, so that a process measuring the memory of a baseline holds
only what a user of transformers would have. Next file: `methods.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from lade.bench.device import wait_for
from lade.bench.forwards import counting_forwards
from lade.config import Config, Verification
from lade.models.loading import LoadedModel
from lade.stats import DecodeStats

if TYPE_CHECKING:
    from ngram_pool import NGramPool

_LOOKUP_TOKENS = 10  # for transformers' prompt lookup: its documented setting


class Answer(NamedTuple):
    """One method's answer to a prompt or batch."""

    rows: list[list[int]]  # per sequence, the new tokens up to and including its EOS
    sec: float  # the whole call, prefill included
    num_steps: int  # forwards after the first
    num_row_steps: int  # rows still decoding, summed over those steps
    num_draft_tokens: int  # verified in those steps, over all rows
    stats: DecodeStats | None = None
    cpu_sec: float | None = None  # of all threads of the process

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows, without padding."""
        return sum(len(row) for row in self.rows)


#: Answers the rows of `inputs` with a model, given the options of `generate`. One object serves one
#: pass over the prompts.
Method = Callable[[Any, dict[str, Any], dict[str, Any]], Answer]


class Given(NamedTuple):
    """What the methods of a run are made with."""

    config: Config = Config()
    pools: "Sequence[NGramPool]" = ()  # that methods which take pools read
    own: "NGramPool | None" = None  # that the method which keeps a pool learns into; else a new one
    assistant: LoadedModel | None = None
    tokenizer: Any = None  # of the target, beside an assistant
    num_layers: int | None = None  # first layers that draft
    prediction: Sequence[int] = ()  # of every answer, as token ids


class MethodInfo(NamedTuple):
    """What a method is, and how to make it for one pass."""

    make: Callable[[Given], Method]
    description: str
    is_default: bool = True  # else run only when named
    is_single_row: bool = False  # cannot decode a batch or several sequences per prompt
    takes: str | None = None  # "pools", "prediction", "assistant" or "num_layers" of `Given`
    keeps_pool: bool = False  # one pool for all prompts, which may be `Given.own`
    verification: Verification | None = None  # if the method fixes one


def plain(model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> Answer:
    """Run `model.generate`."""
    rows, sec = _timed(model, inputs, options)
    num_row_steps = sum(len(row) for row in rows) - len(rows)  # prefill yields one token per row
    return Answer(rows, sec, max(len(row) for row in rows) - 1, num_row_steps, 0)


class TransformersAssisted:
    """Transformers' own assisted decoding of a single row, by options of `generate`.

    Its first forward runs the prompt with a draft attached; tokens accepted there are counted as if
    later steps had made them, which flatters its MAT a little. When it samples, it draws for the
    whole draft at once: its text is as likely as plain's, but differs for the same seed.

    Drafting, for it, is all that happens between two forwards of the model.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options

    def __call__(self, model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> Answer:
        """Answer the one row of `inputs`."""
        exit_layer = self._options.get("assistant_early_exit")
        with counting_forwards(model, exit_layer) as forwards:
            rows, sec = _timed(model, inputs, {**options, **self._options})
        stats = forwards.stats(inputs["input_ids"].shape[1], len(rows[0]), sec)
        return Answer(rows, sec, stats.num_steps, stats.num_steps, stats.num_draft_tokens, stats)


def prompt_lookup(given: Given) -> Method:
    """Return transformers' prompt lookup, with ten tokens unless the config says how many."""
    asked = given.config.max_draft_tokens
    if asked == 0:  # transformers refuses it; no draft is plain decoding
        return plain
    return TransformersAssisted({"prompt_lookup_num_tokens": asked or _LOOKUP_TOKENS})


#: By name.
BASELINES: dict[str, MethodInfo] = {
    "plain": MethodInfo(lambda given: plain, "generate, one token a step"),
    "prompt_lookup": MethodInfo(
        prompt_lookup,
        "transformers' prompt_lookup_num_tokens=10, or as many as max_draft_tokens says",
        is_single_row=True,
    ),
}


def new_rows(model: Any, sequences: Tensor, num_prompt_tokens: int) -> list[list[int]]:
    """Return the new tokens of each row, up to and including its first EOS."""
    eos_token_id = model.generation_config.eos_token_id
    ends = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
    rows: list[list[int]] = sequences[:, num_prompt_tokens:].tolist()
    lengths = [next((i + 1 for i, t in enumerate(row) if t in ends), len(row)) for row in rows]
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def answer_of(model: Any, inputs: dict[str, Any], output: Any, sec: float) -> Answer:
    """Return what lade answered to `inputs` in a call of `sec` seconds, with its statistics."""
    rows = new_rows(model, output.sequences, inputs["input_ids"].shape[1])
    stats: DecodeStats = output.stats
    counts = stats.num_steps, stats.num_row_steps, stats.num_draft_tokens
    return Answer(rows, sec, *counts, stats)


def _timed(
    model: Any, inputs: dict[str, Any], options: dict[str, Any]
) -> tuple[list[list[int]], float]:
    start = perf_counter()
    # The class's generate, in case the model is wrapped.
    output = type(model).generate(model, **inputs, **options)
    wait_for(model.device)
    sec = perf_counter() - start
    return new_rows(model, output, inputs["input_ids"].shape[1]), sec
