"""`lade generate`, one answer, streamed; `lade chat`; `lade prewarm`; prompts of all commands."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from platformdirs import user_data_path
from rich.console import Console
from rich.progress import TimeRemainingColumn

import lade
from lade.apps.chat.conversation import Conversation
from lade.apps.cli import replacing
from lade.apps.cli.loading import bar, check, console, note, tell
from lade.apps.cli.options import DraftOptions
from lade.errors import UserError
from lade.models.loading import LoadedModel
from lade.models.prompts import check_system, encode_messages, num_tokens_after
from lade.models.settings import Settings
from lade.models.stream import TextStream, without_controls
from lade.prewarming.idle import IdlePrewarming
from lade.prewarming.run import Prewarmed, prewarm
from lade.stats import Step


def encode_prompts(
    loaded: LoadedModel, texts: Sequence[str], max_new_tokens: int
) -> list[dict[str, Any]]:
    """Encode prompts, and check that each fits into the context with the longest answer.

    Raises:
        UserError: a prompt does not fit, or has no token; nothing was generated.
    """
    inputs = [encode_messages(loaded, [{"role": "user", "content": text}]) for text in texts]
    longest = max(each["input_ids"].shape[1] for each in inputs)
    num_left = num_tokens_after(loaded.model, longest)
    if num_left is not None and num_left < max_new_tokens:
        raise UserError(
            f"expected --max-new-tokens of at most {num_left} after the longest prompt, "
            f"got {max_new_tokens}"
        )
    return inputs


def run(
    loaded: LoadedModel,
    prompt: str,
    settings: Settings,
    drafting: DraftOptions,
    *,
    system: str | None,
    is_raw: bool,
    stops: Sequence[str],
    prediction: str | None,
) -> None:
    """Print the answer to standard output and a line of figures to standard error."""
    messages, tokenizer = [{"role": "user", "content": prompt}], loaded.tokenizer
    if system is not None:
        check_system(loaded, system)
        messages.insert(0, {"role": "system", "content": system})
    inputs = encode_messages(loaded, messages, is_raw=is_raw)
    num_prompt = inputs["input_ids"].shape[1]
    num_left = num_tokens_after(loaded.model, num_prompt)
    if num_left is not None and num_left < settings.max_new_tokens:
        note(
            f"{type(loaded.model).__name__} has positions for {num_left + num_prompt - 1:,} "
            f"tokens: the answer ends after {num_left:,} at the latest"
        )
        settings = replace(settings, max_new_tokens=num_left)
    options = {**settings.options(), "tokenizer": tokenizer, "stop_strings": [*stops] or None}
    check(loaded)
    stream = TextStream(tokenizer)

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
                prediction=prediction,
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
    from lade.apps.chat.terminal import Terminal, history_in

    check(loaded)
    with drafting.open_pools(loaded) as pools, ExitStack() as stack:
        conversation = Conversation(loaded, settings=settings, pool=pools, system=system)
        try:
            history = history_in(user_data_path("lade", appauthor=False))
        except OSError as error:  # users of services have no home
            history = None
            note(f"typed lines are not kept for the next chat ({error})")
        terminal = Terminal(conversation, Console(highlight=False), history)
        if prewarms:
            idle = IdlePrewarming(loaded.model, lambda: terminal.is_waiting)
            stack.callback(idle.close)
            note_idle_prewarming(idle)
        terminal.run()


# --- lade prewarm ---------------------------------------------------------------------------


def run_prewarm(loaded: LoadedModel, seconds: float, folder: Path | None) -> None:
    """Build or extend a model's table; print its size, even after an interruption."""
    tell("Checking how the model verifies drafts")
    shown: Prewarmed | None = None
    try:
        with bar(TimeRemainingColumn()) as bars:
            task = bars.add_task("", total=seconds)

            def show(made: Prewarmed) -> None:
                nonlocal shown
                shown, speed = made, made.num_tokens / max(made.seconds, 1e-9)
                text = f"{made.num_contexts:,} contexts ({speed:,.0f} tokens/s)"
                bars.update(task, description=text, completed=made.seconds)

            prewarm(loaded.model, seconds, folder=folder, progress=show)
    finally:
        if shown is not None and shown.path.exists():
            size = shown.path.stat().st_size / 10**6
            Console(highlight=False).print(f"{shown.num_contexts:,} contexts in {size:.1f} MB")
            use = "with this model from now on" if folder is None else "beside the model's weights"
            text = f"[dim]kept in {shown.path}, and used {use}; another run adds to it[/dim]"
            console.print(text, soft_wrap=True)


def note_idle_prewarming(idle: IdlePrewarming) -> None:
    """Say that a model is prewarmed while it waits, and for how long."""
    text = "The table of its likely tokens is complete"
    if left := idle.minutes_left:
        text = f"While it waits, the model writes its table of likely tokens, for {left:.0f} "
        text += "minutes in all"
    console.print(f"[dim]{text}.[/dim]", soft_wrap=True)
