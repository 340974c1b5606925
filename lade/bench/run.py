"""Running methods in turn over prompts, and summing up what they did.

Next file: `report.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

from lade.bench.methods import METHODS, Answer
from lade.bench.prompts import Prompt
from lade.config import Config
from lade.models import LoadedModel, encode

_LOOP_MAX_PERIOD = 32
_LOOP_MIN_TOKENS = 24
_LOOP_MIN_REPEATS = 3


class Result(NamedTuple):
    """All answers to one prompt in one pass."""

    prompt: Prompt
    num_pass: int
    num_prompt_tokens: int
    answers: dict[str, Answer]  # by method
    loops: bool  # plain's answer (or the first method's) ends in a loop


class Summary(NamedTuple):
    """One method over some results; times are summed first, then divided."""

    num_prompts: int
    tokens_per_sec: float
    speedup: float | None  # over plain, in the same pass; None without plain
    mean_accepted_tokens: float
    nodes_per_step: float
    same_text: float | None  # share of prompts with plain's text; None without plain


def run_methods(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    methods: Sequence[str],
    *,
    max_new_tokens: int,
    num_passes: int = 1,
    config: Config | None = None,
    results: list[Result],
    on_answer: Callable[[str, Answer], None] = lambda name, answer: None,
) -> None:
    """Answer every prompt with every method, appending to `results` as they come.

    Methods take turns prompt by prompt, beginning with another one each time, so that a machine
    that slows down slows all alike. A pass begins with new methods, and so with empty pools.
    """
    warm_up = encode(loaded.tokenizer, "Count from one to ten.", loaded.model.device)
    for name in methods:
        METHODS[name][0](config)(loaded.model, warm_up, min(16, max_new_tokens))
    for num_pass in range(num_passes):
        running = {name: METHODS[name][0](config) for name in methods}
        for number, prompt in enumerate(prompts):
            inputs = encode(loaded.tokenizer, prompt.text, loaded.model.device)
            first = number % len(methods)
            answers = {}
            for name in (*methods[first:], *methods[:first]):
                answers[name] = running[name](loaded.model, inputs, max_new_tokens)
                on_answer(name, answers[name])
            reference = answers.get("plain", answers[methods[0]])
            num_prompt_tokens = inputs["input_ids"].shape[1]
            results.append(
                Result(
                    prompt, num_pass, num_prompt_tokens, answers, ends_in_loop(reference.token_ids)
                )
            )


def ends_in_loop(token_ids: Sequence[int]) -> bool:
    """Tell whether the text ends in the same few tokens over and over.

    That is: its end is a block of at most 32 tokens three times or more, 24 tokens or more in all.
    Greedy decoding of small models often does so, which flatters every n-gram method.
    """
    for period in range(1, _LOOP_MAX_PERIOD + 1):
        length = max(_LOOP_MIN_REPEATS * period, _LOOP_MIN_TOKENS)
        tail = token_ids[-length:]
        if len(tail) == length and all(tail[i] == tail[i - period] for i in range(period, length)):
            return True
    return False


def summarise(results: Iterable[Result], method: str) -> Summary:
    """Sum one method up: within each pass, then the median over passes."""
    by_pass: dict[int, list[Result]] = {}
    for result in results:
        by_pass.setdefault(result.num_pass, []).append(result)
    passes = [_summarise_pass(part, method) for part in by_pass.values()]
    return Summary(*(_median(values) for values in zip(*passes, strict=True)))


def _summarise_pass(results: Sequence[Result], method: str) -> Summary:
    answers = [result.answers[method] for result in results]
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    rate = num_tokens / sum(answer.sec for answer in answers)
    num_steps = sum(answer.num_steps for answer in answers)
    speedup = same = None
    plain = [result.answers["plain"] for result in results if "plain" in result.answers]
    if plain:
        plain_rate = sum(len(a.token_ids) for a in plain) / sum(a.sec for a in plain)
        speedup = rate / plain_rate
        equal = [a.token_ids == b.token_ids for a, b in zip(answers, plain, strict=True)]
        same = sum(equal) / len(equal)
    return Summary(
        num_prompts=len(answers),
        tokens_per_sec=rate,
        speedup=speedup,
        mean_accepted_tokens=(num_tokens - len(answers)) / num_steps if num_steps else 1.0,
        nodes_per_step=sum(a.num_draft_tokens for a in answers) / num_steps if num_steps else 0.0,
        same_text=same,
    )


def _median(values: Sequence[Any]) -> Any:
    return None if values[0] is None else type(values[0])(median(values))
