"""Predicted outputs: four edits of a text, with the text as the prediction and without.

The default model is too small to edit well, so a logits processor makes it give the answer that one
would want, an edited copy: what is measured is how soon the answer comes, not how good it is. The
processor is the same for all methods. The prompt asks for the edit; with "text", it has the text as
well, as an editor sends it and as prompt lookup needs it. Methods take turns, call by call.
"""

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList

import lade
from lade.models.loading import LoadedModel, encode

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
        "fix of one line",
        "A count of zero is allowed in `add`.",
        CODE,
        CODE.replace("if count <= 0:", "if count < 0:"),
    ),
    Edit(
        "added function",
        "Add a method `merge` that takes everything out of another store.",
        CODE,
        CODE.replace(_TOTAL, _TOTAL + _MERGE),
    ),
    Edit(
        "translation updated",
        "Update the German translation: the museum closes at eight in the evening, and guided "
        "tours begin at noon and take ninety minutes.",
        GERMAN,
        GERMAN.replace("bis achtzehn Uhr", "bis zwanzig Uhr")
        .replace("um elf Uhr", "um zwölf Uhr")
        .replace("etwa eine Stunde", "etwa neunzig Minuten"),
    ),
)
_WRONG = {CODE: GERMAN, GERMAN: CODE}


class Given(LogitsProcessor):  # type: ignore[misc]
    """Makes an answer the likeliest, token by token."""

    def __init__(self, num_prompt: int, token_ids: Sequence[int]) -> None:
        self._num_prompt, self._ids = num_prompt, token_ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Raise the score of the next token of each row."""
        scores[:, self._ids[input_ids.shape[1] - self._num_prompt]] += 1e4
        return scores


def measure(loaded: LoadedModel, num_rounds: int) -> list[dict[str, Any]]:
    """Return what each method took, by edit; times are medians of the rounds."""
    found = []
    for edit in EDITS:
        for has_text in (False, True):
            found += _measured(loaded, edit, has_text, num_rounds)
    return found


def _measured(
    loaded: LoadedModel, edit: Edit, has_text: bool, num_rounds: int
) -> list[dict[str, Any]]:
    model, tokenizer, _ = loaded
    shown = f"{edit.request}\n\n{edit.text}" if has_text else edit.request
    inputs = encode(tokenizer, shown, model.device)
    answer, text, wrong = (
        tokenizer(each, add_special_tokens=False)["input_ids"]
        for each in (edit.answer, edit.text, _WRONG[edit.text])
    )
    options = {"do_sample": False, "max_new_tokens": len(answer), "eos_token_id": None}
    options |= {"pad_token_id": 0, "return_dict_in_generate": True}
    calls: dict[str, dict[str, Any]] = {
        "plain": {},
        "lade": {"prediction": None},
        "prediction": {"prediction": text},
        "wrong prediction": {"prediction": wrong},
    }
    if has_text:
        calls["prompt lookup"] = {"prompt_lookup_num_tokens": 10}
    times: dict[str, list[float]] = {name: [] for name in calls}
    steps: dict[str, int] = {}
    for _ in range(num_rounds):
        for name, more in calls.items():
            num_forwards = 0

            def count(*_: Any) -> None:
                nonlocal num_forwards
                num_forwards += 1

            processors = LogitsProcessorList([Given(inputs["input_ids"].shape[1], answer)])
            given = {**inputs, **options, **more, "logits_processor": processors}
            hook = None
            if "prediction" not in more:
                hook = model.register_forward_hook(count)
            start = perf_counter()
            if "prediction" in more:
                output = lade.generate(model, **given)
            else:
                output = type(model).generate(model, **given)
            times[name].append(perf_counter() - start)
            if hook is not None:
                hook.remove()
                steps[name] = num_forwards - 1
            else:
                steps[name] = output.stats.num_steps
            assert output.sequences[0, inputs["input_ids"].shape[1] :].tolist() == answer
    return [
        {
            "edit": edit.name,
            "has_text": has_text,
            "method": name,
            "num_tokens": len(answer),
            "num_steps": steps[name],
            "sec": round(median(times[name]), 3),
            "speedup": round(median(map(_ratio, times["plain"], times[name])), 3),
            "against_lade": round(median(map(_ratio, times["lade"], times[name])), 3),
        }
        for name in calls
    ]


def _ratio(a: float, b: float) -> float:
    return a / b
