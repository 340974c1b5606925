"""`lade demo`: what lade does with a model, and prompts answered by `generate`, lookup and lade."""

import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch
from llvmlite.binding import get_host_cpu_name  # the microarchitecture, such as znver5
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from lade._version import __version__
from lade.bench.comparison import Side, compared, why_different
from lade.bench.methods import Lade, Method, plain, prompt_lookup
from lade.bench.prompts import DEMO_PROMPTS, Prompt, read_prompts
from lade.bench.report import table
from lade.bench.run import Contest, Result, warm_up
from lade.cli.bench import describe_model
from lade.cli.loading import console
from lade.cli.prewarm import tell_of_table
from lade.cli.prompting import encode_prompts, read_typed
from lade.models.loading import LoadedModel
from lade.models.settings import Settings
from lade.models.stream import TextStream, without_controls
from lade.probing.plan import Probe, probe
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


def run(loaded: LoadedModel, asked: list[str], max_new_tokens: int) -> None:
    """Tell how a model is verified, answer each prompt by every method, and print a table."""
    texts = [*map(read_typed, asked)]
    titles = [f"prompt {number}" for number in range(1, len(texts) + 1)]
    prompts = [*map(Prompt, titles, titles, texts)] or read_prompts(DEMO_PROMPTS)
    inputs = encode_prompts(loaded, [prompt.text for prompt in prompts], max_new_tokens)
    out, model, settings = Console(highlight=False), loaded.model, Settings(max_new_tokens)
    with console.status("checking how the model verifies drafts …"):
        found = probe(model)
    _tell_model(out, loaded, found)
    stream = TextStream(loaded.tokenizer)

    def on_step(step: Step) -> None:
        for i, token_id in enumerate(step.token_ids):
            text = Text(without_controls(stream.put(token_id)))
            out.print(text, style=_DRAFTED * (i < step.num_accepted), end="", soft_wrap=True)
        out.file.flush()

    others: dict[str, Callable[[], Method]] = {
        "plain": lambda: plain,
        "prompt_lookup": lambda: prompt_lookup,
    }
    results: list[Result] = []
    with console.status("warming up …"):
        warm_up(loaded, {**others, "lade": Lade}, settings)
    others["lade"] = lambda: Lade(pool=NGramPool(), on_step=on_step)
    contest = Contest(model, others, settings)
    out.print("\nText is shown as lade commits it: ", end="")
    out.print(Text("drafted by the n-gram pool and accepted", style=_DRAFTED), end="")
    out.print(", or the model's own token.\n")
    for prompt, given in zip(prompts, inputs, strict=True):
        out.rule(f"[bold]{prompt.id}", align="left")
        flat = without_controls(prompt.text.strip())
        cut = flat if len(flat) <= _SHOWN else f"{flat[:_SHOWN].rstrip()} …"
        out.print(Text(cut, style="dim"))
        results.append(contest.answer([prompt], given))
        out.print(Text(without_controls(stream.end()), _DRAFTED))
        answers = results[-1].answers.items()
        sides = [Side(name, each.rows[0], each.sec) for name, each in answers]
        for line in compared(sides):
            out.print(Text(line, style="dim"))
        out.print()
    names = [*results[0].answers]
    out.print(table(results, names, settings.describe()), crop=False)
    if any(each.answers["lade"].rows != each.answers["plain"].rows for each in results):
        out.print(f"[dim]{why_different(model)}[/dim]")
    if found.verification != "plain":
        tell_of_table(loaded)


def _tell_model(out: Console, loaded: LoadedModel, found: Probe) -> None:
    """Print what is known before anything is answered."""
    model = loaded.model
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    described = describe_model(loaded)
    where = described["device"]
    if model.device.type == "cpu":
        where += f", {described['threads']} threads"
    elif model.device.type == "cuda":
        where += f" ({torch.cuda.get_device_name(model.device)})"
    out.print(
        f"[bold]{escape(Path(loaded.name).name)}[/bold]: {type(model).__name__}, "
        f"{num_bytes / 1e6:,.0f} MB of weights, {described.get('weights', described['dtype'])}, "
        f"{where}"
    )
    versions = {"lade": __version__, "python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in ("torch", "transformers", "numba")}
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    out.print(f"[dim]{told}; {platform.machine()}, {get_host_cpu_name()}[/dim]")
    out.print(f"[bold]Verification[/bold] by {_LABELS.get(found.verification, found.verification)}")
    out.print(f"[dim]  attention {found.attention}, execution {found.execution}[/dim]")
    for verification, reason in found.reasons.items():
        out.print(Padding(f"not by {verification}: {reason}", (0, 0, 0, 2)), markup=False)
