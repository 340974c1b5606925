"""Tiny models whose decoder can be read, with heads of whole vectors."""

from typing import Any

import pytest
import torch

from tests.support.tiny import CannotBuild, causal_lm_types, tiny_model

QUICK = [
    *("llama", "gemma2", "gemma3_text", "cohere2", "olmo2", "qwen3", "phi3", "starcoder2"),
    *("glm", "granite", "nemotron", "stablelm"),
]
READABLE = [
    *QUICK,
    *("arcee", "cohere", "cwm", "emu3", "ernie4_5", "exaone", "exaone4", "gemma", "gemma3"),
    *("glm4", "granite_swa", "helium", "hyperclovax", "internlm3", "iquestcoder", "jais2"),
    *("ministral", "mistral", "mllama", "moss_transcribe_diarize", "olmo3", "phi"),
    *("phi4_multimodal", "qwen2", "seed_oss", "smollm3", "vaultgemma"),
]
FORMATS = [torch.float32, torch.bfloat16, torch.float16]


def model_of(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return a model of a test's own; skip where the installed transformers has none like it."""
    if family not in causal_lm_types():
        pytest.skip(f"transformers has no {family}")
    try:
        return tiny_model(family, dtype=dtype, **options)
    except CannotBuild as error:
        if options:
            raise
        pytest.skip(str(error))
