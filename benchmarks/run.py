"""`run`: any methods over a file of prompts, also several times, with draft models and pools."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch

from benchmarks.batches import encode_batch, find_pad_token_id, in_batches, warm_up
from benchmarks.methods import METHODS, named
from benchmarks.quantized import int8_copy
from benchmarks.settings import BenchSettings
from lade.bench.baselines import Answer, Given, Method, MethodInfo
from lade.bench.prompts import Prompt
from lade.bench.report import as_json, groups, rounded, table
from lade.bench.run import Result, Summary, summarise
from lade.cli.bench import Chosen, describe_model
from lade.cli.loading import load_beside
from lade.cli.options import DraftOptions
from lade.cli.prompting import check_prompts
from lade.cli.results import ResultFiles, keeping, progress_bar
from lade.errors import UnsupportedModelError
from lade.models.loading import LoadedModel
from lade.probing.report import probe
from lade.stats import ends_in_loop

_SINGLE_ROW = "transformers runs it on one prompt and for one sequence at a time"
_INT8 = ":int8"
_SELF = "self"


def choose(
    text: str | None,
    has_pools: bool,
    assistant: str | None,
    num_layers: int | None,
    saves: bool = False,
) -> list[str]:
    """Return the methods to run.

    Raises:
        ValueError: a method is unknown or named twice, or lacks what it drafts by.
    """
    usual = [n for n, i in METHODS.items() if i.is_default and (has_pools or i.takes is None)]
    names = usual if text is None else named(text, METHODS)
    takes = {METHODS[name].takes for name in names}
    if "assistant" in takes and assistant is None:
        raise ValueError(
            "expected --assistant with a method of an assistant in --methods, got none"
        )
    if "pools" in takes and not has_pools:
        raise ValueError("expected --pool with lade_pool and lade_pool_fresh, got none")
    if "hf_early_exit" in names and num_layers is None:
        raise ValueError("expected --first-layers N with hf_early_exit in --methods, got no number")
    if saves and sum(METHODS[name].keeps_pool for name in names) != 1:
        raise ValueError("expected lade or lade_pool in --methods with --save-pool, and not both")
    given = {"assistant": assistant, "num_layers": num_layers, "pools": has_pools or None}
    for name, value in given.items():
        if value is not None and name not in takes:
            known = ", ".join(method for method, info in METHODS.items() if info.takes == name)
            raise ValueError(f"expected one of {known} in --methods, to take {name}")
    return names


def add_to(content: dict[str, Any], results: Sequence[Result], *, assistant: str | None) -> None:
    """Add an assistant's name, and what passes tell of each other."""
    content["settings"]["assistant"] = None if assistant is None else Path(assistant).name
    for group, part in groups(results).items():
        for name, entry in content["summary"][group].items():
            entry["share_repeated"] = share_repeated(part, name)
            each = {str(n): summarise(p, name).speedup for n, p in enumerate(passes_of(part))}
            entry["speedup_of_each_pass"] = [*rounded(each).values()]


def load_assistant(
    given: Given, loaded: LoadedModel, assistant: str, trust_remote_code: bool
) -> Given:
    """Load the assistant: another model, or the model itself, or a copy in 8 bits of either."""
    name = assistant.removesuffix(_INT8)
    other = loaded if name == _SELF else load_beside(loaded, name, trust_remote_code)
    if assistant.endswith(_INT8):
        other = other._replace(model=int8_copy(other.model))
    return given._replace(assistant=other, tokenizer=loaded.tokenizer)


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


def run(
    loaded: LoadedModel,
    chosen: Chosen,
    methods: Mapping[str, MethodInfo],
    settings: BenchSettings,
    given: Given,
    files: ResultFiles,
    drafting: DraftOptions,
    assistant: str | None = None,
) -> None:
    """Run methods over prompts; print and write the results, even after an interruption.

    Methods are made with `given` and the pools. Those that cannot decode batches are left out where
    there are some.
    """
    prompts = chosen.prompts
    check_prompts(loaded, [prompt.text for prompt in prompts], settings.max_new_tokens)
    left_out = {
        name: _SINGLE_ROW
        for name, info in methods.items()
        if info.is_single_row and settings.num_rows > 1
    }
    methods = {name: info for name, info in methods.items() if name not in left_out}
    results: list[Result] = []
    num_batches = -(-len(prompts) // settings.batch_size)
    with keeping(results) as stopped, drafting.open_pools(loaded) as (own, *read):
        given = given._replace(pools=read, own=None if drafting.save_path is None else own)
        left_out |= warm_up_methods(loaded, methods, settings, given)
        methods = {name: info for name, info in methods.items() if name not in left_out}
        with progress_bar() as bars:
            task = bars.add_task("answering", total=num_batches * settings.passes * len(methods))
            run_methods(
                *(loaded, prompts, methods, settings, given),
                results=results,
                on_answer=lambda name, answer: bars.advance(task),
            )
    num_done, config = len(results), given.config
    # Passes are compared: an unfinished one is dropped, unless it is the only one.
    results = results[: num_done // num_batches * num_batches] or results
    notes = [f"{name} is left out: {reason}" for name, reason in left_out.items()]
    target = config.verification or probe(loaded.model, num_rows=settings.num_rows).verification
    notes.append(f"verification: {target}")
    described = {
        **describe_model(loaded),
        **asdict(settings),
        "prompts": chosen.described,
        "methods": {name: info.description for name, info in methods.items()},
        "left_out": left_out,
        "first_layers": given.num_layers,
        "pools": {
            "names": [path.name for path in drafting.pools or []],
            "num_tokens": sum(map(len, read)),
        },
        "interrupted": stopped.by is not None,
        "config": asdict(config),
        "verification": target,
    }
    content = as_json(results, [*methods], described, median_of_passes)
    add_to(content, results, assistant=assistant)
    stopped.tell(f"stopped after {num_done} of {num_batches * settings.passes} prompts or batches")
    caption = "\n".join(notes)
    sheet = table(results, [*methods], settings.describe(), caption, median_of_passes)
    files.show(content, sheet)
    stopped.pass_on()


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
            results.append(Result(batch, num_prompt_tokens, answers, loops, num_pass))


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
