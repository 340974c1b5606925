"""Drafters on every architecture: the text is that of `generate`, greedy and sampled."""

import warnings
from typing import Any

import pytest
import torch

import lade
from lade.drafters import AssistantModel, CallPool, Merged
from tests.lade.both import same_as_generate
from tests.lade.tiny import tiny_model
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


def _draft(model: Any, *samples: tuple[bool, ...]) -> list[int]:
    """Compare texts by an assistant, alone and beside the pool; return what was asked of each.

    Args:
        model: the target.
        samples: for each of both, whether to sample, call after call.
    """
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    assistant = AssistantModel(tiny_model("llama", vocab_size=vocab_size), length=3)
    asked = [0, 0]
    for i, drafter in enumerate((assistant, Merged([CallPool(), assistant]))):
        for do_sample in samples[i]:
            options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": do_sample}
            _, output = same_as_generate(
                model, PROMPT, drafter=drafter, seed=1, config=STRICT, **options
            )
            asked[i] += sum(source.num_asked for source in output.stats.sources.values())
    return asked


@pytest.mark.parametrize("name", SOME)
def test_text_with_an_assistant_is_that_of_generate(name: str) -> None:
    assert min(_draft(tiny_architecture(name), (False, True), (False, True))) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*causal_lm_types(), *VARIANTS])
def test_every_architecture_keeps_its_text_with_an_assistant(name: str) -> None:
    try:
        model = tiny_architecture(name)
    except CannotBuild as reason:
        pytest.skip(str(reason))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.PlainDecodingWarning)
        _draft(model, (True,), (False,))
