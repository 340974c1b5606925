"""Predicted outputs: four edits of a text, with the text as the prediction and without.

The default model is too small to edit well, so a logits processor makes it give the answer that one
would want, an edited copy: what is measured is how soon the answer comes, not how good it is. The
processor is the same for all methods. The prompt asks for the edit ("request"), or has the text
besides ("text"), as an editor sends it and as prompt lookup needs it. Methods take turns, call by
call. Prompt lookup may run more tokens than are given; these count as the last one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList

import lade
from benchmarks.environment import environment
from benchmarks.report import show
from lade.apps.cli.bench import describe_model
from lade.apps.cli.loading import console
from lade.models import LoadedModel, encode

CODE = '''\
class Inventory:
    """Things in a store, by their names."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.items = {}

    def add(self, name, count):
        if count <= 0:
            raise ValueError("count must be positive")
        if self.total() + count > self.capacity:
            raise OverflowError("the store is full")
        self.items[name] = self.items.get(name, 0) + count

    def remove(self, name, count):
        if self.items.get(name, 0) < count:
            raise KeyError(name)
        self.items[name] -= count
        if self.items[name] == 0:
            del self.items[name]

    def total(self):
        return sum(self.items.values())

    def names(self):
        return sorted(self.items)
'''
_TOTAL = """\
    def total(self):
        return sum(self.items.values())
"""
_MERGE = '''\

    def merge(self, other):
        """Take everything out of another store."""
        for name, count in list(other.items.items()):
            self.add(name, count)
            other.remove(name, count)
'''
GERMAN = (
    "Das Museum ist von Dienstag bis Sonntag geöffnet, jeweils von zehn bis achtzehn Uhr. "
    "Der Eintritt kostet acht Euro, für Kinder unter zwölf Jahren ist er frei. "
    "Führungen beginnen jeden Tag um elf Uhr im Foyer und dauern etwa eine Stunde. "
    "Im Café neben dem Eingang gibt es Kaffee, Kuchen und kleine Speisen. "
    "Bitte lassen Sie große Taschen und Rucksäcke in den Schließfächern im Erdgeschoss."
)


class Edit(NamedTuple):
    """A text, and what it is to become."""

    name: str
    request: str
    text: str
    answer: str


EDITS = (
    Edit(
        "rename",
        "Rename the attribute `items` to `stock_by_name`.",
        CODE,
        CODE.replace("self.items", "self.stock_by_name"),
    ),
    Edit(
        "fix",
        "A count of zero is allowed in `add`.",
        CODE,
        CODE.replace("if count <= 0:", "if count < 0:"),
    ),
    Edit(
        "function",
        "Add a method `merge` that takes everything out of another store.",
        CODE,
        CODE.replace(_TOTAL, _TOTAL + _MERGE),
    ),
    Edit(
        "translation",
        "Update the German translation: the museum closes at eight in the evening, and guided "
        "tours begin at noon and take ninety minutes.",
        GERMAN,
        GERMAN.replace("bis achtzehn Uhr", "bis zwanzig Uhr")
        .replace("um elf Uhr", "um zwölf Uhr")
        .replace("etwa eine Stunde", "etwa neunzig Minuten"),
    ),
)
_WRONG = {CODE: GERMAN, GERMAN: CODE}


class ForcedAnswer(LogitsProcessor):  # type: ignore[misc]
    """Makes an answer the likeliest, token by token."""

    def __init__(self, num_prompt: int, token_ids: Sequence[int]) -> None:
        self._num_prompt, self._ids = num_prompt, token_ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Raise the score of the next token of each row."""
        place = min(input_ids.shape[1] - self._num_prompt, len(self._ids) - 1)
        scores[:, self._ids[place]] += 1e4
        return scores


class TimedCall(NamedTuple):
    """What one call took."""

    num_steps: int
    sec: float


def run(loaded: LoadedModel, num_rounds: int, file: Path | None) -> None:
    """Measure all edits; print and write what was found."""
    settings = {**describe_model(loaded), "rounds": num_rounds}
    content: dict[str, Any] = {"environment": environment(), "settings": settings, "edits": {}}
    for edit in EDITS:
        content["edits"][edit.name] = found = measured(loaded, edit, num_rounds)
        console.print(edit.name, found)
    show(file, content)


def measured(loaded: LoadedModel, edit: Edit, num_rounds: int) -> dict[str, Any]:
    """Return what each method took for an edit, without the text in the prompt and with it."""
    tokenizer = loaded.tokenizer
    answer, text, wrong = (
        tokenizer(each, add_special_tokens=False)["input_ids"]
        for each in (edit.answer, edit.text, _WRONG[edit.text])
    )
    predictions = {"lade": None, "prediction": text}
    alone = {**predictions, "wrong_prediction": wrong}
    asked = {"request": edit.request, "text": f"{edit.request}\n\n{edit.text}"}
    found: dict[str, Any] = {"num_tokens": len(answer)}
    for name, prompt in asked.items():
        inputs = encode(tokenizer, prompt, loaded.model.device)
        methods: dict[str, Callable[..., TimedCall]] = {
            method: partial(_by_lade, prediction=prediction)
            for method, prediction in (alone if name == "request" else predictions).items()
        }
        if name == "text":
            methods["prompt_lookup"] = _by_prompt_lookup
        calls: dict[str, list[TimedCall]] = {method: [] for method in methods}
        for _ in range(num_rounds):
            for method, call in methods.items():
                calls[method].append(call(loaded.model, inputs, answer))
        found[name] = {
            method: {
                "num_steps": of_method[0].num_steps,
                "sec": round(median(each.sec for each in of_method), 2),
                "against_lade": round(
                    median(a.sec / b.sec for a, b in zip(calls["lade"], of_method, strict=True)), 2
                ),
            }
            for method, of_method in calls.items()
        }
    return found


def _by_lade(
    model: Any,
    inputs: dict[str, Any],
    answer: Sequence[int],
    prediction: Sequence[int] | None,
) -> TimedCall:
    start = perf_counter()
    output = lade.generate(model, prediction=prediction, **_options(inputs, answer))
    sec = perf_counter() - start
    _check(output, inputs, answer)
    return TimedCall(output.stats.num_steps, sec)


def _by_prompt_lookup(model: Any, inputs: dict[str, Any], answer: Sequence[int]) -> TimedCall:
    num_forwards = 0

    def count(*_: Any) -> None:
        nonlocal num_forwards
        num_forwards += 1

    hook = model.register_forward_hook(count)
    start = perf_counter()
    output = type(model).generate(model, prompt_lookup_num_tokens=10, **_options(inputs, answer))
    sec = perf_counter() - start
    hook.remove()
    _check(output, inputs, answer)
    return TimedCall(num_forwards - 1, sec)


def _options(inputs: dict[str, Any], answer: Sequence[int]) -> dict[str, Any]:
    processors = LogitsProcessorList([ForcedAnswer(inputs["input_ids"].shape[1], answer)])
    options = {"do_sample": False, "max_new_tokens": len(answer), "eos_token_id": None}
    options |= {"pad_token_id": 0, "return_dict_in_generate": True}
    return {**inputs, **options, "logits_processor": processors}


def _check(output: Any, inputs: dict[str, Any], answer: Sequence[int]) -> None:
    assert output.sequences[0, inputs["input_ids"].shape[1] :].tolist() == [*answer]
