"""`lade generate`, one answer, streamed; `lade chat`, a conversation; prompts of all commands."""

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
from lade.apps.cli.loading import check, console, note
from lade.apps.cli.options import DraftOptions, check_text
from lade.apps.cli.prewarm import note_idle_prewarming
from lade.errors import UserError
from lade.hf.call import predicted_ids
from lade.models.loading import LoadedModel
from lade.models.prompts import check_system, encode_messages, num_tokens_after
from lade.models.settings import Settings
from lade.models.stream import TextStream, without_controls
from lade.prewarming.idle import IdlePrewarming
from lade.stats import Step


def encode_prompt(
    loaded: LoadedModel, text: str, *, system: str | None = None, is_raw: bool = False
) -> dict[str, Any]:
    """Return `input_ids` and `attention_mask` of a prompt, int64 [1, num_tokens].

    Raises:
        UserError: the prompt has no token, or the chat template takes no system prompt.
    """
    check_text(text, is_raw=is_raw)
    messages = [{"role": "user", "content": text}]
    if system is not None:
        check_system(loaded, system)
        messages.insert(0, {"role": "system", "content": system})
    return encode_messages(loaded, messages, is_raw=is_raw)


def max_answer_tokens(model: Any, num_prompt_tokens: int, max_new_tokens: int) -> int:
    """Return how many tokens the answer may have; print a note if the positions run out.

    Raises:
        ContextLengthError: the prompt alone is too long.
    """
    num_left = num_tokens_after(model, num_prompt_tokens)
    if num_left is None or num_left >= max_new_tokens:
        return max_new_tokens
    limit = num_left + num_prompt_tokens - 1
    note(
        f"{type(model).__name__} has positions for {limit:,} tokens: the answer ends after "
        f"{num_left:,} at the latest"
    )
    return num_left


def encode_prompts(
    loaded: LoadedModel, texts: Sequence[str], max_new_tokens: int
) -> list[dict[str, Any]]:
    """Encode prompts, and check that each fits into the context with the longest answer.

    Raises:
        UserError: a prompt does not fit, or has no token; nothing was generated.
    """
    inputs = [encode_prompt(loaded, text) for text in texts]
    longest = max(each["input_ids"].shape[1] for each in inputs)
    num_left = max_answer_tokens(loaded.model, longest, max_new_tokens)
    if num_left < max_new_tokens:
        raise UserError(
            f"expected --max-new-tokens of at most {num_left} after the longest prompt, "
            f"got {max_new_tokens}"
        )
    return inputs


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
    from lade.apps.chat.terminal import Terminal, history_in

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
