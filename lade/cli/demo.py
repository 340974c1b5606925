"""`lade demo`: compare plain generate and lade on the same prompts, streaming lade's answers."""

import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from lade.bench.baselines import plain, warm_up
from lade.bench.environment import environment
from lade.bench.methods import Lade
from lade.bench.settings import BenchSettings
from lade.chat.figures import sources_text
from lade.chat.pieces import TextStream, without_controls
from lade.cli.bench import describe_model
from lade.cli.comparison import BothAnswers, table_of, total_of, verdict, why_different
from lade.cli.demo_prompts import DEMO_PROMPTS
from lade.cli.options import LearningOptions
from lade.cli.prewarm import prewarm_once
from lade.cli.prompting import check_prompts, read_typed
from lade.cli.results import ResultFiles, keeping
from lade.drafting.drafter import Drafter
from lade.models.loading import LoadedModel, encode
from lade.probing.report import probe
from lade.stats import Step

_DRAFTED = "bold green"


def run(
    loaded: LoadedModel,
    prompts: list[str],
    max_new_tokens: int,
    drafting: LearningOptions,
    drafter: Drafter | None,
    prewarms: bool,
    files: ResultFiles,
) -> None:
    """Answer each prompt with both methods, streaming lade's answer, and print a table.

    Before that, the model is prewarmed if it has not been.
    """
    files.check()
    titled = [(f"prompt {i + 1}", read_typed(prompt)) for i, prompt in enumerate(prompts)]
    titled = titled or DEMO_PROMPTS
    check_prompts(loaded, [prompt for _, prompt in titled], max_new_tokens)
    if prewarms and not drafting.is_plain:
        prewarm_once(loaded)
    out, model, config = Console(highlight=False), loaded.model, drafting.config
    described = describe_model(loaded)
    out.print(
        f"[bold]{described['model']}[/bold], {described['dtype']}, {described['device']}, "
        f"{described['threads']} threads. Each prompt is answered by plain generate, unseen, "
        "and then by lade. Text is shown as lade commits it:"
    )
    by = "by the n-gram pool" if drafter is None else "by the n-gram pool and others"
    out.print(Text(f"drafted {by} and accepted by the model", style=_DRAFTED), end="")
    out.print(", or the model's own token.\n")
    settings = BenchSettings(max_new_tokens)
    for method in (plain, Lade(config, drafter=drafter)):
        warm_up(loaded, method, settings)
    rows: list[BothAnswers] = []
    with keeping(rows) as stopped, drafting.open_pools(loaded) as pools:
        for title, prompt in titled:
            out.rule(f"[bold]{title}", align="left")
            out.print(Text(_shortened(prompt), style="dim"))
            inputs = encode(loaded.tokenizer, prompt, model.device)
            with out.status("plain generate …"):
                expected = plain(model, inputs, settings.options())
            show = TokenPrinter(loaded.tokenizer, out).show
            got = Lade(config, pools, show, drafter)(model, inputs, settings.options())
            out.print()
            row = BothAnswers.of(title, model, inputs, expected, got)
            rows.append(row)
            out.print(f"[dim]{row.speedup:.2f}x plain, {verdict(row.difference)}[/dim]\n")
    if stopped.by is not None:
        out.print()
    described |= {
        "max_new_tokens": max_new_tokens,
        "interrupted": stopped.by is not None,
        "pools": [path.name for path in drafting.pools or []],
        "verification": config.verification or probe(model).verification,
    }
    content = {"environment": environment(), "settings": described}
    files.show({**content, "prompts": [row.as_dict() for row in rows]}, table_of(rows))
    stopped.tell(f"stopped after {len(rows)} of {len(titled)} prompts")
    if text := sources_text(total_of(rows).stats.sources):
        out.print(f"[dim]{text}[/dim]", soft_wrap=True)
    if any(row.difference is not None for row in rows):
        out.print(f"[dim]{why_different(model)}[/dim]")
    stopped.pass_on()


class TokenPrinter:
    """Printer of tokens as text as they come, drafted ones in a colour of their own."""

    def __init__(self, tokenizer: Any, out: Console) -> None:
        self._stream = TextStream(tokenizer)
        self._out = out

    def show(self, step: Step) -> None:
        """Print what a step committed."""
        for i, token_id in enumerate(step.token_ids):
            text = without_controls(self._stream.put(token_id))
            if text:
                style = _DRAFTED if i < step.num_accepted else ""
                self._out.print(Text(text, style=style), end="", soft_wrap=True)
        sys.stdout.flush()


def _shortened(prompt: str) -> str:
    flat = prompt.strip()
    return flat if len(flat) <= 300 else f"{flat[:298].rstrip()} …"
