"""The methods under comparison, each a way of generating greedily with the same model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch

from lade.config import Config
from lade.hf import generate
from lade.stats import DecodeStats, Step
from ngram_pool import NGramPool


class Answer(NamedTuple):
    """What one method made of one prompt."""

    token_ids: list[int]  # new ones only
    sec: float  # the whole call, prefill included
    num_steps: int  # forwards after the first
    num_draft_tokens: int  # verified in those steps
    stats: DecodeStats | None = None


class Method(Protocol):
    """A way of generating; one object lives for one pass over the prompts."""

    def __call__(self, model: Any, inputs: dict[str, Any], max_new_tokens: int) -> Answer:
        """Answer one prompt."""


def plain(model: Any, inputs: dict[str, Any], max_new_tokens: int) -> Answer:
    """Run `model.generate(do_sample=False)`."""
    token_ids, sec = _timed(model, inputs, max_new_tokens)
    return Answer(token_ids, sec, len(token_ids) - 1, 0)


def prompt_lookup(model: Any, inputs: dict[str, Any], max_new_tokens: int) -> Answer:
    """Run transformers' own prompt lookup with ten tokens, its documented setting.

    Its first forward runs the prompt with a draft attached; tokens accepted there are counted as if
    later steps had made them, which flatters its MAT a little.
    """
    with _counting_forwards(model) as lengths:
        token_ids, sec = _timed(model, inputs, max_new_tokens, prompt_lookup_num_tokens=10)
    # The first forward runs the prompt with a draft attached; the others verify a draft each.
    return Answer(token_ids, sec, len(lengths) - 1, sum(lengths[1:]) - (len(lengths) - 1))


class Lade:
    """Run `lade.generate`; a given pool lives on from prompt to prompt, else each has a new one."""

    def __init__(
        self,
        config: Config | None,
        pool: NGramPool | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._on_step = on_step

    def __call__(self, model: Any, inputs: dict[str, Any], max_new_tokens: int) -> Answer:
        """Answer one prompt."""
        start = perf_counter()
        output = generate(
            model,
            **inputs,
            pool=self._pool,
            config=self._config,
            on_step=self._on_step,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
        )
        _synchronise(model)
        sec = perf_counter() - start
        token_ids = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        stats = output.stats
        return Answer(token_ids, sec, stats.num_steps, stats.num_draft_tokens, stats)


#: By name: what makes a method for one pass, and what it is.
METHODS: dict[str, tuple[Callable[[Config | None], Method], str]] = {
    "plain": (lambda config: plain, "generate, one token a step"),
    "prompt_lookup": (lambda config: prompt_lookup, "transformers' prompt_lookup_num_tokens=10"),
    "lade": (lambda config: Lade(config, NGramPool()), "lade, one pool for all prompts of a pass"),
    "lade_fresh": (lambda config: Lade(config), "lade, a new and empty pool for each prompt"),
}


def _timed(
    model: Any, inputs: dict[str, Any], max_new_tokens: int, **options: Any
) -> tuple[list[int], float]:
    start = perf_counter()
    # The class's generate, in case the model is wrapped.
    output = type(model).generate(
        model, **inputs, do_sample=False, max_new_tokens=max_new_tokens, **options
    )
    _synchronise(model)
    sec = perf_counter() - start
    token_ids: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return token_ids, sec


def _synchronise(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _counting_forwards(model: Any) -> Iterator[list[int]]:
    """Yield a list that gets the number of tokens of every forward."""
    lengths: list[int] = []

    def count(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        lengths.append(kwargs["input_ids"].shape[1])

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield lengths
    finally:
        handle.remove()
