"""Run methods in turn over prompts and summarise the results.

Next file: `report.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from time import process_time
from typing import Any, NamedTuple

import torch

from lade.bench.baselines import Answer, Given, Method, MethodInfo, warm_up
from lade.bench.batches import encode_batch, find_pad_token_id, in_batches
from lade.bench.prompts import Prompt
from lade.bench.settings import BenchSettings
from lade.errors import UnsupportedModelError
from lade.models.loading import LoadedModel
from lade.stats import DecodeStats, ends_in_loop

#: The category of a batch with prompts of several categories.
MIXED = "mixed"


class Result(NamedTuple):
    """All methods' answers to one prompt or batch, in one pass."""

    prompts: Sequence[Prompt]
    num_pass: int
    num_prompt_tokens: int  # of all prompts, without padding
    answers: dict[str, Answer]  # by method
    loops: bool  # whether a row of plain's (or the first method's) answer ends in a loop

    @property
    def category(self) -> str:
        """The category that all prompts share, or `MIXED`."""
        categories = {prompt.category for prompt in self.prompts}
        return categories.pop() if len(categories) == 1 else MIXED


class Summary(NamedTuple):
    """One method over some results; times are summed first, then divided."""

    num_prompts: int
    tokens_per_sec: float
    speedup: float | None  # over plain, in the same pass; None without plain
    mean_accepted_tokens: float  # per row and step, so that plain is 1.00 at any batch size
    draft_tokens_per_step: float  # per row and step, too
    same_text: float | None  # share of sequences with plain's text; None without plain
    # As `DecodeStats` counts them; None for methods without it.
    acceptance_rate: float | None = None
    correction_rate: float | None = None
    draft_sec_per_step: float | None = None
    busy_cores: float | None = None  # CPU time of the process over wall time


def warm_up_methods(
    loaded: LoadedModel,
    methods: Mapping[str, MethodInfo],
    settings: BenchSettings,
    given: Given | None = None,
) -> dict[str, str]:
    """Warm up every method; return those that the model cannot do, with the reasons.

    Only methods that fix a verification method are left out like this.

    Raises:
        UnsupportedModelError: no method is left, or the config asks for what the model cannot
            do.
    """
    left_out: dict[str, str] = {}
    for name, info in methods.items():
        try:
            warm_up(loaded, info.make((given or Given())._replace(own=None)), settings)
        except UnsupportedModelError as error:
            left_out[name] = str(error)
            if info.verification is None or len(left_out) == len(methods):
                raise
    return left_out


def run_methods(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    methods: Mapping[str, MethodInfo],
    settings: BenchSettings,
    given: Given | None = None,
    *,
    results: list[Result],
    on_answer: Callable[[str, Answer], None] = lambda name, answer: None,
) -> None:
    """Answer all prompts with every method, batch by batch, appending to `results`.

    The methods must have been warmed up (`warm_up_methods`). They take turns at every batch, each
    time starting with another one, so that a machine that slows down slows all alike. Every pass
    uses the same seeds: all passes, and with exact arithmetic all methods, produce the same texts.
    It also starts with new methods and so with empty pools, but for that of `given`.
    """
    pad_token_id = find_pad_token_id(loaded)
    options = settings.options(pad_token_id)
    names = [*methods]
    for num_pass in range(settings.passes):
        running: dict[str, Method] = {
            name: info.make(given or Given()) for name, info in methods.items()
        }
        for number, batch in enumerate(in_batches(prompts, settings.batch_size)):
            inputs = encode_batch(loaded, [prompt.text for prompt in batch], pad_token_id)
            first = number % len(names)
            answers = {}
            for name in (*names[first:], *names[:first]):
                torch.manual_seed(settings.seed + number)
                start = process_time()
                answer = running[name](loaded.model, inputs, options)
                answers[name] = answer._replace(cpu_sec=process_time() - start)
                on_answer(name, answers[name])
            loops = any(map(ends_in_loop, answers.get("plain", answers[names[0]]).rows))
            num_prompt_tokens = int(inputs["attention_mask"].sum())
            results.append(Result(batch, num_pass, num_prompt_tokens, answers, loops))


def passes_of(results: Iterable[Result]) -> list[list[Result]]:
    """Return the results of each pass, in order."""
    by_pass: dict[int, list[Result]] = {}
    for result in results:
        by_pass.setdefault(result.num_pass, []).append(result)
    return [by_pass[num_pass] for num_pass in sorted(by_pass)]


def summarise(results: Iterable[Result], method: str) -> Summary:
    """Summarise one method: within each pass, then the median over passes."""
    passes = [_summarise_pass(part, method) for part in passes_of(results)]
    return Summary(*(_median(values) for values in zip(*passes, strict=True)))


def _summarise_pass(results: Sequence[Result], method: str) -> Summary:
    answers = [result.answers[method] for result in results]
    rows = [row for answer in answers for row in answer.rows]
    num_tokens = sum(answer.num_tokens for answer in answers)
    sec = sum(answer.sec for answer in answers)
    num_row_steps = sum(answer.num_row_steps for answer in answers)
    num_draft_tokens = sum(answer.num_draft_tokens for answer in answers)
    speedup = same = None
    plain = [result.answers["plain"] for result in results if "plain" in result.answers]
    if plain:
        speedup = num_tokens / sec / (sum(a.num_tokens for a in plain) / sum(a.sec for a in plain))
        plain_rows = [row for answer in plain for row in answer.rows]
        same = sum(a == b for a, b in zip(rows, plain_rows, strict=True)) / len(rows)
    summary = Summary(
        num_prompts=sum(len(result.prompts) for result in results),
        tokens_per_sec=num_tokens / sec,
        speedup=speedup,
        # The first token of each row is the prefill's.
        mean_accepted_tokens=(num_tokens - len(rows)) / num_row_steps if num_row_steps else 1.0,
        draft_tokens_per_step=num_draft_tokens / num_row_steps if num_row_steps else 0.0,
        same_text=same,
        busy_cores=_sum((answer.cpu_sec for answer in answers), by=sec),
    )
    stats = stats_of(answers)
    if stats is None:
        return summary
    return summary._replace(
        acceptance_rate=stats.acceptance_rate,
        correction_rate=stats.correction_rate,
        draft_sec_per_step=stats.draft_sec_per_step,
    )


def stats_of(answers: Iterable[Answer]) -> DecodeStats | None:
    """Return the sum of the answers' stats; None if the method has none."""
    total = DecodeStats()
    for answer in answers:
        if answer.stats is None:
            return None
        total.add(answer.stats)
    return total


def _sum(values: Iterable[float | None], by: float) -> float | None:
    """Return the sum of values divided by a number; None where one is not known."""
    known = [*values]
    return None if None in known else sum(filter(None, known)) / by


def _median(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    return type(known[0])(median(known)) if known else None
