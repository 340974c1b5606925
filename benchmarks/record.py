"""Record traces: a model's answers, and its likeliest tokens at each of their positions."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.batches import encode_batch, find_pad_token_id
from benchmarks.settings import BenchSettings
from benchmarks.traces import Trace, Traces, write_traces
from lade.bench.baselines import new_rows
from lade.bench.environment import environment
from lade.bench.prompts import Prompt
from lade.cli.bench import Chosen, describe_model
from lade.cli.loading import console
from lade.cli.prompting import check_prompts
from lade.cli.results import keeping, progress_bar, say_written
from lade.compat import CACHE
from lade.drafting.successors import Successors, rank, with_probs
from lade.errors import UnsupportedModelError
from lade.hf.api import generate
from lade.models.loading import LoadedModel
from lade.stats import ends_in_loop
from ngram_pool import NGramPool

#: Likeliest tokens to keep at each position.
NUM_SUCCESSORS = 16

_MAX_LOGITS = 2**26  # per forward: 256 MiB in float32; 1365 tokens of a 49,152-token vocabulary


def record(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    num_successors: int,
    *,
    traces: list[Trace],
    on_trace: Callable[[Trace], None] = lambda trace: None,
) -> None:
    """Answer all prompts with `lade.generate`, one by one; append to `traces` as each is done."""
    assert settings.num_rows == 1
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
        options[CACHE] = getattr(output, CACHE, None)
        if options[CACHE] is None and start + size < len(token_ids):
            raise UnsupportedModelError(
                f"{type(model).__name__} returns no {CACHE}, so texts of more than {size} "
                f"tokens cannot be recorded; got {len(token_ids)} tokens"
            )
    return Successors(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def run(loaded: LoadedModel, chosen: Chosen, out: Path, settings: BenchSettings) -> None:
    """Answer prompts and write the traces, even after an interruption."""
    check_prompts(loaded, [prompt.text for prompt in chosen.prompts], settings.max_new_tokens)
    traces: list[Trace] = []
    with keeping(traces) as stopped, progress_bar() as bars:
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
        "interrupted": stopped.by is not None,
    }
    write_traces(out, Traces(traces, described, environment()))
    stopped.tell(f"stopped after {len(traces)} of {len(chosen.prompts)} prompts")
    num_tokens = sum(trace.num_answer_tokens for trace in traces)
    console.print(f"{len(traces)} answers, {num_tokens} tokens")
    say_written([out])
    stopped.pass_on()
