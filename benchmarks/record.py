"""Record traces: a model's answers, and its likeliest tokens at each of their positions."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.traces import Trace, Traces, write_traces
from lade.bench.environment import environment
from lade.bench.methods import new_rows
from lade.bench.prompts import Prompt
from lade.cli.bench import Chosen, describe_model
from lade.cli.loading import console
from lade.cli.prompting import encode_prompts
from lade.cli.results import Keeping, progress_bar
from lade.compat import CACHE
from lade.drafting.successors import Successors, rank, with_probs
from lade.errors import UnsupportedModelError
from lade.hf.api import generate
from lade.models.loading import LoadedModel
from lade.models.settings import Settings
from lade.stats import ends_in_loop
from ngram_pool import NGramPool

#: Likeliest tokens to keep at each position.
NUM_SUCCESSORS = 16

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
    """Answer all prompts with `lade.generate`, one by one; append to `traces` as each is done."""
    pool = NGramPool(seed=0)
    inputs = encode_prompts(loaded, [each.text for each in prompts], settings.max_new_tokens)
    for prompt, given in zip(prompts, inputs, strict=True):
        sequences = generate(loaded.model, **given, pool=pool, **settings.options())
        prompt_ids = given["input_ids"][0].tolist()
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
        parts.append(Successors.sent(with_probs(rank(logits, num_successors), logits, sampled=1)))
        options[CACHE] = getattr(output, CACHE, None)
        if options[CACHE] is None and start + size < len(token_ids):
            raise UnsupportedModelError(
                f"{type(model).__name__} returns no {CACHE}, so texts of more than {size} "
                f"tokens cannot be recorded; got {len(token_ids)} tokens"
            )
    return Successors(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def run(loaded: LoadedModel, chosen: Chosen, out: Path, settings: Settings) -> None:
    """Answer prompts and write the traces, even after an interruption."""
    traces: list[Trace] = []
    with Keeping(traces) as kept, progress_bar() as bars:
        task = bars.add_task("answering", total=len(chosen.prompts))
        record(
            *(loaded, chosen.prompts, settings, NUM_SUCCESSORS),
            traces=traces,
            on_trace=lambda trace: bars.advance(task),
        )
    described = {
        **describe_model(loaded),
        **asdict(settings),
        "vocab_size": vocab_size_of(loaded.model),
        "num_successors": NUM_SUCCESSORS,
        "prompts": chosen.described,
        "interrupted": kept.by is not None,
    }
    write_traces(out, Traces(traces, described, environment()))
    num_tokens = sum(trace.num_answer_tokens for trace in traces)
    console.print(f"{len(traces)} answers, {num_tokens} tokens written to {out}")
    kept.end(f"stopped after {len(traces)} of {len(chosen.prompts)} prompts")
