"""Drafters on every architecture: the text is that of `generate`, greedy and sampled."""

import warnings
from typing import Any

import pytest
import torch

import lade
from lade.drafters import AssistantModel, CallPool, Merged
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


def _draft(model: Any) -> dict[str, int]:
    """Compare texts by an assistant, alone and beside the pool; return what was asked of each."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    assistant = AssistantModel(tiny_model("llama", vocab_size=vocab_size), length=3)
    asked: dict[str, int] = {}
    for kind, drafter in (("assistant", assistant), ("merged", Merged([CallPool(), assistant]))):
        for do_sample in (False, True):
            options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": do_sample}
            mask = torch.ones_like(PROMPT)
            torch.manual_seed(1)
            expected = model.generate(PROMPT, attention_mask=mask, **options)
            torch.manual_seed(1)
            output = lade.generate(
                model,
                PROMPT,
                attention_mask=mask,
                drafter=drafter,
                config=STRICT,
                return_dict_in_generate=True,
                **options,
            )
            assert output.sequences.tolist() == expected.tolist()
            num = sum(source.num_asked for source in output.stats.sources.values())
            asked[kind] = asked.get(kind, 0) + num
    return asked


@pytest.mark.parametrize("name", SOME)
def test_text_with_an_assistant_is_that_of_generate(name: str) -> None:
    assert min(_draft(tiny_architecture(name)).values()) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*causal_lm_types(), *VARIANTS])
def test_every_architecture_keeps_its_text_with_an_assistant(name: str) -> None:
    try:
        model = tiny_architecture(name)
    except CannotBuild as reason:
        pytest.skip(str(reason))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.PlainDecodingWarning)
        _draft(model)
