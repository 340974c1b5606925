"""Random calls for a batcher, and what `generate` alone gives for each of them."""

import random
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lade import Batcher, Config, NGramPool
from tests.fuzz.cases import PREDICTIONS
from tests.fuzz.parts import predicted
from tests.lade.tiny import VOCAB_SIZE

Request = Any  # what a batcher gives back


class Asked(NamedTuple):
    """One call: prompt, seed and options."""

    input_ids: Tensor
    seed: int
    options: dict[str, Any]

    def alone(self, model: Any) -> Tensor:
        """Return what `generate` gives for it."""
        torch.manual_seed(self.seed)
        mask = torch.ones_like(self.input_ids)
        tokens: Tensor = model.generate(self.input_ids, attention_mask=mask, **self.options)
        return tokens

    def submitted(self, batcher: Batcher, **more: Any) -> Request:
        """Submit it."""
        mask = torch.ones_like(self.input_ids)
        options = {**self.options, **more}
        return batcher.submit(self.input_ids, attention_mask=mask, seed=self.seed, **options)


def random_call(rng: random.Random) -> Asked:
    """Return a call with some of the options that a request may have."""
    motif = [rng.randrange(VOCAB_SIZE - 1) for _ in range(rng.randint(1, 6))]
    prompt = [*(motif * 9)[: rng.randint(1, 40)], rng.randrange(VOCAB_SIZE - 1)]
    prompts = [prompt]
    if rng.random() < 0.15:
        prompts.append([rng.randrange(VOCAB_SIZE - 1) for _ in prompt])
    options: dict[str, Any] = {"max_new_tokens": rng.randint(1, 40), "do_sample": False}
    if rng.random() < 0.5:
        options |= {
            "do_sample": True,
            "temperature": rng.choice([0.3, 0.8, 1.5]),
            "top_k": rng.choice([0, 5]),
            "top_p": rng.choice([1.0, 0.8]),
        }
    for name, value in (
        ("repetition_penalty", 1.3),
        ("no_repeat_ngram_size", 3),
        ("min_new_tokens", 5),
        ("suppress_tokens", [3, 4, 5]),
        ("eos_token_id", [7, 11]),
        ("num_return_sequences", 2 if options["do_sample"] else 1),
    ):
        if rng.random() < 0.15:
            options[name] = value
    return Asked(torch.tensor(prompts), rng.randrange(2**31), options)


def num_wrong(
    model: Any, num_calls: int, seed: int, batch_size: int = 6, **options: Any
) -> tuple[int, Batcher]:
    """Submit calls at random times; return how many answers differ from `generate`'s.

    Some are cancelled, and some fail in the middle; both count as wrong if they do anything else.
    Some come with a prediction, right or not. `options` are those of the batcher.
    """
    rng = random.Random(seed)
    asked = [random_call(rng) for _ in range(num_calls)]
    expected = [each.alone(model) for each in asked]
    pool = NGramPool()
    wrong = 0
    with Batcher(model, pool=pool, max_batch_size=batch_size, **options) as batcher:
        requests: list[tuple[Request, str]] = []
        for each, tokens in zip(asked, expected, strict=True):
            fate = rng.choice(["", "", "", "", "cancelled", "failing"])
            more: dict[str, Any] = {}
            if fate == "failing":
                more["logits_processor"] = [_failing_after(rng.randint(1, 10))]
            if rng.random() < 0.3:
                more["pool"] = NGramPool()
            if rng.random() < 0.2:
                more["config"] = Config(max_draft_tokens=rng.choice([0, 1, 8]))
            if rng.random() < 0.3:
                answer = tokens[:1, each.input_ids.shape[1] :].tolist()
                more["prediction"] = predicted(answer, rng.choice(PREDICTIONS), rng.randrange(99))
            requests.append((each.submitted(batcher, **more), fate))
            if fate == "cancelled":
                requests[-1][0].cancel()
            if rng.random() < 0.3:
                time.sleep(0.01 * rng.random())
        for (request, fate), tokens in zip(requests, expected, strict=True):
            error = _error_of(request)
            if fate == "failing" and isinstance(error, ArithmeticError):
                continue
            if fate == "cancelled" and error is not None:
                continue
            wrong += error is not None or not torch.equal(request.result(), tokens)
    return wrong, batcher


def _error_of(request: Request) -> BaseException | None:
    try:
        raised: BaseException | None = request.exception()
        return raised
    except BaseException as error:  # it was cancelled before it began
        return error


def _failing_after(num_tokens: int) -> Any:
    num_left = num_tokens

    def process(input_ids: Tensor, scores: Tensor) -> Tensor:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise ArithmeticError("a processor that fails")
        return scores

    return process
