"""`lade generate`: one answer, streamed."""

from time import perf_counter

from transformers import TextStreamer

import lade
from lade.cli.loading import console
from lade.cli.prompting import encode_prompt, room_for
from lade.config import Config
from lade.models import LoadedModel
from ngram_pool import NGramPool


def run(text: str, loaded: LoadedModel, max_new_tokens: int, config: Config) -> None:
    """Print the answer to standard output and a line of figures to standard error."""
    inputs = encode_prompt(loaded, text)
    max_new_tokens = room_for(loaded.model, inputs["input_ids"].shape[1], max_new_tokens)
    streamer = TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
    pool = NGramPool()  # before the clock runs: the first one ever compiles its kernels
    start = perf_counter()
    output = lade.generate(
        loaded.model,
        **inputs,
        streamer=streamer,
        pool=pool,
        config=config,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
    )
    sec = perf_counter() - start
    stats = output.stats
    console.print(
        f"[dim]{stats.num_tokens} tokens, {stats.num_tokens / sec:.1f} a second, "
        f"{stats.mean_accepted_tokens:.2f} per forward[/dim]"
    )
