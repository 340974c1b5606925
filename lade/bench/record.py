"""Record traces: a model's answers, and its likeliest tokens at each of their positions.

Next file: `replay.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lade.bench.baselines import new_rows
from lade.bench.batches import encode_batch, find_pad_token_id
from lade.bench.prompts import Prompt
from lade.bench.run import ends_in_loop
from lade.bench.settings import Settings
from lade.bench.traces import Trace
from lade.drafting.successors import Successors, rank, with_probs
from lade.errors import UnsupportedModelError
from lade.hf.doors import generate
from lade.models.loading import LoadedModel
from ngram_pool import NGramPool

_MAX_LOGITS = 2**26  # per forward: 256 MiB in float32; 1365 tokens of a 49,152-token vocabulary


def record(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    settings: Settings,
    num_successors: int,
    *,
    traces: list[Trace],
    on_trace: Callable[[Trace], None] = lambda trace: None,
) -> None:
    """Answer all prompts with `lade.generate`, one by one, appending to `traces` as each is done.

    Args:
        loaded: the model.
        prompts: the prompts to answer.
        settings: for single rows; the n-th prompt is answered with seed + n, as in `run_methods`.
        num_successors: likeliest tokens to keep at each position; all of a smaller vocabulary.
        traces: receives the traces.
        on_trace: called with each trace.
    """
    assert settings.has_one_row
    pad_token_id = find_pad_token_id(loaded)
    pool = NGramPool(seed=0)
    for number, prompt in enumerate(prompts):
        inputs: dict[str, Any] = encode_batch(loaded, [prompt.text], pad_token_id)
        torch.manual_seed(settings.seed + number)
        sequences = generate(loaded.model, **inputs, pool=pool, **settings.options(pad_token_id))
        prompt_ids = inputs["input_ids"][0].tolist()
        (answer,) = new_rows(loaded.model, sequences, len(prompt_ids))
        token_ids = [*prompt_ids, *answer]
        traces.append(
            Trace(
                prompt.id,
                prompt.category,
                ends_in_loop(answer),
                token_ids,
                len(prompt_ids),
                successors_of(loaded.model, token_ids, num_successors),
            )
        )
        on_trace(traces[-1])


def vocab_size_of(model: Any) -> int:
    """Return the vocabulary size of a model, which bounds the token ids of drafts."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def successors_of(model: Any, token_ids: Sequence[int], num_successors: int) -> Successors:
    """Return the likeliest tokens after each token of a text, [num_tokens, num_successors].

    The text is run in chunks, to bound the memory of their logits.

    Raises:
        UnsupportedModelError: the text is longer than a chunk, and the model has no cache to run
            the rest with.
    """
    vocab_size = vocab_size_of(model)
    size = max(1, _MAX_LOGITS // vocab_size)
    is_whole = len(token_ids) <= size
    options: dict[str, Any] = {} if is_whole else {"use_cache": True}
    parts = []
    for start in range(0, len(token_ids), size):
        chunk = torch.tensor([token_ids[start : start + size]], device=model.device)
        with torch.inference_mode():
            output = model(input_ids=chunk, **options)
        logits = output.logits[0, :, :vocab_size]
        parts.append(with_probs(rank(logits, num_successors), logits, sampled=1).get())
        options["past_key_values"] = getattr(output, "past_key_values", None)
        if options["past_key_values"] is None and start + size < len(token_ids):
            raise UnsupportedModelError(
                f"{type(model).__name__} returns no past_key_values, so texts of more than {size} "
                f"tokens cannot be recorded; got {len(token_ids)} tokens"
            )
    return Successors(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
