"""Drafters on every architecture: the text is that of `generate`, greedy and sampled."""

import warnings
from typing import Any

import pytest
import torch

import lade
from lade.drafters import AssistantModel, CallPool, Merged
from tests.grids import thinned
from tests.lade.both import same_as_generate
from tests.lade.shared import shared_model
from tests.support.tiny import VARIANTS, CannotBuild, causal_lm_types
from tests.support.tiny import tiny_model as tiny_architecture

STRICT = lade.Config(strict_drafter=True)
PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 9, 10, 5, 6]])
# Sliding windows, hybrids, mixtures of experts, recurrent models.
SOME = (
    "bamba",
    "deepseek_v3",
    "gemma3_text",
    "gpt_oss",
    "mamba2",
    "mixtral",
    "qwen3_next",
    "zamba2",
)


@pytest.mark.parametrize("name", thinned([*causal_lm_types(), *VARIANTS], *SOME))
def test_every_architecture_keeps_its_text_with_an_assistant(name: str) -> None:
    try:
        model = tiny_architecture(name)
    except CannotBuild as reason:
        pytest.skip(str(reason))
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    assistant = AssistantModel(shared_model("llama", vocab_size=vocab_size), length=3)
    calls: list[tuple[Any, bool]] = [(Merged([CallPool(), assistant]), True)]
    calls += [(assistant, False)] if name in SOME else []
    num_asked = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.PlainDecodingWarning)
        for drafter, do_sample in calls:
            options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": do_sample, "seed": 1}
            _, output = same_as_generate(model, PROMPT, drafter=drafter, config=STRICT, **options)
            num_asked += sum(source.num_asked for source in output.stats.sources.values())
    assert num_asked > 0 or name not in SOME
