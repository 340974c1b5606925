"""Run methods in turn over prompts and summarise the results.

Next file: `report.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from lade.bench.baselines import Answer, DraftModels, Method, warm_up
from lade.bench.batches import encode_batch, find_pad_token_id, in_batches
from lade.bench.methods import METHODS, Pools, make_method
from lade.bench.prompts import Prompt
from lade.bench.settings import Settings
from lade.bench.utilisation import measuring, total
from lade.config import Config
from lade.errors import UnsupportedModelError
from lade.models.loading import LoadedModel
from lade.stats import DecodeStats

#: The category of a batch with prompts of several categories.
MIXED = "mixed"

_LOOP_MAX_PERIOD = 32
_LOOP_MIN_TOKENS = 24
_LOOP_MIN_REPEATS = 3


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
    target_sec_per_step: float | None = None  # of the model's forwards
    busy_cores: float | None = None  # CPU time of the process over wall time; None in old files
    device_share: float | None = None  # of the time that the device was busy; None if unknown


def warm_up_methods(
    loaded: LoadedModel,
    methods: Sequence[str],
    settings: Settings,
    config: Config | None = None,
    models: DraftModels | None = None,
) -> dict[str, str]:
    """Warm up every method; return those that the model cannot do, with the reasons.

    Only methods that fix a verification method are left out like this.

    Raises:
        UnsupportedModelError: no method is left, or `config` asks for what the model cannot do.
    """
    left_out: dict[str, str] = {}
    for name in methods:
        try:
            warm_up(loaded, make_method(name, config, None, models), settings)
        except UnsupportedModelError as error:
            left_out[name] = str(error)
            if METHODS[name].verification is None or len(left_out) == len(methods):
                raise
    return left_out


def run_methods(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    methods: Sequence[str],
    settings: Settings,
    *,
    num_passes: int = 1,
    keep: bool = False,
    config: Config | None = None,
    pools: Pools | None = None,
    models: DraftModels | None = None,
    results: list[Result],
    on_answer: Callable[[str, Answer], None] = lambda name, answer: None,
) -> None:
    """Answer all prompts with every method, batch by batch, appending to `results`.

    The methods must have been warmed up (`warm_up_methods`). They take turns at every batch, each
    time starting with another one, so that a machine that slows down slows all alike. Every pass
    uses the same seeds: all passes, and with exact arithmetic all methods, produce the same texts.
    It also starts with new methods and so with empty pools, unless `keep` is set: then each pass
    goes on with the pools that the one before has filled. `pools` and `models` are those of the
    caller.
    """
    pad_token_id = find_pad_token_id(loaded)
    options = settings.options(pad_token_id)
    batches = in_batches(prompts, settings.batch_size)
    running: dict[str, Method] = {}
    for num_pass in range(num_passes):
        if not (keep and running):
            running = {name: make_method(name, config, pools, models) for name in methods}
        for number, batch in enumerate(batches):
            inputs = encode_batch(loaded, [prompt.text for prompt in batch], pad_token_id)
            first = number % len(methods)
            answers = {}
            for name in (*methods[first:], *methods[:first]):
                torch.manual_seed(settings.seed + number)
                with measuring(loaded.model.device) as meter:
                    answer = running[name](loaded.model, inputs, options)
                answers[name] = answer._replace(utilisation=meter.utilisation)
                on_answer(name, answers[name])
            reference = answers.get("plain", answers[methods[0]])
            results.append(
                Result(
                    batch,
                    num_pass,
                    int(inputs["attention_mask"].sum()),
                    answers,
                    any(ends_in_loop(row) for row in reference.rows),
                )
            )


def ends_in_loop(token_ids: Sequence[int]) -> bool:
    """Return whether a text ends in the same few tokens over and over.

    That is, it ends in a block of at most 32 tokens, three times or more, over 24 tokens or more.
    Small models often loop in greedy decoding, which flatters every n-gram method.
    """
    for period in range(1, _LOOP_MAX_PERIOD + 1):
        length = max(_LOOP_MIN_REPEATS * period, _LOOP_MIN_TOKENS)
        tail = token_ids[-length:]
        if len(tail) == length and all(tail[i] == tail[i - period] for i in range(period, length)):
            return True
    return False


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


def share_repeated(results: Iterable[Result], method: str) -> float | None:
    """Return the share of sequences with the same text in all passes; None for a single pass.

    Passes differ in timing and, if pools are kept (`keep` of `run_methods`), in what those hold. A
    pass that was interrupted, or whose other answers end in loops, says nothing of what it lacks.
    """
    texts: dict[tuple[tuple[Prompt, ...], int], list[list[list[int]]]] = {}
    num_seen: Counter[tuple[int, tuple[Prompt, ...]]] = Counter()  # a file may have a prompt twice
    for result in results:
        prompts = tuple(result.prompts)
        number = num_seen[result.num_pass, prompts]
        num_seen[result.num_pass, prompts] += 1
        texts.setdefault((prompts, number), []).append(result.answers[method].rows)
    of_rows = [
        row for of_one in texts.values() if len(of_one) > 1 for row in zip(*of_one, strict=True)
    ]
    if not of_rows:
        return None
    return sum(all(text == of_row[0] for text in of_row) for of_row in of_rows) / len(of_rows)


def _summarise_pass(results: Sequence[Result], method: str) -> Summary:
    answers = [result.answers[method] for result in results]
    rows = [row for answer in answers for row in answer.rows]
    num_tokens = sum(answer.num_tokens for answer in answers)
    rate = num_tokens / sum(answer.sec for answer in answers)
    num_row_steps = sum(answer.num_row_steps for answer in answers)
    num_draft_tokens = sum(answer.num_draft_tokens for answer in answers)
    speedup = same = None
    plain = [result.answers["plain"] for result in results if "plain" in result.answers]
    if plain:
        speedup = rate / (sum(a.num_tokens for a in plain) / sum(a.sec for a in plain))
        plain_rows = [row for answer in plain for row in answer.rows]
        same = sum(a == b for a, b in zip(rows, plain_rows, strict=True)) / len(rows)
    stats = stats_of(answers)
    use = total([answer.utilisation for answer in answers])
    return Summary(
        num_prompts=sum(len(result.prompts) for result in results),
        tokens_per_sec=rate,
        speedup=speedup,
        # The first token of each row is the prefill's.
        mean_accepted_tokens=(num_tokens - len(rows)) / num_row_steps if num_row_steps else 1.0,
        draft_tokens_per_step=num_draft_tokens / num_row_steps if num_row_steps else 0.0,
        same_text=same,
        acceptance_rate=None if stats is None else stats.acceptance_rate,
        correction_rate=None if stats is None else stats.correction_rate,
        draft_sec_per_step=None if stats is None else stats.draft_sec_per_step,
        target_sec_per_step=(
            stats.forward_sec / stats.num_steps if stats is not None and stats.num_steps else None
        ),
        busy_cores=None if use is None else use.cpu_sec / use.sec,
        device_share=None if use is None else use.device_share,
    )


def stats_of(answers: Iterable[Answer]) -> DecodeStats | None:
    """Return the sum of the answers' stats; None if the method has none."""
    total = DecodeStats()
    for answer in answers:
        if answer.stats is None:
            return None
        total.add(answer.stats)
    return total


def _median(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    return type(known[0])(median(known)) if known else None
