"""`run`: any methods over a file of prompts, also several times, with draft models and pools."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.environment import environment
from benchmarks.methods import METHODS, Given, MethodInfo, named
from benchmarks.prompts import Chosen
from benchmarks.quantized import int8_copy
from benchmarks.report import Keeping, progress_bar, show
from lade.apps.bench.prompts import Prompt
from lade.apps.bench.report import OVERALL, groups, table
from lade.apps.bench.run import Result, Summary, contest, stats_of, summarise
from lade.apps.cli.bench import describe_model
from lade.apps.cli.generate import encode_prompts
from lade.config import Config
from lade.errors import UserError
from lade.models.loading import LoadedModel
from lade.models.prompts import encode
from lade.models.settings import Settings
from lade.probing.plan import probe

_SINGLE_ROW = "transformers runs it on one prompt and for one sequence at a time"
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class BenchSettings(Settings):
    """Decoding settings of a run, the same for every method.

    The n-th batch of every pass is answered with seed + n, by each method.

    Raises:
        UserError: a value is out of range, or would have no effect.
    """

    batch_size: int = 1  # prompts per call
    num_return_sequences: int = 1  # samples per prompt
    passes: int = 1  # over all prompts

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0 and self.num_return_sequences > 1:
            raise UserError(
                f"expected a temperature above 0 with {self.num_return_sequences} sequences of "
                "each prompt, as greedy ones are all the same; got temperature 0"
            )

    @property
    def num_rows(self) -> int:
        """Number of sequences that a call decodes."""
        return self.batch_size * self.num_return_sequences

    def options(self) -> dict[str, Any]:
        """Return options for `generate`."""
        options = super().options()
        if self.temperature > 0:
            options["num_return_sequences"] = self.num_return_sequences
        return options

    def describe(self) -> str:
        """Describe in words what differs from greedy decoding of one sequence."""
        parts = [super().describe()]
        if self.batch_size > 1:
            parts.append(f"batches of {self.batch_size}")
        if self.num_return_sequences > 1:
            parts.append(f"{self.num_return_sequences} sequences a prompt")
        return ", ".join(parts)


def choose(text: str | None, num_layers: int | None = None) -> dict[str, MethodInfo]:
    """Return the methods to run.

    Raises:
        ValueError: a method is unknown or named twice, or lacks what it drafts by.
    """
    given = {"num_layers": num_layers}
    usual = [n for n, i in METHODS.items() if i.is_default and given.get(i.takes or "", True)]
    names = usual if text is None else named(text, METHODS)
    methods = {name: METHODS[name] for name in names}
    takes = {info.takes: name for name, info in methods.items()}
    if "num_layers" in takes and not num_layers:
        raise ValueError(f"expected --first-layers with {takes['num_layers']} in --methods")
    if num_layers and "num_layers" not in takes:
        known = ", ".join(name for name, info in METHODS.items() if info.takes == "num_layers")
        raise ValueError(f"expected one of {known} in --methods, to take --first-layers")
    return methods


def run(
    loaded: LoadedModel,
    chosen: Chosen,
    methods: Mapping[str, MethodInfo],
    settings: BenchSettings,
    given: Given,
    file: Path | None,
) -> None:
    """Run methods over prompts; print and write the results, even after an interruption.

    Methods that cannot decode batches are left out where there are some.
    """
    encode_prompts(loaded, [prompt.text for prompt in chosen.prompts], settings.max_new_tokens)
    left_out = {
        name: _SINGLE_ROW
        for name, info in methods.items()
        if info.is_single_row and settings.num_rows > 1
    }
    methods = {name: info for name, info in methods.items() if name not in left_out}
    assisted = any(info.takes == "assistant" for info in methods.values())
    if assisted:
        given = given._replace(assistant=int8_copy(loaded.model))
    results: list[Result] = []
    num_batches = -(-len(chosen.prompts) // settings.batch_size)
    with Keeping(results) as kept, progress_bar() as bars:
        task = bars.add_task("answering", total=num_batches * settings.passes)
        run_methods(
            *(loaded, chosen.prompts, methods, settings, given),
            results=results,
            on_answer=lambda: bars.advance(task),
        )
    names = [*methods]
    num_done, config = len(results), given.config
    # Passes are compared: an unfinished one is dropped, unless it is the only one.
    results = results[: num_done // num_batches * num_batches] or results
    verification = (
        config.verification or probe(loaded.model, num_rows=settings.num_rows).verification
    )
    described = {
        **describe_model(loaded),
        **asdict(settings),
        "prompts": chosen.described,
        "methods": {name: methods[name].description for name in names},
        "left_out": left_out,
        "first_layers": given.num_layers,
        "interrupted": kept.by is not None,
        "config": {n: v for n, v in asdict(config).items() if v != asdict(Config())[n]},
        "verification": verification,
        "assistant": "self:int8" if assisted else None,
    }
    summary = summary_of(results, names)
    content = {"environment": environment(), "settings": described, "summary": summary}
    notes = [f"{name} is left out: {reason}" for name, reason in left_out.items()]
    caption = "\n".join([*notes, f"verification: {verification}"])
    show(file, content, table(results, names, settings.describe(), caption, median_of_passes))
    kept.end(f"stopped after {num_done} of {num_batches * settings.passes} prompts or batches")


def summary_of(results: Sequence[Result], methods: Sequence[str]) -> dict[str, Any]:
    """Return what is known of each method over all prompts, and its speed-ups by category."""
    summary: dict[str, Any] = {}
    for group, part in groups(results).items():
        found = {name: median_of_passes(part, name)._asdict() for name in methods}
        if group != OVERALL:
            found = {
                name: {what: of[what] for what in ("num_prompts", "speedup")}
                for name, of in found.items()
            }
        else:
            for name, of in found.items():
                stats = [result.answers[name].stats for result in part]
                shares = [each.overhead for each in stats if each.forward_sec]
                of["overhead"] = median(shares) if shares else None
                of["share_repeated"] = share_repeated(part, name)
                passes = [summarise(each, name).speedup for each in passes_of(part)]
                of["speedup_of_each_pass"] = passes if len(passes) > 1 else None
                sources = stats_of(result.answers[name] for result in part).sources
                of["sources"] = {source: asdict(each) for source, each in sources.items()} or None
        summary[group] = {
            name: {what: value for what, value in of.items() if value is not None}
            for name, of in found.items()
        }
    return summary


def run_methods(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    methods: Mapping[str, MethodInfo],
    settings: BenchSettings,
    given: Given,
    *,
    results: list[Result],
    on_answer: Callable[[], None] = lambda: None,
) -> None:
    """Answer all prompts with every method, batch by batch, appending to `results`.

    Each pass starts with new methods and so with empty pools, and uses the same seeds.

    Raises:
        UnsupportedModelError: the config asks for what the model cannot do.
    """
    model, size = loaded.model, settings.batch_size
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    inputs = [encode_batch(loaded, [prompt.text for prompt in batch]) for batch in batches]
    short = replace(settings, max_new_tokens=min(_WARM_UP_TOKENS, settings.max_new_tokens))
    for name, info in methods.items():  # is warmed up; what it learns there is forgotten
        contest(model, {name: partial(info.make, given)}, short)(batches[0], inputs[0])
    makers = {name: partial(info.make, given) for name, info in methods.items()}
    for num_pass in range(settings.passes):
        answer = contest(model, makers, settings, num_pass)
        for batch, encoded in zip(batches, inputs, strict=True):
            results.append(answer(batch, encoded))
            on_answer()


def encode_batch(loaded: LoadedModel, texts: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `attention_mask`, int64 [num_prompts, longest], padded on the left.

    Padding is the tokenizer's, else the model's, else 0, which will do: before a prompt, it is
    masked, and rows of a model without EOS all end at once.
    """
    defaults = loaded.model.generation_config
    known = (loaded.tokenizer.pad_token_id, defaults.pad_token_id, 0)
    defaults.pad_token_id = next(token_id for token_id in known if token_id is not None)
    rows = [encode(loaded.tokenizer, text, loaded.model.device) for text in texts]
    fills = {"input_ids": defaults.pad_token_id, "attention_mask": 0}
    return {
        name: pad_sequence(
            [row[name][0] for row in rows], True, padding_value=fill, padding_side="left"
        )
        for name, fill in fills.items()
    }


def share_repeated(results: Iterable[Result], method: str) -> float | None:
    """Return the share of sequences with the same text in all passes; None for a single pass.

    A pass that was interrupted, or whose other answers end in loops, says nothing of what it lacks.
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


def passes_of(results: Iterable[Result]) -> list[list[Result]]:
    """Return the results of each pass, in order."""
    by_pass: dict[int, list[Result]] = {}
    for result in results:
        by_pass.setdefault(result.num_pass, []).append(result)
    return [by_pass[num_pass] for num_pass in sorted(by_pass)]


def median_of_passes(results: Sequence[Result], method: str) -> Summary:
    """Summarise one method: within each pass, then the median over passes."""
    passes = [summarise(part, method) for part in passes_of(results)]
    return Summary(*(_median(values) for values in zip(*passes, strict=True)))


def _median(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    return type(known[0])(median(known)) if known else None
