"""`cpu-engines`: lade beside transformers, OpenVINO GenAI and llama.cpp, on the same weights.

Of a GGUF file, all read the file itself; plain `generate` has lade's layers there.
All methods answer each prompt in turn, greedily, each time beginning with another one; while one
answers, the processes of the others wait. First of all, each answers another short prompt.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from transformers import TextIteratorStreamer

import lade
from benchmarks.environment import environment
from benchmarks.gguf_engines import Clock, Continuation, ask, write_gguf
from benchmarks.prompts import Chosen
from benchmarks.report import progress_bar, share_text, sheet, show, speedup_text
from lade.apps.bench.methods import new_rows
from lade.apps.bench.rivals import RIVALS, Start
from lade.apps.cli.bench import describe_model
from lade.apps.cli.generate import encode_prompts
from lade.compat import end_tokens
from lade.forward.packed import formats_of
from lade.models import LoadedModel, encode
from lade.models.loading import gguf_of
from lade.models.settings import Settings

#: What is published of a method: sums over all prompts, divided; medians, of speeds over plain's
#: and of times; and a share.
COLUMNS = ("tokens_per_sec", "tokens_per_cpu_sec", "median_ratio", "first_token_sec", "same_text")
HEADINGS = ("tokens/s", "tokens/CPU s", "median ratio", "first token, ms", "same text")
_WARM_UP = "Count from one to ten."


class _Stopwatch:
    """Stands in for the tokenizer of a streamer, to tell a clock of tokens.

    lade takes a streamer of transformers for what it is, and looks at the model after each step
    where one is of other code: 4% of the time, which nobody pays who streams text.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def decode(self, token_ids: list[int], **_: Any) -> str:
        """Tell how many there are, and give no text."""
        self._clock.tell(len(token_ids))
        return ""


#: Answers a prompt, given as by `encode`.
Method = Callable[[dict[str, Any]], Continuation]


def here(model: Any, options: dict[str, Any]) -> dict[str, Method]:
    """Return what answers in this process, by the names of `lade bench`."""

    def answer(generate: Callable[..., Any], given: dict[str, Any]) -> Continuation:
        clock = Clock()
        streamer = TextIteratorStreamer(_Stopwatch(clock), skip_prompt=True)
        output = generate(**given, **options, streamer=streamer)
        return clock.reply(new_rows(model, output, given["input_ids"].shape[1])[0])

    plain, ours = partial(type(model).generate, model), partial(lade.generate, model)
    ways = {
        "plain": plain,
        "prompt_lookup": partial(plain, prompt_lookup_num_tokens=10),
        "no_drafts": partial(ours, config=lade.Config(max_draft_tokens=0)),
        "lade_fresh": ours,
    }
    return {name: partial(answer, way) for name, way in ways.items()}


def elsewhere(
    loaded: LoadedModel, names: Iterable[str], start: Start, max_new_tokens: int, stack: ExitStack
) -> dict[str, Method]:
    """Return what answers in separate processes, without drafts and with the engine's lookup."""
    folder = Path(stack.enter_context(TemporaryDirectory()))
    found: dict[str, Method] = {}

    def answer(process: Executor, name: str, start: Start, given: dict[str, Any]) -> Continuation:
        token_ids = given["input_ids"][0].tolist()
        return process.submit(ask, name, start, token_ids, max_new_tokens).result()

    for name in names:
        is_packed = bool(formats_of(loaded.model))  # else lade has dequantized weights
        read = gguf_of(loaded) if is_packed else None
        path = read or folder / f"{name}.gguf"
        if read is None:
            write_gguf(loaded.model, loaded.tokenizer, path, RIVALS[name].dtype or start.dtype)
        for drafts in (False, True):
            process = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
            begin = start._replace(path=str(path), drafts=drafts)
            found[f"{name}_lookup" if drafts else name] = partial(answer, process, name, begin)
    return found


def why_left_out(model: Any) -> dict[str, str]:
    """Return why engines cannot be compared, by their names."""
    if model.config.model_type != "llama":
        return dict.fromkeys(RIVALS, "weights are written for it from models of type llama alone")
    return {
        name: f"it is not installed: pip install {engine.package}"
        for name, engine in RIVALS.items()
        if find_spec(engine.module) is None
    }


def summarise(replies: Mapping[str, Sequence[Continuation]]) -> dict[str, list[float]]:
    """Return `COLUMNS` of each method, with three digits."""
    found = {}
    for name, mine in replies.items():
        pairs = [*zip(mine, replies["plain"], strict=True)]
        num_tokens = sum(map(_num_rest, mine))
        values = (
            num_tokens / sum(each.rest_sec for each in mine),
            num_tokens / sum(each.rest_cpu_sec for each in mine),
            median(_speed(each) / _speed(plain) for each, plain in pairs if _num_rest(plain)),
            median(each.first_sec for each in mine),
            mean(each.token_ids == plain.token_ids for each, plain in pairs),
        )
        found[name] = [float(f"{value:.3g}") for value in values]
    return found


def _num_rest(reply: Continuation) -> int:
    return len(reply.token_ids) - reply.num_first


def _speed(reply: Continuation) -> float:
    return _num_rest(reply) / reply.rest_sec


def cells_of(row: Sequence[float]) -> list[str]:
    """Return a method's `COLUMNS` as tables show them."""
    speed, cpu_speed, ratio, first_sec, same_text = row
    times = f"{speed:.1f}", f"{cpu_speed:.1f}", speedup_text(ratio), f"{1000 * first_sec:.0f}"
    return [*times, share_text(same_text)]


def run(loaded: LoadedModel, chosen: Chosen, max_new_tokens: int, file: Path | None) -> None:
    """Compare what is installed; say what is missing; show and write the results.

    The file keeps results that differ from these in nothing but dtype and threads.
    """
    texts = [prompt.text for prompt in chosen.prompts]
    inputs = encode_prompts(loaded, texts, max_new_tokens)
    described, left_out = describe_model(loaded), why_left_out(loaded.model)
    dtype, threads = described["dtype"], described["threads"]
    names = [name for name in RIVALS if name not in left_out]
    num_tokens = max(each["input_ids"].shape[1] for each in inputs) + max_new_tokens
    eos = end_tokens(loaded.model.generation_config)
    options = Settings(max_new_tokens).options()
    start = Start("", dtype, threads, num_tokens, eos, drafts=False)
    with ExitStack() as stack, progress_bar() as bar:
        methods = here(loaded.model, options)
        methods |= elsewhere(loaded, names, start, max_new_tokens, stack)
        for method in methods.values():
            method(encode(loaded.tokenizer, _WARM_UP))
        replies: dict[str, list[Continuation]] = {name: [] for name in methods}
        for number, given in enumerate(bar.track(inputs, description="answering")):
            first = number % len(methods)
            for name in (*[*methods][first:], *[*methods][:first]):
                replies[name].append(methods[name](given))
    rows, key = summarise(replies), f"{dtype}, {threads} threads"
    packages = [RIVALS[name].package for name in names]
    content: dict[str, Any] = {
        "environment": environment() | {name: metadata.version(name) for name in packages},
        "settings": {"model": described["model"], "max_new_tokens": max_new_tokens}
        | {"prompts": chosen.described},
        "columns": [*COLUMNS],
    }
    content["runs"] = {**_kept(file, content), key: rows}
    title = f"{described['model']} in {key}, {len(texts)} prompts, {max_new_tokens} new tokens"
    notes = [f"{name} is left out: {reason}" for name, reason in left_out.items()]
    table = [("", name, *cells_of(row)) for name, row in rows.items()]
    headings = ("", "method", *HEADINGS)
    show(file, content, sheet(title, headings, [table], "\n".join(notes) or None))


def _kept(path: Path | None, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the runs in a file that were made by the same code of the same prompts."""
    if path is None or not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    date = {"date": content["environment"]["date"]}
    is_same = {**found.get("environment", {}), **date} == content["environment"] and all(
        found.get(name) == content[name] for name in ("settings", "columns")
    )
    runs: dict[str, Any] = found["runs"] if is_same else {}
    return runs
