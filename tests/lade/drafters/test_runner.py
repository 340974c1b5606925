"""A model that is run over a text and over trees that grow after it."""

from typing import Any

import numpy as np
import pytest
import torch

import lade
from lade.drafters.runner import ModelRunner, plan_for
from tests.grids import thinned
from tests.lade.tiny import VOCAB_SIZE, tiny_model
from tests.support.tiny import tiny_model as tiny_architecture

PROMPT = [5, 6, 7, 5, 6, 7, 5]
TREES = ["llama", "gpt2", "gemma3_text", "llama4_text", "deepseek_v3", "mixtral"]
CHAINS = ["bloom", "mamba2", "bamba", "qwen3_next", "rwkv"]


def model_of(name: str) -> Any:
    if name in CHAINS or name == "mixtral":
        return tiny_architecture(name, seed=0, attention=None, dtype=torch.float64)
    return tiny_model(name, seed=1)


def runner_of(model: Any) -> ModelRunner:
    return ModelRunner(model, plan_for(model), 100)


def plain_logits(model: Any, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([text]), use_cache=False).logits[0, -1]
    return logits


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", thinned([*TREES, *CHAINS], "llama", "gemma3_text", "mamba2"))
def test_every_node_has_the_logits_of_its_path(name: str) -> None:
    """Over ten drafts, of which nothing, a part or all is accepted, some of them not run."""
    rng = np.random.default_rng(0)
    model = model_of(name)
    runner = runner_of(model)
    assert runner.is_chain == (name in CHAINS)
    text = [*PROMPT]
    for _ in range(10):
        assert_close(runner.follow(text), plain_logits(model, text))
        paths, newest = [text], 0
        for _ in range(int(rng.integers(4))):
            num = 1 if runner.is_chain else int(rng.integers(1, 4))
            parents = [newest if runner.is_chain else int(rng.integers(len(paths)))] * num
            token_ids = rng.choice(np.arange(2, 90), num, replace=False).tolist()
            for got, token_id, parent in zip(
                runner.grow(token_ids, parents), token_ids, parents, strict=True
            ):
                paths.append([*paths[parent], token_id])
                assert_close(got, plain_logits(model, paths[-1]))
            newest = len(paths) - 1
        accepted = paths[int(rng.integers(len(paths)))]
        text = [*accepted, *rng.integers(2, 90, int(rng.integers(1, 3))).tolist()]


def test_accepted_tokens_are_not_run_again() -> None:
    model = tiny_model("llama", seed=1)
    runner = runner_of(model)
    widths: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    runner.follow(PROMPT)
    runner.grow([8], [0])
    runner.grow([9, 10], [1, 1])
    runner.follow([*PROMPT, 8, 10, 11])
    assert widths == [len(PROMPT) - 1, 1, 1, 2, 1]
    # What the drafts were not asked for runs together.
    runner.follow([*PROMPT, 8, 10, 11, 12, 13, 14])
    assert widths[5:] == [3]


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_another_text_is_run_from_its_beginning(name: str) -> None:
    """As after tokens that a grammar was expected to force."""
    model = model_of(name)
    runner = runner_of(model)
    runner.follow(PROMPT)
    runner.grow([8], [0])
    runner.follow([*PROMPT, 8, 9])
    other = [*PROMPT, 30, 31]
    assert_close(runner.follow(other), plain_logits(model, other))
    assert_close(runner.grow([8], [0])[0], plain_logits(model, [*other, 8]))


def test_tokens_outside_the_vocabulary_never_reach_the_model() -> None:
    runner = runner_of(tiny_model("llama", seed=1))
    with pytest.raises(ValueError, match=f"expected token ids from 0 to 96, got 5 to {VOCAB_SIZE}"):
        runner.follow([*PROMPT, VOCAB_SIZE])


def test_models_that_cannot_draft_are_refused_by_name() -> None:
    wrong = tiny_architecture("mamba", seed=0, attention=None, dtype=torch.float64)
    with pytest.raises(lade.UnsupportedModelError, match="MambaForCausalLM cannot draft, for"):
        plan_for(wrong)
    drawing = tiny_model("opt", dropout=0.5).train()
    with pytest.raises(lade.UnsupportedModelError, match="OPTForCausalLM cannot draft"):
        plan_for(drawing)


def test_nothing_of_a_model_is_changed() -> None:
    model = tiny_model("llama", seed=1)
    model.generation_config.num_beams = 4
    before = {name: id(value) for name, value in vars(model).items()}
    options = vars(model.generation_config).copy()
    runner = runner_of(model)
    runner.follow(PROMPT)
    runner.grow([8], [0])
    runner.close()
    after = {name: id(value) for name, value in vars(model).items() if name != "_lade_profiles"}
    assert after == before
    assert vars(model.generation_config) == options
