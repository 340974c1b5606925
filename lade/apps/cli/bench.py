"""`lade bench` and `lade demo`: prompts answered by several methods, and what came of it."""

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from llvmlite.binding import get_host_cpu_name  # the microarchitecture, such as znver5
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from rich.text import Text

from lade._version import __version__
from lade.apps.bench.comparison import Side, compared, why_different
from lade.apps.bench.methods import METHODS, Answer, Lade, Method, plain, prompt_lookup
from lade.apps.bench.prompts import Prompt
from lade.apps.bench.report import groups, table
from lade.apps.bench.run import Contest, Result, summarise, warm_up
from lade.apps.chat.view import DRAFTED, AnswerView
from lade.apps.cli.loading import bar, check, console, working
from lade.apps.cli.prewarm import note_missing_table
from lade.apps.cli.prompting import encode_prompts
from lade.compat import dtype_of
from lade.forward.packed import formats_of
from lade.models.loading import LoadedModel
from lade.models.settings import Settings
from lade.models.stream import TextStream, without_controls
from lade.probing.plan import Probe, probe
from lade.stats import Step
from ngram_pool import NGramPool

_LEGEND = ": drafted by the n-gram pool and accepted. Plain: the model's own token."
_SHOWN = 300  # characters of a prompt of the demo
_TIMES = 2.5  # as long as plain generate, prompt lookup and lade usually take together
_LABELS = {
    "tree": "tree: all candidates in one forward",
    "chain": "chain: the best candidate alone, in one forward",
    "snapshot": "snapshot: the best candidate alone, from a copy of the state",
    "plain": "plain: no drafts, so the same text at plain speed",
}


def compare(
    loaded: LoadedModel, prompts: Sequence[Prompt], settings: Settings, file: Path | None
) -> None:
    """Run every method of `lade bench`."""
    out, results = Console(highlight=False), list[Result]()
    inputs = encode_prompts(loaded, [each.text for each in prompts], settings.max_new_tokens)
    stopped: KeyboardInterrupt | None = None
    with bar(MofNCompleteColumn(), TimeRemainingColumn()) as bars:
        task = bars.add_task("answering", total=len(inputs))
        warm_up(loaded, METHODS, settings)
        contest = Contest(loaded.model, METHODS, settings)
        try:
            for prompt, given in zip(prompts, inputs, strict=True):
                results.append(contest.answer([prompt], given))
                bars.advance(task)
        except KeyboardInterrupt as error:
            if not results:
                raise
            stopped = error
    verification = probe(loaded.model).verification
    if verification != "plain":
        note_missing_table(loaded)
    caption = f"verification: {verification}"
    out.print(table(results, [*METHODS], settings.describe(), caption), crop=False)
    if file is not None:
        summary = {
            group: {name: summarise(part, name)._asdict() for name in METHODS}
            for group, part in groups(results).items()
        }
        how = {**describe_model(loaded), **asdict(settings), "verification": verification}
        how["interrupted"] = stopped is not None
        text = json.dumps({"settings": how, "summary": summary}, indent=1)
        file.write_text(f"{text}\n", encoding="utf-8")
        console.print(f"[dim]written to {file}[/dim]", soft_wrap=True)
    if stopped is not None:
        console.print(f"stopped after {len(results)} of {len(inputs)} prompts")
        raise stopped


def describe_model(loaded: LoadedModel) -> dict[str, Any]:
    """Return the description of a model, and of how it runs, for results."""
    return {
        "model": Path(loaded.name).name,
        "dtype": str(dtype_of(loaded.model)).removeprefix("torch."),
        **({"weights": ", ".join(formats)} if (formats := formats_of(loaded.model)) else {}),
        "device": str(loaded.model.device),
        "threads": torch.get_num_threads(),
    }


# --- the demo -------------------------------------------------------------------------------


def demonstrate(loaded: LoadedModel, prompts: Sequence[Prompt], settings: Settings) -> None:
    """Tell how a model is verified, answer each prompt by every method, and print a table."""
    inputs = encode_prompts(loaded, [each.text for each in prompts], settings.max_new_tokens)
    out, model = Console(highlight=False), loaded.model
    check(loaded)
    found = probe(model)
    _show_model(out, loaded, found)
    names = "plain", "prompt_lookup", "lade"
    with working("Warming up: each method answers shortly"):
        timed = warm_up(loaded, {name: METHODS[name] for name in names}, settings)["plain"]
    _show_time(out, timed, settings, len(prompts))
    shown, results = _Shown(out, loaded.tokenizer), list[Result]()
    made = (
        shown.by("plain generate", plain, streamer=shown),
        shown.by("prompt lookup", prompt_lookup, streamer=shown),
        shown.by("lade", Lade(pool=NGramPool(), on_step=shown.step)),
    )
    contest = Contest(model, dict(zip(names, made, strict=True)), settings)
    for prompt, given in zip(prompts, inputs, strict=True):
        out.rule(f"[bold]{prompt.id}", align="left")
        flat = without_controls(prompt.text.strip())
        cut = flat if len(flat) <= _SHOWN else f"{flat[:_SHOWN].rpartition(' ')[0]} …"
        out.print(Text(cut, style="italic"))
        results.append(contest.answer([prompt], given))
        sides = [Side(name, each.rows[0], each.sec) for name, each in results[-1].answers.items()]
        for line in compared(sides):
            out.print(Text(line, style="dim"))
        out.print()
    out.print(table(results, names, settings.describe()), crop=False)
    if any(each.answers["lade"].rows != each.answers["plain"].rows for each in results):
        out.print(f"[dim]{why_different(model)}[/dim]")
    if found.verification != "plain":
        note_missing_table(loaded)


class _Shown:
    """Shows each method's answer as it comes; a streamer of `generate`."""

    def __init__(self, out: Console, tokenizer: Any) -> None:
        self._out, self._view, self._stream = out, AnswerView(out), TextStream(tokenizer)
        self._has_prompt = False  # `generate` gives prompts to streamers first

    def by(self, title: str, method: Method, **options: Any) -> Callable[[], Method]:
        """Return a maker of a method that shows its answers below a title."""

        def answer(model: Any, inputs: dict[str, Any], given: dict[str, Any]) -> Answer:
            self._out.print(f"\n[bold]{title}[/bold]")
            self._has_prompt = False
            found = method(model, inputs, {**given, **options})
            self._view.write(self._stream.end() + "\n", "")
            return found

        return lambda: answer

    def put(self, value: torch.Tensor) -> None:
        """Show tokens of `generate`'s, dimmed."""
        for token_id in value.flatten().tolist() if self._has_prompt else ():
            self._view.write(self._stream.put(token_id), "dim")
        self._has_prompt = True

    def end(self) -> None:
        """Have no more tokens; the method's end shows the rest."""

    def step(self, step: Step) -> None:
        """Show the tokens of a step, drafted tokens in a colour."""
        for index, token_id in enumerate(step.token_ids):
            self._view.write(self._stream.put(token_id), DRAFTED * (index < step.num_accepted))


def _show_time(out: Console, timed: Answer, settings: Settings, num_prompts: int) -> None:
    """Print the next part and its estimated time, by a short answer of plain generate."""
    sec = timed.sec / timed.num_tokens * settings.max_new_tokens * num_prompts * _TIMES
    about = f"{sec:.0f} seconds" if sec < 100 else f"{sec / 60:.0f} minutes"
    prompts = f"{num_prompts} prompts are" if num_prompts > 1 else "The prompt is"
    line = f"{prompts} answered by three methods, which takes about {about}."
    out.print(f"\n{line}", soft_wrap=True)
    if out.is_terminal:
        out.print(Text.assemble(("Green", DRAFTED), _LEGEND))


def _show_model(out: Console, loaded: LoadedModel, found: Probe) -> None:
    """Print the model, its check and the machine before the first answer."""
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
        f"{where}",
        soft_wrap=True,
    )
    versions = {"lade": __version__, "python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in ("torch", "transformers", "numba")}
    line = ", ".join(f"{name} {version}" for name, version in versions.items())
    out.print(f"[dim]{line}; {platform.machine()}, {get_host_cpu_name()}[/dim]", soft_wrap=True)
    out.print(f"[bold]Verification[/bold] by {_LABELS.get(found.verification, found.verification)}")
    for verification, reason in found.reasons.items():
        out.print(Padding(f"not by {verification}: {reason}", (0, 0, 0, 2)), markup=False)
