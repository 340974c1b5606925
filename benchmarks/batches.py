"""Prompts as left-padded batches, and a method's first answer to some."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.settings import BenchSettings
from lade.bench.baselines import Method
from lade.models.loading import LoadedModel
from lade.models.prompts import encode

_T = TypeVar("_T")
_WARM_UP_PROMPT = "Count from one to ten."
_WARM_UP_TOKENS = 16


def in_batches(prompts: Sequence[_T], batch_size: int) -> list[Sequence[_T]]:
    """Group prompts in their order; the last batch may be smaller."""
    return [prompts[start : start + batch_size] for start in range(0, len(prompts), batch_size)]


def encode_batch(
    loaded: LoadedModel, texts: Sequence[str], pad_token_id: int
) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `attention_mask`, int64 [num_prompts, longest], padded on the left."""
    rows = [encode(loaded.tokenizer, text, loaded.model.device) for text in texts]
    fills = {"input_ids": pad_token_id, "attention_mask": 0}
    return {
        name: pad_sequence(
            [row[name][0] for row in rows], True, padding_value=fill, padding_side="left"
        )
        for name, fill in fills.items()
    }


def find_pad_token_id(loaded: LoadedModel) -> int:
    """Return the tokenizer's padding token, else the model's, else an EOS token, else 0.

    0 will do: without EOS, all rows end at once, and before a prompt, padding is masked.
    """
    defaults: Any = loaded.model.generation_config
    token_ids = (loaded.tokenizer.pad_token_id, defaults.pad_token_id, defaults.eos_token_id)
    for token_id in token_ids:
        if token_id is not None:
            return int(token_id[0] if isinstance(token_id, list) else token_id)
    return 0


def warm_up(loaded: LoadedModel, method: Method, settings: BenchSettings) -> None:
    """Run a method once on a short answer, with the batch size of the settings."""
    pad_token_id = find_pad_token_id(loaded)
    inputs = encode_batch(loaded, [_WARM_UP_PROMPT] * settings.batch_size, pad_token_id)
    short = replace(settings, max_new_tokens=min(_WARM_UP_TOKENS, settings.max_new_tokens))
    method(loaded.model, inputs, short.options(pad_token_id))
