"""Tiny models whose decoder can be read, with heads of whole vectors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lade.forward.widening import WidenedModel
from tests.support.tiny import VARIANTS, CannotBuild, causal_lm_types, tiny_model

# One of each sort of layer; those of the quick run have most sorts between them.
QUICK = [
    *("llama", "gemma2", "phi3", "starcoder2", "stablelm", "gpt2", "bert", "youtu", "qwen2_moe"),
    *("gpt_oss", "gemma4_text-values"),
]
SORTS = [
    *(*QUICK, "gemma3_text", "cohere2", "olmo2", "qwen3", "glm", "granite", "nemotron"),
    *("gpt_neox", "mixtral", "glm4_moe", "afmoe", "gemma4_text-shared", "lfm2"),
    "granitemoehybrid",
]
MAMBAS = "granitemoehybrid", "bamba"  # in 16 bits, torch rounds the state behind a single token
# Their layers see a text one after the other, so that batches of them are plain.
CHAINS = [
    *("lfm2", *MAMBAS, "lfm2_moe", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe"),
    "qwen3_5_moe_text",
]
# Whose forwards are published to run by jobs.
PUBLISHED = Path(__file__).parents[3] / "docs" / "support" / "forwards.json"
READABLE = json.loads(PUBLISHED.read_text(encoding="utf-8"))["jobs"]
# Bounded scores, sinks and latents take no parts, nor do models that count positions by themselves,
# so that batches of them are plain.
COUNTING = ["bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart"]
COUNTING += ["pegasus", "plbart"]
PLAIN = "gemma2", "gpt_oss", "youtu", *COUNTING
FORMATS = [torch.float32, torch.bfloat16, torch.float16]


def model_of(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return a model of a test's own; skip where the installed transformers has none like it."""
    if family not in (*causal_lm_types(), *VARIANTS):
        pytest.skip(f"transformers has no {family}")
    try:
        return tiny_model(family, dtype=dtype, **options)
    except CannotBuild as error:
        if options:
            raise
        pytest.skip(str(error))


def widened(model: Any) -> Any:
    """Return the view of a model in 16 bits that computes in float32; else the model."""
    narrow = model.dtype in (torch.bfloat16, torch.float16)
    return WidenedModel(model, model.dtype).view if narrow else model


class LowRank(nn.Module):
    """A linear layer with low-rank additions, as PEFT has them."""

    def __init__(self, inner: nn.Linear, rank: int, dtype: torch.dtype, names: str) -> None:
        super().__init__()
        self.inner, self.active, self.is_off = inner, [*names], False
        self.times = {name: 0.5 + place for place, name in enumerate(names)}
        self.firsts, self.seconds = nn.ModuleDict(), nn.ModuleDict()
        self.dropout = nn.Dropout(0.5)
        for name in names:
            self.firsts[name] = nn.Linear(inner.in_features, rank, bias=False, dtype=dtype)
            self.seconds[name] = nn.Linear(rank, inner.out_features, bias=name == "b", dtype=dtype)

    def forward(self, states: Tensor) -> Tensor:
        made: Tensor = self.inner(states)
        total = made
        for name in [] if self.is_off else self.active:
            first: Any = self.firsts[name]
            between = first(self.dropout(states.to(first.weight.dtype)))
            total = total + self.seconds[name](between) * self.times[name]
        return total.to(made.dtype)


def adapted(
    model: Any, rank: int = 5, dtype: torch.dtype | None = None, names: str = "ab"
) -> list[LowRank]:
    """Give all linear layers but the head low-rank additions."""
    torch.manual_seed(2)
    made = []
    for parent in [*model.model.modules()]:
        for name, child in [*parent.named_children()]:
            if type(child) is nn.Linear and not isinstance(parent, LowRank):
                one = LowRank(child, rank, dtype or child.weight.dtype, names)
                setattr(parent, name, one.requires_grad_(False).eval())
                made.append(one)
    return made
