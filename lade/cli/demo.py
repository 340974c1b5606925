"""`lade demo`: what lade does with a model, and prompts answered by `generate`, lookup and lade."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from lade.bench.baselines import Given, Method, plain, prompt_lookup
from lade.bench.comparison import Side, compared, why_different
from lade.bench.demo_prompts import DEMO_PROMPTS
from lade.bench.environment import environment
from lade.bench.methods import Lade
from lade.bench.prompts import Prompt
from lade.bench.report import as_json, table
from lade.bench.run import Contest, Result
from lade.cli.bench import describe_model
from lade.cli.loading import console
from lade.cli.prewarm import prewarm_once
from lade.cli.prompting import check_prompts, read_typed
from lade.cli.results import ResultFiles, keeping
from lade.models.loading import LoadedModel
from lade.models.prompts import encode
from lade.models.settings import Settings
from lade.models.stream import TextStream, without_controls
from lade.probing.report import Probe, probe
from lade.stats import Step
from ngram_pool import NGramPool

_DRAFTED = "bold green"
_SHOWN = 300  # characters of a prompt
_LABELS = {
    "tree": "tree: all candidates in one forward",
    "chain": "chain: the best candidate alone, in one forward",
    "snapshot": "snapshot: the best candidate alone, from a copy of the state",
    "plain": "plain: no drafts, so the same text at plain speed",
}


def run(
    loaded: LoadedModel,
    prompts: list[str],
    max_new_tokens: int,
    prewarms: bool,
    files: ResultFiles,
) -> None:
    """Tell how a model is verified, answer each prompt by every method, and print a table."""
    asked = [read_typed(prompt) for prompt in prompts]
    titled = [(f"prompt {i + 1}", text) for i, text in enumerate(asked)] or DEMO_PROMPTS
    check_prompts(loaded, [text for _, text in titled], max_new_tokens)
    out, model = Console(highlight=False), loaded.model
    with console.status("checking how the model verifies drafts …"):
        found = probe(model)
    _tell_model(out, loaded, found)
    if prewarms and found.verification != "plain":
        prewarm_once(loaded)
    settings, printer = Settings(max_new_tokens), TokenPrinter(loaded.tokenizer, out)
    methods: dict[str, Callable[[], Method]] = {
        "plain": lambda: plain,
        "prompt_lookup": lambda: prompt_lookup(Given()),
        "lade": lambda: Lade(None, NGramPool(), printer.show),
    }
    results: list[Result] = []
    with keeping(results) as stopped:
        with console.status("warming up …"):
            contest = Contest(loaded, methods, settings)
        printer.shows = True
        out.print("\nText is shown as lade commits it: ", end="")
        out.print(Text("drafted by the n-gram pool and accepted", style=_DRAFTED), end="")
        out.print(", or the model's own token.\n")
        for title, text in titled:
            out.rule(f"[bold]{title}", align="left")
            flat = without_controls(text.strip())
            shown = flat if len(flat) <= _SHOWN else f"{flat[:_SHOWN].rstrip()} …"
            out.print(Text(shown, style="dim"))
            result = contest.answer(Prompt(title, title, text))
            out.print()
            prompt_ids = encode(loaded.tokenizer, text)["input_ids"][0].tolist()
            sides = [Side(name, each.rows[0], each.sec) for name, each in result.answers.items()]
            for line in compared(model, prompt_ids, sides):
                out.print(Text(line, style="dim"))
            out.print()
            results.append(result)
    _show_results(out, loaded, found, results, settings, files, stopped.by is not None)
    stopped.tell(f"stopped after {len(results)} of {len(titled)} prompts")
    stopped.pass_on()


def _tell_model(out: Console, loaded: LoadedModel, found: Probe) -> None:
    """Print what is known before anything is answered."""
    model, made = loaded.model, environment()
    num_weights = sum(weight.numel() for weight in model.parameters())
    described = describe_model(loaded)
    where = described["device"]
    if model.device.type == "cpu":
        where += f", {described['threads']} threads"
    elif model.device.type == "cuda":
        where += f" ({torch.cuda.get_device_name(model.device)})"
    out.print(
        f"[bold]{escape(Path(loaded.name).name)}[/bold]: {type(model).__name__}, "
        f"{num_weights / 1e6:,.1f} million weights, {described['dtype']}, {where}"
    )
    versions = ("lade", "torch", "transformers", "numba")
    out.print(f"[dim]{', '.join(f'{name} {made[name]}' for name in versions)}; {made['cpu']}[/dim]")
    out.print(f"[bold]Verification[/bold] by {_LABELS.get(found.verification, found.verification)}")
    out.print(f"[dim]  attention {found.attention}, execution {found.execution}[/dim]")
    for verification, reason in found.reasons.items():
        out.print(Padding(f"not by {verification}: {reason}", (0, 0, 0, 2)), markup=False)


def _show_results(
    out: Console,
    loaded: LoadedModel,
    found: Probe,
    results: list[Result],
    settings: Settings,
    files: ResultFiles,
    is_interrupted: bool,
) -> None:
    """Print tables of all prompts, and write them; say why texts differ, if any does."""
    names = [*results[0].answers]
    described = {
        **describe_model(loaded),
        "max_new_tokens": settings.max_new_tokens,
        "interrupted": is_interrupted,
        "verification": found.verification,
        "attention": found.attention,
        "execution": found.execution,
        "reasons": dict(found.reasons),
    }
    files.show(as_json(results, names, described), table(results, names, settings.describe()))
    if any(result.answers["lade"].rows != result.answers["plain"].rows for result in results):
        out.print(f"[dim]{why_different(loaded.model)}[/dim]")


class TokenPrinter:
    """Printer of tokens as text as they come, drafted ones in a colour of their own."""

    def __init__(self, tokenizer: Any, out: Console) -> None:
        self._stream = TextStream(tokenizer)
        self._out = out
        self.shows = False  # until it is to

    def show(self, step: Step) -> None:
        """Print what a step committed."""
        if not self.shows:
            return
        for i, token_id in enumerate(step.token_ids):
            text = without_controls(self._stream.put(token_id))
            if text:
                style = _DRAFTED if i < step.num_accepted else ""
                self._out.print(Text(text, style=style), end="", soft_wrap=True)
        sys.stdout.flush()
