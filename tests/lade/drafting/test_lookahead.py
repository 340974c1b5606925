"""The Jacobi window beside drafts: what it finds, and that the text never knows of it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import lade
from ngram_pool import Draft
from tests.grids import thinned
from tests.lade.both import answered, same_as_generate
from tests.lade.drafting.made import Guessing
from tests.lade.tiny import ScriptedDrafter, random_prompt, tiny_model

FAMILIES = ["llama", "gpt2", "mistral", "gemma3_text", "llama4_text", "deepseek_v3"]
SIZES = [(1, 3), (5, 4), (7, 5), (2, 6)]


class Learning(ScriptedDrafter):
    """A drafter that is often right, and keeps what the window came to."""

    def __init__(self, answer: Sequence[int], rng: np.random.Generator, accept: float) -> None:
        super().__init__(answer, rng, accept)
        self.num_committed: list[int] = []  # at each step
        self.ngrams: list[list[list[int]]] = []  # of each step

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        self.num_committed.append(len(committed))
        return super().draft(sequence, committed, max_draft_tokens)

    def observe_ngrams(self, sequence: int, ngrams: NDArray[np.int32]) -> None:
        assert ngrams.dtype == np.int32
        self.ngrams.append(ngrams.tolist())


@torch.no_grad()
def slow_ngrams(
    model: Any, answer: list[int], num_committed: list[int], token: int, size: tuple[int, int]
) -> list[list[list[int]]]:
    """Jacobi iteration in plain Python: a forward of its own for every cell, cells by place.

    Every first cell has the same token, as prompts of one token have.
    """
    window_size, ngram_size = size
    iterations = [dict.fromkeys(range(1, window_size + ngram_size - 2), token)]  # by place
    found = []
    for num in num_committed:
        if num + window_size + ngram_size - 3 > len(answer) - 1:
            break  # the window would reach beyond the text
        text = answer[:num]
        j, following = len(iterations) - 1, {}
        for place in iterations[-1] if j else [0, *iterations[0]]:
            column = place - j
            path = [iterations[0][p] for p in range(1, column + 1)]
            path += [iterations[i][column + i] for i in range(1, j + 1)]
            logits = model(torch.tensor([text + path]), use_cache=False).logits
            following[place + 1] = int(logits[0, -1].argmax())
        iterations.append(following)
        of_step = []
        if len(iterations) == ngram_size:
            iterations[0][0] = text[-1]
            of_step = [
                [iterations[i][column + i] for i in range(ngram_size)]
                for column in range(window_size)
            ]
            del iterations[0]
        iterations = [
            {place - 1: token for place, token in iteration.items() if place - 1 >= max(i, 1)}
            for i, iteration in enumerate(iterations)
        ]
        found.append(of_step)
    return found


@pytest.mark.parametrize(
    "family", thinned(["llama", "mistral", "gemma3_text", "deepseek_v3"], "gemma3_text")
)
@pytest.mark.parametrize("size", thinned(SIZES, (5, 4)))
def test_ngrams_are_those_of_a_slow_jacobi_iteration(family: str, size: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    model, prompt = tiny_model(family, seed=3), torch.tensor([[7] * 4])
    options: dict[str, Any] = {"eos_token_id": None, "max_new_tokens": 24}
    for accept in (0.0, 0.8):
        answer = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **options
        )[0].tolist()
        drafter = Learning(answer, rng, accept)
        config = lade.Config(max_draft_tokens=6, lookahead=lade.Lookahead(*size))
        got = answered(model, prompt, drafter=drafter, config=config, **options)
        assert got.sequences[0].tolist() == answer
        expected = slow_ngrams(model, answer, drafter.num_committed, 7, size)
        assert drafter.ngrams == expected
        if len(expected) > size[1]:
            assert len(expected[-1]) == size[0]
        assert got.stats.num_lookahead_tokens > 0


@pytest.mark.parametrize("family", thinned(FAMILIES, "gemma3_text"))
def test_text_with_a_window_is_that_of_generate(family: str) -> None:
    """Greedy and sampled, over random prompts, sizes and budgets; the random state too."""
    rng, total = np.random.default_rng(0), lade.DecodeStats()
    pool = lade.NGramPool(capacity_tokens=2000)  # small: it forgets on the way
    for number in range(16):
        if number % 8 == 0:
            model = tiny_model(family, seed=number)
        options: dict[str, Any] = {
            "max_new_tokens": int(rng.integers(1, 40)),
            "do_sample": number % 2 == 1,
            "temperature": 0.4,
        }
        config = lade.Config(
            max_draft_tokens=[None, 0, 3, 8][number % 4],
            lookahead=lade.Lookahead(*SIZES[int(rng.integers(len(SIZES)))]),
        )
        prompt = random_prompt(rng)
        _, got = same_as_generate(model, prompt, pool=pool, config=config, seed=number, **options)
        total.add(got.stats)
    assert pool.num_open_sequences == 0
    # The comparison means nothing unless windows ran, and drafts were accepted and rejected.
    assert total.num_lookahead_tokens > 600
    assert total.num_accepted_tokens > 20
    assert total.acceptance_rate < 0.98


def test_a_window_may_be_larger_than_any_forward_whose_cost_is_known() -> None:
    model, prompt = tiny_model("llama", seed=3), torch.tensor([[7] * 4])
    config = lade.Config(lookahead=lade.Lookahead(80, 5))
    _, got = same_as_generate(model, prompt, config=config, max_new_tokens=100, eos_token_id=None)
    assert got.stats.num_lookahead_tokens >= 319


# --- what is refused ------------------------------------------------------------------------


def test_sizes_that_mean_nothing_are_refused() -> None:
    assert lade.Lookahead() == lade.Lookahead(window_size=7, ngram_size=5)
    with pytest.raises(ValueError, match=r"expected Lookahead\(window_size=…\) of at least 1, g"):
        lade.Lookahead(0, 4)
    with pytest.raises(ValueError, match=r"expected Lookahead\(ngram_size=…\) of at least 3, got"):
        lade.Lookahead(5, 2)
    with pytest.raises(TypeError, match=r"expected Lookahead\(window_size=…\) to be an integer"):
        lade.Lookahead(True, 4)
    with pytest.raises(TypeError, match=r"Config\(lookahead=…\) to be a Lookahead, got \("):
        lade.Config(lookahead=(5, 4))  # type: ignore[arg-type]


WINDOWED: dict[str, Any] = {"config": lade.Config(lookahead=lade.Lookahead()), "max_new_tokens": 4}


def test_a_window_without_trees_is_refused_with_the_reason() -> None:
    prompt, types = torch.tensor([[5, 6]]), [[["global", "local", "global"], 1]]
    config = lade.Config(verification="chain", lookahead=lade.Lookahead())
    told = r"LlamaForCausalLM here: Config\(verification='chain'\) asks for another method"
    with pytest.raises(lade.UnsupportedOptionError, match=told):
        answered(tiny_model("llama"), prompt, config=config, max_new_tokens=4)
    model = tiny_model("gpt_neo", attention="eager", attention_types=types)
    with pytest.raises(lade.UnsupportedOptionError, match=r"GPTNeoForCausalLM .* local layers ma"):
        answered(model, prompt, **WINDOWED)


def test_a_window_for_a_drafter_that_learns_no_ngrams_is_refused() -> None:
    with pytest.raises(lade.UnsupportedOptionError, match="does not override observe_ngrams"):
        answered(tiny_model("llama"), torch.tensor([[5, 6]]), drafter=Guessing(), **WINDOWED)
