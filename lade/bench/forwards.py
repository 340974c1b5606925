"""What forwards of transformers' own assisted decoding tell: counts and times of its steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

from lade.bench.device import wait_for
from lade.stats import DecodeStats, Step


class Forward(NamedTuple):
    """One forward of the target."""

    num_tokens: int
    num_cached: int | None  # tokens in its cache before; None for models without one
    sec: float


class Forwards:
    """The target's forwards of a call with one row, in order."""

    def __init__(self) -> None:
        self.all: list[Forward] = []

    def stats(self, num_prompt_tokens: int, num_tokens: int, sec: float) -> DecodeStats:
        """Return counts and times of a call, as lade counts its own.

        Between two forwards the cache grows by the tokens that were committed: so many draft tokens
        were accepted, and a bonus token. What follows the last forward is the rest of the answer.

        Args:
            num_prompt_tokens: length of the prompt.
            num_tokens: length of the answer.
            sec: time of the call; what is not the target's forwards is drafting.
        """
        stats = DecodeStats(num_prefills=1)
        prefill, *steps = self.all
        stats.prefill_sec = prefill.sec
        stats.forward_sec = sum(step.sec for step in steps)
        stats.draft_sec = max(0.0, sec - stats.prefill_sec - stats.forward_sec)
        # Without caches, each forward runs the whole text and its draft.
        num_held = [num_prompt_tokens if n is None else n for _, n, _ in steps]
        ends = [*num_held[1:], num_prompt_tokens + num_tokens - 1]
        for step, held, end in zip(steps, num_held, ends, strict=True):
            num_drafted = step.num_tokens - 1
            num_new = min(max(end - held, 1), num_drafted + 1)
            stats.num_steps += 1
            stats.count_row_step(
                Step([0] * num_new, num_drafted, num_new - 1, 0, num_new <= num_drafted)
            )
        return stats


@contextmanager
def counting_forwards(model: Any, exit_layer: int | None = None) -> Iterator[Forwards]:
    """Yield what receives the forwards of a model.

    Args:
        model: the target.
        exit_layer: layers after which drafting forwards of the same model end: those are not
            counted. transformers says so in the model's config while it drafts.
    """
    found, started = Forwards(), [0.0]
    base = getattr(model, model.base_model_prefix, model)
    num_layers = base.config.num_hidden_layers

    def is_drafting() -> bool:
        return exit_layer is not None and base.config.num_hidden_layers != num_layers

    def begin(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_drafting():
            wait_for(model.device)
            cache = kwargs.get("past_key_values")
            num_cached = None if cache is None else int(cache.get_seq_length())
            started[0] = perf_counter()
            found.all.append(Forward(kwargs["input_ids"].shape[1], num_cached, 0.0))

    def end(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not is_drafting():
            wait_for(model.device)
            found.all[-1] = found.all[-1]._replace(sec=perf_counter() - started[0])

    handles = [
        model.register_forward_pre_hook(begin, with_kwargs=True),
        model.register_forward_hook(end, with_kwargs=True),
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
