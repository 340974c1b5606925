"""`lade generate`, one answer, streamed; and `lade chat`, a conversation in a terminal."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from platformdirs import user_data_path
from rich.console import Console

import lade
from lade.apps.chat.conversation import Conversation
from lade.apps.cli import replacing
from lade.apps.cli.loading import check, console
from lade.apps.cli.options import DraftOptions
from lade.apps.cli.prewarm import note_idle_prewarming
from lade.apps.cli.prompting import max_answer_tokens
from lade.errors import MissingExtraError
from lade.hf.call import predicted_ids
from lade.models.loading import LoadedModel
from lade.models.settings import Settings
from lade.models.stream import TextStream, without_controls
from lade.prewarming.idle import IdlePrewarming
from lade.stats import Step


def run(
    inputs: dict[str, Any],
    stops: Sequence[str],
    loaded: LoadedModel,
    settings: Settings,
    drafting: DraftOptions,
    prediction: str | None = None,
) -> None:
    """Print the answer to standard output and a line of figures to standard error."""
    num_left = max_answer_tokens(
        loaded.model, inputs["input_ids"].shape[1], settings.max_new_tokens
    )
    options = replace(settings, max_new_tokens=num_left).options()
    if stops:
        options |= {"stop_strings": [*stops], "tokenizer": loaded.tokenizer}
    predicted = None if prediction is None else predicted_ids(prediction, loaded.tokenizer)
    check(loaded)
    stream = TextStream(loaded.tokenizer)

    def show(step: Step) -> None:
        _show("".join(map(stream.put, step.token_ids)))

    with drafting.open_pools(loaded) as pools:
        torch.manual_seed(settings.seed)
        start = perf_counter()
        try:
            output = lade.generate(
                loaded.model,
                **inputs,
                **options,
                on_step=show,
                pool=pools,
                prediction=predicted,
                return_dict_in_generate=True,
            )
        except KeyboardInterrupt:
            _show(stream.end(is_cut=True) + "\n")
            raise
        _show(stream.end() + "\n")
        sec = perf_counter() - start
    stats = output.stats
    count = f"{stats.num_tokens} token{'s' * (stats.num_tokens != 1)}"
    figures = [count, f"{stats.num_tokens / sec:.1f} tokens a second"]
    figures.append(f"{stats.mean_accepted_tokens:.2f} tokens a step")
    figures += [f"seed {settings.seed}"] * (settings.temperature > 0)
    console.print(f"[dim]{', '.join(figures)}[/dim]")


def _show(text: str) -> None:
    """Print a part of an answer to standard output, letter by letter into a file or pipe."""
    out = replacing(sys.stdout)
    print(without_controls(text) if out.isatty() else text, end="", flush=True, file=out)


def run_chat(
    loaded: LoadedModel,
    settings: Settings,
    system: str | None,
    drafting: DraftOptions,
    *,
    prewarms: bool = False,
) -> None:
    """Chat until the user leaves; with `prewarms`, prewarm the model while it waits."""
    try:
        from lade.apps.chat.terminal import Terminal, history_in
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "prompt_toolkit", "cli") from None
    check(loaded)
    with drafting.open_pools(loaded) as pools, ExitStack() as stack:
        conversation = Conversation(loaded, settings=settings, pool=pools, system=system)
        history = history_in(user_data_path("lade", appauthor=False))
        terminal = Terminal(conversation, Console(highlight=False), history)
        if prewarms:
            idle = IdlePrewarming(loaded.model, lambda: terminal.is_waiting)
            stack.callback(idle.close)
            note_idle_prewarming(idle)
        terminal.run()
