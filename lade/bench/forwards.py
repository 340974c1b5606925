"""What forwards of transformers' own assisted decoding tell: counts and times of its steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from lade.bench.device import wait_for
from lade.compat import CACHE
from lade.stats import DecodeStats, Step


class Forwards:
    """The target's forwards of a call with one row, in order."""

    def __init__(self) -> None:
        self.num_tokens: list[int] = []
        self.num_cached: list[int | None] = []  # tokens in its cache before; None without a cache
        self.sec: list[float] = []

    def stats(self, num_prompt_tokens: int, num_tokens: int, sec: float) -> DecodeStats:
        """Return counts and times of a call, as lade counts its own.

        Between two forwards the cache grows by the tokens that were committed: so many draft tokens
        were accepted, and a bonus token. What follows the last forward is the rest of the answer.

        Args:
            sec: time of the call; what is not the target's forwards is drafting.
        """
        stats = DecodeStats(num_prefills=1)
        stats.prefill_sec, stats.forward_sec = self.sec[0], sum(self.sec[1:])
        stats.draft_sec = max(0.0, sec - sum(self.sec))
        # Without caches, each forward runs the whole text and its draft.
        starts = [num_prompt_tokens if n is None else n for n in self.num_cached[1:]]
        ends = [*starts[1:], num_prompt_tokens + num_tokens - 1]
        for num_run, start, end in zip(self.num_tokens[1:], starts, ends, strict=True):
            num_drafted = num_run - 1
            num_new = min(max(end - start, 1), num_drafted + 1)
            stats.num_steps += 1
            is_corrected = num_new <= num_drafted
            stats.count_row_step(Step([0] * num_new, num_drafted, num_new - 1, 0, is_corrected))
        return stats


@contextmanager
def counting_forwards(model: Any, exit_layer: int | None = None) -> Iterator[Forwards]:
    """Yield what receives the forwards of a model.

    Args:
        exit_layer: layers after which drafting forwards of the same model end: those are not
            counted. transformers says so in the model's config while it drafts.
    """
    found = Forwards()
    base = getattr(model, model.base_model_prefix, model)
    num_layers = base.config.num_hidden_layers

    def is_drafting() -> bool:
        return exit_layer is not None and base.config.num_hidden_layers != num_layers

    def begin(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_drafting():
            wait_for(model.device)
            cache = kwargs.get(CACHE)
            found.num_cached.append(None if cache is None else int(cache.get_seq_length()))
            found.num_tokens.append(kwargs["input_ids"].shape[1])
            found.sec.append(-perf_counter())

    def end(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not is_drafting():
            wait_for(model.device)
            found.sec[-1] += perf_counter()

    handles = [
        model.register_forward_pre_hook(begin, with_kwargs=True),
        model.register_forward_hook(end, with_kwargs=True),
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
