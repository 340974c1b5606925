"""Ways of answering, all with the same model: transformers' own `generate`, and lade.

Next file: `run.py`.
"""

import math
from collections.abc import Callable, Sequence
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lade.compat import end_tokens
from lade.config import Config
from lade.drafting.drafter import Drafter
from lade.hf.api import generate
from lade.stats import DecodeStats
from ngram_pool import NGramPool

_LOOKUP_TOKENS = 10  # for transformers' prompt lookup: its documented setting


class Answer(NamedTuple):
    """One method's answer to a prompt or batch."""

    rows: list[list[int]]  # per sequence, the new tokens up to and including its EOS
    sec: float  # the whole call, prefill included
    stats: DecodeStats  # of methods other than lade the counts alone, without times
    cpu_sec: float = math.nan  # of all threads; NaN if it was not measured

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows, without padding."""
        return sum(len(row) for row in self.rows)

    @property
    def tokens_per_sec(self) -> float:
        """New tokens a second of the whole call."""
        return self.num_tokens / self.sec


#: Answers the rows of `inputs` with a model, given the options of `generate`. One object serves one
#: pass over the prompts.
Method = Callable[[Any, dict[str, Any], dict[str, Any]], Answer]


def plain(model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> Answer:
    """Run `model.generate`."""
    rows, (sec, cpu_sec) = _standard(model, inputs, options)
    stats = DecodeStats(num_steps=max(map(len, rows)) - 1, num_prefills=len(rows))
    stats.num_row_steps = stats.num_committed_tokens = sum(map(len, rows)) - len(rows)
    return Answer(rows, sec, stats, cpu_sec)


def assisted(**more: Any) -> Method:
    """Return transformers' own assisted decoding of a single row, by options of `generate`.

    Its first forward runs the prompt with a draft attached, which is counted as if later steps had
    verified it; that flatters its MAT a little. When it samples, it draws for the
    whole draft at once: its text is as likely as plain's, but differs for the same seed.
    """

    def answer(model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> Answer:
        sizes: list[int] = []
        base = getattr(model, model.base_model_prefix, model)
        num_layers = base.config.num_hidden_layers

        def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            # With fewer layers the model drafts for itself, and transformers says so in its config.
            if base.config.num_hidden_layers == num_layers:
                sizes.append(kwargs["input_ids"].shape[1])

        hook = model.register_forward_pre_hook(count, with_kwargs=True)
        try:
            rows, (sec, cpu_sec) = _standard(model, inputs, {**options, **more})
        finally:
            hook.remove()
        num_steps, num_committed = len(sizes) - 1, len(rows[0]) - 1
        num_drafted = sum(sizes) - inputs["input_ids"].shape[1] - num_steps
        stats = DecodeStats(num_steps, num_steps, num_drafted, num_prefills=1)
        stats.num_committed_tokens = num_committed
        stats.num_accepted_tokens = max(0, num_committed - num_steps)
        return Answer(rows, sec, stats, cpu_sec)

    return answer


#: transformers' prompt lookup.
prompt_lookup = assisted(prompt_lookup_num_tokens=_LOOKUP_TOKENS)


def by_lade(
    config: Config | None = None,
    pool: NGramPool | Sequence[NGramPool] | None = None,
    drafter: Drafter | None = None,
) -> Method:
    """Return `lade.generate`; given pools or a drafter are kept, else each call has a new pool."""
    more = {"config": config, "pool": pool, "drafter": drafter, "return_dict_in_generate": True}

    def answer(model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> Answer:
        output, (sec, cpu_sec) = timed(generate, model, {**inputs, **more, **options})
        rows = new_rows(model, output.sequences, inputs["input_ids"].shape[1])
        return Answer(rows, sec, output.stats, cpu_sec)

    return answer


#: What makes the methods of `lade bench` for one pass, by name, in the order of tables.
METHODS: dict[str, Callable[[], Method]] = {
    "plain": lambda: plain,
    "prompt_lookup": lambda: prompt_lookup,
    "no_drafts": lambda: by_lade(Config(max_draft_tokens=0)),
    "lade": lambda: by_lade(pool=NGramPool(seed=0)),
    "lade_fresh": by_lade,
}


def new_rows(model: Any, sequences: Tensor, num_prompt_tokens: int) -> list[list[int]]:
    """Return the new tokens of each row, up to and including its first EOS."""
    ends = end_tokens(model.generation_config)
    rows: list[list[int]] = sequences[:, num_prompt_tokens:].tolist()
    lengths = [next((i + 1 for i, t in enumerate(row) if t in ends), len(row)) for row in rows]
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def _standard(
    model: Any, inputs: dict[str, Any], options: dict[str, Any]
) -> tuple[list[list[int]], tuple[float, float]]:
    # By the class's generate, in case the model is wrapped.
    output, took = timed(type(model).generate, model, {**inputs, **options})
    return new_rows(model, output, inputs["input_ids"].shape[1]), took


def timed(
    run: Callable[..., Any], model: Any, given: dict[str, Any]
) -> tuple[Any, tuple[float, float]]:
    """Return what a call returns, and its seconds and those of all CPU cores."""
    start, cpu_start = perf_counter(), process_time()
    output = run(model, **given)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return output, (perf_counter() - start, process_time() - cpu_start)
