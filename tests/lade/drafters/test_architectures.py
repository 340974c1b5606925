"""Drafters beside models of all kinds: the text is that of `generate`, greedy and sampled."""

from typing import Any

import pytest
import torch

import lade
from lade.drafters import AssistantModel, CallPool, Merged
from tests.grids import thinned
from tests.lade.both import same_as_generate
from tests.lade.shared import shared_model
from tests.support.tiny import tiny_model as tiny_architecture

PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 9, 10, 5, 6]])
# Sliding windows, mixtures of experts, hybrids, recurrent models. How each of the other
# architectures verifies drafts, whoever has made them, is told by `python -m tests.support`.
SOME = (
    *("gemma3_text", "deepseek_v3", "gpt_oss", "mixtral"),
    *("bamba", "qwen3_next", "zamba2", "mamba2"),
)


@pytest.mark.parametrize("name", thinned(SOME, "gemma3_text", "bamba", "mamba2"))
def test_text_with_an_assistant_is_that_of_generate(name: str) -> None:
    model = tiny_architecture(name)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    assistant = AssistantModel(shared_model("llama", vocab_size=vocab_size), length=3)
    config, num_asked = lade.Config(strict_drafter=True), 0
    calls: list[tuple[Any, bool]] = [(Merged([CallPool(), assistant]), True), (assistant, False)]
    for drafter, do_sample in calls:
        options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": do_sample, "seed": 1}
        _, output = same_as_generate(model, PROMPT, drafter=drafter, config=config, **options)
        num_asked += sum(source.num_asked for source in output.stats.sources.values())
    assert num_asked > 0
