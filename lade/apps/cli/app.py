"""Commands, their options and help texts; the implementations are in other modules.

Shared options are in `options.py`, those of `lade pool` in `pool.py` and those of `lade serve`
in `serve.py`.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lade.apps.cli.options import (
    IS_FILE,
    JSON,
    SYSTEM,
    TEMPERATURE,
    ChatSamplingOptions,
    DraftOptions,
    LoadOptions,
    SamplingOptions,
    check_text,
    grouped,
    length,
    load_model,
    of_drafting,
    of_model,
    option,
    read_prediction,
    read_prompt,
    read_typed,
)
from lade.apps.cli.pool import app as pool
from lade.apps.cli.serve import serve
from lade.errors import UserError
from lade.models.settings import Settings

if TYPE_CHECKING:
    from lade.apps.bench.prompts import Prompt

app = typer.Typer(
    name="lade",
    help="Generate faster with any Hugging Face causal LM: no draft model, no training, same text.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # in which paragraphs flow
)

# Panels of the list of commands.
_USE = "Use"
_MEASURE = "Measure"
_PREPARE = "Prepare"


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version."),
    debug: bool = typer.Option(
        False, "--debug", help="Show the traceback of every error: lade --debug COMMAND …"
    ),
) -> None:
    """Handle the options given before a command."""
    context.ensure_object(dict)["debug"] = debug
    if version:
        from lade._version import __version__

        print(__version__)
        raise typer.Exit


@app.command(rich_help_panel=_USE)
@grouped
def generate(
    *,
    prompt: str = typer.Argument(
        metavar="PROMPT", help="What to ask; - reads standard input.", callback=read_prompt
    ),
    max_new_tokens: int = length(256),
    system: str | None = SYSTEM,
    raw: bool = option(False, "--raw", help="Leave out the model's chat template."),
    stop: list[str] | None = option(
        None, metavar="TEXT", help="End with this text; may be repeated.", callback=read_typed
    ),
    loading: LoadOptions,
    sampling: SamplingOptions,
    drafting: DraftOptions,
    prediction: Path | None = of_drafting(
        None, help="Draft from this text, which the answer resembles.", **IS_FILE
    ),
) -> None:
    """Answer one prompt; the text appears as it is generated."""
    if system is not None and raw:
        raise UserError("expected --system or --raw, got both: a raw prompt has no system prompt")
    check_text(prompt, is_raw=raw)
    if "" in (stop or []):
        raise UserError("expected each --stop to be a text of one character or more, got ''")
    predicted, settings = read_prediction(prediction), sampling.settings(max_new_tokens)
    loaded = loading.load()
    from lade.apps.cli.generate import run  # imports transformers

    of_prompt: Any = {"system": system, "is_raw": raw, "stops": stop or (), "prediction": predicted}
    run(loaded, prompt, settings, drafting, **of_prompt)


@app.command(rich_help_panel=_USE)
@grouped
def chat(
    *,
    max_new_tokens: int = length(1024),
    system: str | None = SYSTEM,
    prewarm: bool = of_drafting(
        False, "--prewarm", help="Prewarm the model while it waits for you."
    ),
    loading: LoadOptions,
    sampling: ChatSamplingOptions,
    drafting: DraftOptions,
) -> None:
    """Chat with a model in this terminal.

    Answers appear as they come, with their speed. /help lists the commands, such as /plain, which
    compares lade with plain generate.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(
            "expected a terminal to chat in; lade generate - answers a question from a pipe or file"
        )
    settings = sampling.settings(max_new_tokens)
    loaded = loading.load()
    from lade.apps.cli.generate import run_chat

    run_chat(loaded, settings, system, drafting, prewarms=prewarm)


app.command(rich_help_panel=_USE)(serve)


@app.command(rich_help_panel=_MEASURE)
@grouped
def demo(
    *,
    max_new_tokens: int = length(128),
    prompt: list[str] | None = option(
        None,
        metavar="TEXT",
        help="Use this prompt instead of the six; may be repeated.",
        callback=read_typed,
    ),
    loading: LoadOptions,
) -> None:
    """Show how lade verifies drafts of a model, and how much faster it is on this machine.

    A check finds the best exact method of verification for the model, and why better methods are
    ruled out. Then plain generate, transformers' prompt lookup and lade answer six prompts, as in
    lade bench, and you read along.
    """
    from lade.apps.bench.prompts import DEMO_PROMPTS, Prompt, read_prompts

    titled = [Prompt(f"prompt {n}", f"prompt {n}", text) for n, text in enumerate(prompt or [], 1)]
    _measure(titled or read_prompts(DEMO_PROMPTS), Settings(max_new_tokens), loading, is_demo=True)


@app.command(rich_help_panel=_MEASURE)
@grouped
def bench(
    *,
    prompts: Path | None = option(
        None,
        help="Prompts: one a line, or JSON lines with 'turns' (the first is used) or 'prompt', "
        "and optionally 'category' [the six of the demo].",
        **IS_FILE,
    ),
    max_new_tokens: int = length(128),
    loading: LoadOptions,
    temperature: float = TEMPERATURE,
    busy: bool = option(False, "--busy", help="Instead, compare beside busy processes."),
    rivals: bool = option(False, "--rivals", help="Also run llama.cpp and OpenVINO on the file."),
    json: Path | None = JSON,
) -> None:
    """Compare lade with plain generate and with transformers' prompt lookup, on your prompts.

    All methods answer each prompt in turn, with the same options and seeds. lade has one pool for
    all prompts, lade_fresh a new pool for each, and no_drafts decodes one token a step (on a CPU,
    by the compiled forward pass). The columns of the table:

    - tokens/s: tokens of the answer, over the time of the whole call.
    - tokens/CPU s: the same over the time of all cores.
    - MAT: mean accepted tokens, the tokens of a step; plain generate has 1.00.
    - same text: the share of answers with plain's tokens. When it samples, prompt_lookup draws
      other random numbers, so its texts differ.
    - accepted: the share of draft tokens that were accepted.
    """
    from lade.apps.bench.prompts import DEMO_PROMPTS, read_prompts

    if rivals:
        if busy or temperature > 0:
            raise UserError("--rivals goes with neither --busy nor --temperature")
        from lade.apps.bench.rivals import installed  # imports torch

        installed()  # an error comes before a model is loaded
    settings, how = Settings(max_new_tokens, temperature), {"is_busy": busy, "has_rivals": rivals}
    _measure(read_prompts(prompts or DEMO_PROMPTS), settings, loading, file=json, **how)


def _measure(prompts: "list[Prompt]", settings: Settings, loading: LoadOptions, **how: Any) -> None:
    """Compare methods on prompts, once a model is loaded for what can be answered."""
    for each in prompts:
        check_text(each.text)
    loaded = loading.load()
    from lade.apps.cli.bench import compare  # imports torch, in silence

    compare(loaded, prompts, settings, **how)


@app.command(rich_help_panel=_PREPARE)
@grouped
def prewarm(
    *,
    seconds: float = option(
        120.0, min=1.0, help="Run for T seconds; another run goes on from there [120]."
    ),
    out: Path | None = option(
        None, metavar="FOLDER", help="Write lade.pool here, to publish it with the weights."
    ),
    loading: LoadOptions,
) -> None:
    """Make a table of a model's likely next tokens, to draft from the first step on.

    No text is needed: the model is asked about single tokens, the most frequent first, and writes
    texts itself. The table is kept in your cache folder and used with this model from then on, also
    in other dtypes and on other devices. A lade.pool beside a model's weights is used by everyone
    who loads them.
    """
    loaded = loading.load()
    from lade.apps.cli.generate import run_prewarm

    run_prewarm(loaded, seconds, out)


@app.command("warm-up", rich_help_panel=_PREPARE)
@grouped
def warm_up(
    model: str | None = of_model(
        None, metavar="ID", help="Also compile what this model needs [none]."
    ),
    shared: bool = option(False, "--shared", help="Compile for all users of this installation."),
) -> None:
    """Compile kernels now, which the first run would do, for about a minute.

    They are kept for later processes on CPUs of this kind, in an image for instance. With --shared,
    they stand beside the installed code, where all users read them and only you may write.
    """
    from lade.apps.cli.loading import check, check_shared

    if shared:
        check_shared()
    check(None if model is None else load_model(model))


app.add_typer(pool, name="pool", rich_help_panel=_PREPARE)
