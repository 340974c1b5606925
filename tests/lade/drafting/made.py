"""Drafters that fail, draw, guess or are made for a call, for tests of what lade makes of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import lade
from tests.lade.both import same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import VOCAB_SIZE

PROMPT = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
OPTIONS: dict[str, Any] = {
    "attention_mask": torch.ones_like(PROMPT),
    "do_sample": False,
    "max_new_tokens": 12,
    "pad_token_id": 0,
}
SAMPLED = {**OPTIONS, "do_sample": True, "temperature": 1.5}
STRICT = lade.Config(strict_drafter=True)


def compared(drafter: Any, options: dict[str, Any], **ours: Any) -> Any:
    """Hold the text, and the random state at its end, against those of plain decoding."""
    by = partial(lade.generate, **ours)
    model = shared_model("llama", seed=2)
    _, got = same_as_generate(model, PROMPT, drafter=drafter, seed=7, by=by, **options)
    return got.stats


@contextmanager
def one_warning(match: str) -> Iterator[None]:
    """Expect one warning of a drafter, and no other."""
    with pytest.warns(lade.DrafterWarning, match=match) as told:
        yield
    assert len(told) == 1


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def chain_of(token_ids: Sequence[int], prob: float = 0.9) -> lade.Draft:
    """Return a draft of one path, each of whose nodes has the probability."""
    places = np.arange(len(token_ids), dtype=np.int32)
    return lade.Draft(ints(*token_ids), places - 1, places + 1, np.full(len(places), prob))


def exact_pairs(model: Any, prompt: list[int], temperature: float = 1.0) -> list[float]:
    """Return the probability of each pair of first tokens, [vocab_size * vocab_size]."""
    size = model.config.vocab_size
    prefixes = torch.tensor([[*prompt, first] for first in range(size)])
    with torch.no_grad():
        logits = model(prefixes).logits[:, -2:].float() / temperature
    pairs = logits[0, 0].softmax(-1)[:, None] * logits[:, 1].softmax(-1)
    found: list[float] = pairs.flatten().tolist()
    return found


def pairs_of(sequences: torch.Tensor, num_prompt: int, vocab_size: int) -> Any:
    """Count the pairs of first tokens, int64 [vocab_size * vocab_size]."""
    first, second = sequences[:, num_prompt : num_prompt + 2].numpy().T
    return np.bincount(vocab_size * first + second, minlength=vocab_size**2)


class Faulty(lade.Drafter):
    """Drafts a token, and fails in one method at one of its calls."""

    def __init__(
        self,
        method: str = "",
        at: int = 1,
        answer: Any = None,
        error: BaseException | None = None,
    ) -> None:
        self.method, self.at, self.answer, self.error = method, at, answer, error
        self.calls: list[str] = []
        self.num_open = 0

    def _called(self, method: str) -> bool:
        self.calls.append(method)
        is_now = method == self.method and self.calls.count(method) == self.at
        if is_now and self.error is not None:
            raise self.error
        return is_now

    def open(self, prompt_ids: Sequence[int]) -> int:
        self._called("open")
        self.num_open += 1
        return 3

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Any:
        return self.answer if self._called("draft") else chain_of([6]).first(max_draft_tokens)

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        self._called("observe")

    def close(self, sequence: int) -> None:
        self.num_open -= 1
        self._called("close")


class Able(Faulty):
    """Can do all that a drafter may, and nothing of it well."""

    num_successors: Any = 2

    def harvest(self, *_: Any) -> None:
        self._called("harvest")


def shy(*names: str) -> Any:
    """Return a drafter with attributes that raise when they are read."""

    def look(self: Any) -> Any:
        raise RuntimeError("do not look")

    return type("Shy", (Able,), dict.fromkeys(names, property(look)))()


class Random(Able):
    """Draws from torch's generator, or seeds it, in all that it does."""

    @property
    def num_successors(self) -> int:  # type: ignore[override]
        self._called("num_successors")
        return 2

    def _called(self, method: str) -> bool:
        torch.manual_seed(3) if len(self.calls) % 2 else torch.rand(5)
        return super()._called(method)


class Making(Random):
    """The same, and so does what makes it."""

    def for_call(self, call: Any) -> Any:
        self._called("for_call")
        return Random()


class Maker(lade.Drafter):
    """Makes the drafters of calls."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make
        self.calls: list[Any] = []

    def for_call(self, call: Any) -> Any:
        self.calls.append(call)
        return self.make(call)


class Guessing(lade.Drafter):
    """Drafts one known text, or guesses, whatever the sequence is."""

    name = "guessing"

    def __init__(self, answers: Sequence[Sequence[int]] = (), seed: int = 0) -> None:
        self.answers = [*map(list, answers)]
        self.rng = np.random.default_rng(seed)
        self.texts: dict[int, list[int]] = {}
        self.num_opened = 0

    def open(self, prompt_ids: Sequence[int]) -> int:
        self.num_opened += 1
        self.texts[self.num_opened] = [*prompt_ids]
        return self.num_opened

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> lade.Draft:
        assert self.texts[sequence] == list(committed)
        num = min(4, max_draft_tokens)
        for answer in self.answers:
            if answer[: len(committed)] == list(committed) and self.rng.random() < 0.7:
                return chain_of(answer[len(committed) : len(committed) + num], 0.6)
        return chain_of(self.rng.integers(2, VOCAB_SIZE, num).tolist(), 0.3)

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        self.texts[sequence] += token_ids

    def close(self, sequence: int) -> None:
        del self.texts[sequence]
