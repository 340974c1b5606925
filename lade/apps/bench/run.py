"""Run methods in turn over prompts and summarise the results.

Next file: `busy.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from operator import eq
from typing import Any, NamedTuple

import torch

from lade.apps.bench.methods import Answer, Method
from lade.apps.bench.prompts import Prompt
from lade.models.loading import LoadedModel
from lade.models.prompts import encode
from lade.models.settings import Settings
from lade.stats import DecodeStats, ends_in_loop

_WARM_UP_PROMPT = "Count from one to ten."
_WARM_UP_TOKENS = 16
#: The category of a batch with prompts of several categories.
MIXED = "mixed"


class Result(NamedTuple):
    """All methods' answers to one prompt or batch, in one pass."""

    prompts: Sequence[Prompt]
    num_prompt_tokens: int  # of all prompts, without padding
    answers: dict[str, Answer]  # by method
    loops: bool  # whether a row of plain's (or the first method's) answer ends in a loop
    num_pass: int = 0

    @property
    def category(self) -> str:
        """The category that all prompts share, or `MIXED`."""
        categories = {prompt.category for prompt in self.prompts}
        return categories.pop() if len(categories) == 1 else MIXED


class Summary(NamedTuple):
    """One method over some results; counts and times are summed first, then divided."""

    num_prompts: int
    tokens_per_sec: float
    speedup: float | None  # over plain; None without it
    mean_accepted_tokens: float  # per row and step, so that plain is 1.00 at any batch size
    draft_tokens_per_step: float  # per row and step, too
    same_text: float | None  # share of sequences with plain's text; None without plain
    acceptance_rate: float | None  # None where nothing was drafted
    draft_sec_per_step: float | None  # None for methods other than lade
    tokens_per_cpu_sec: float  # of all threads


def contest(
    model: Any,
    methods: Mapping[str, Callable[[], Method]],
    settings: Settings,
    num_pass: int = 0,
) -> Callable[[Sequence[Prompt], dict[str, Any]], Result]:
    """Return what has methods answer prompts, a row of inputs each, once over.

    They take turns at every prompt or batch, each time starting with another one, so that a machine
    that slows down slows all alike; and answer it with one seed, so that with exact arithmetic they
    produce the same texts.

    Args:
        model: the model that answers.
        methods: functions that make the methods, by name; the first is the baseline.
        settings: how to answer; the n-th batch has the seed of the settings plus n.
        num_pass: number of contests before this one.
    """
    made, numbers = {name: make() for name, make in methods.items()}, count()
    names, options = [*made], settings.options()

    def answer(prompts: Sequence[Prompt], inputs: dict[str, Any]) -> Result:
        number, answers = next(numbers), dict[str, Answer]()
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            torch.manual_seed(settings.seed + number)
            answers[name] = made[name](model, inputs, options)
        answers = {name: answers[name] for name in names}
        loops = any(map(ends_in_loop, answers.get("plain", answers[names[0]]).rows))
        num_prompt_tokens = int(inputs["attention_mask"].sum())
        return Result(prompts, num_prompt_tokens, answers, loops, num_pass)

    return answer


def warm_up(
    loaded: LoadedModel, methods: Mapping[str, Callable[[], Method]], settings: Settings
) -> None:
    """Answer shortly with every method, so that the first prompt takes none longer than others."""
    hello = encode(loaded.tokenizer, _WARM_UP_PROMPT, loaded.model.device)
    num_tokens = min(_WARM_UP_TOKENS, settings.max_new_tokens)
    options = {**settings.options(), "max_new_tokens": num_tokens}
    for make in methods.values():
        make()(loaded.model, hello, options)


def summarise(results: Sequence[Result], method: str) -> Summary:
    """Summarise one method."""
    answers = [result.answers[method] for result in results]
    plain = [result.answers["plain"] for result in results if "plain" in result.answers]
    tokens_per_sec, stats = _tokens_per_sec(answers), stats_of(answers)
    speedup = same = None
    if plain:
        speedup = tokens_per_sec / _tokens_per_sec(plain)
        rows, others = ([row for each in side for row in each.rows] for side in (answers, plain))
        same = sum(map(eq, rows, others)) / len(rows)
    return Summary(
        sum(len(result.prompts) for result in results),
        tokens_per_sec,
        speedup,
        stats.mean_accepted_tokens,
        stats.draft_tokens_per_step,
        same,
        stats.acceptance_rate if stats.num_draft_tokens else None,
        stats.draft_sec_per_step if stats.forward_sec else None,
        sum(each.num_tokens for each in answers) / sum(each.cpu_sec for each in answers),
    )


def stats_of(answers: Iterable[Answer]) -> DecodeStats:
    """Return the sum of the answers' stats."""
    total = DecodeStats()
    for answer in answers:
        total.add(answer.stats)
    return total


def _tokens_per_sec(answers: Sequence[Answer]) -> float:
    return sum(each.num_tokens for each in answers) / sum(each.sec for each in answers)
