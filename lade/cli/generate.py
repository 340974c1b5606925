"""`lade generate`: one answer, streamed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import TextStreamer

import lade
from lade.chat.settings import Settings
from lade.cli.drafting import sources_text
from lade.cli.loading import console
from lade.cli.pool import open_pools
from lade.cli.prewarm import learn_after
from lade.cli.prompting import AskedPrompt, encode_prompt, room_for
from lade.config import Config
from lade.drafting.drafter import Drafter
from lade.hf.predictions import predicted_ids
from lade.models.loading import LoadedModel


def run(
    asked: AskedPrompt,
    loaded: LoadedModel,
    settings: Settings,
    config: Config,
    pool_paths: Sequence[Path],
    save_path: Path | None,
    learns: bool,
    drafter: Drafter | None = None,
) -> None:
    """Print the answer to standard output and a line of figures to standard error."""
    inputs = encode_prompt(loaded, asked)
    room = room_for(loaded.model, inputs["input_ids"].shape[1], settings.max_new_tokens)
    options = replace(settings, max_new_tokens=room).options()
    if asked.stops:
        options |= {"stop_strings": [*asked.stops], "tokenizer": loaded.tokenizer}
    prediction = None
    if asked.prediction is not None:
        prediction = predicted_ids(asked.prediction, loaded.tokenizer)
    check_verification(loaded.model, inputs, config, drafter)
    streamer = TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
    with open_pools(loaded, pool_paths, save_path) as pools:
        torch.manual_seed(settings.seed)
        start = perf_counter()
        try:
            output = lade.generate(
                loaded.model,
                **inputs,
                **options,
                streamer=streamer,
                pool=pools,
                drafter=drafter,
                config=config,
                prediction=prediction,
                return_dict_in_generate=True,
            )
        except KeyboardInterrupt:
            streamer.end()  # prints the part of the last word that was held back, ends the line
            raise
        sec = perf_counter() - start
    stats = output.stats
    noun = "token" if stats.num_tokens == 1 else "tokens"
    seed = f", seed {settings.seed}" if settings.temperature > 0 else ""
    console.print(
        f"[dim]{stats.num_tokens} {noun}, {stats.num_tokens / sec:.1f} a second, "
        f"{stats.mean_accepted_tokens:.2f} a step{seed}[/dim]"
    )
    if text := sources_text(stats.sources):
        console.print(f"[dim]{text}[/dim]", soft_wrap=True)
    if learns and config.verification != "plain":
        learn_after(loaded, sec)


def check_verification(
    model: Any, inputs: dict[str, Any], config: Config, drafter: Drafter | None = None
) -> None:
    """Do the work now that is done once per model, so that the answer's time is the answer's own.

    It is checking how drafts are verified, reading the table of `lade prewarm` and compiling the
    pool. `lade.probe` would do only the first, and not for a verification that was asked for.
    """
    console.print("[dim]Checking how the model verifies drafts …[/dim]")
    first = {name: tensor[:, :1] for name, tensor in inputs.items()}
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 2}
    lade.generate(model, **first, drafter=drafter, config=config, **options)
