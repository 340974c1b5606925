"""Drafters on every architecture: the text is that of `generate`, greedy and sampled."""

import warnings
from typing import Any

import pytest
import torch

import lade
from lade.drafters import AssistantModel, CallPool, Merged
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


def _num_asked(model: Any, drafter: Any, **options: Any) -> int:
    """Compare texts by an assistant; return how often it was asked for drafts."""
    _, output = same_as_generate(model, PROMPT, drafter=drafter, seed=1, config=STRICT, **options)
    return sum(source.num_asked for source in output.stats.sources.values())


def _assistant(model: Any) -> AssistantModel:
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    return AssistantModel(shared_model("llama", vocab_size=vocab_size), length=3)


@pytest.mark.parametrize("name", SOME)
def test_text_with_an_assistant_is_that_of_generate(name: str) -> None:
    model = tiny_architecture(name)
    assistant = _assistant(model)
    for drafter in (assistant, Merged([CallPool(), assistant])):
        options = {"max_new_tokens": 12, "drafter": drafter}
        asked = [_num_asked(model, do_sample=do_sample, **options) for do_sample in (False, True)]
        assert sum(asked) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*causal_lm_types(), *VARIANTS])
def test_every_architecture_keeps_its_text_with_an_assistant(name: str) -> None:
    try:
        model = tiny_architecture(name)
    except CannotBuild as reason:
        pytest.skip(str(reason))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.PlainDecodingWarning)
        drafter = Merged([CallPool(), _assistant(model)])
        _num_asked(model, drafter, max_new_tokens=9, do_sample=True)
