"""`lade bench` and `lade demo`: prompts answered by several methods, and what came of it."""

import json
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from llvmlite.binding import get_host_cpu_name  # the microarchitecture, such as znver5
from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from rich.text import Text
from transformers import TextStreamer

from lade._version import __version__
from lade.apps.bench.busy import beside_busy
from lade.apps.bench.methods import METHODS, Answer, Method
from lade.apps.bench.prompts import Prompt
from lade.apps.bench.report import OVERALL, compared, groups, table, why_different
from lade.apps.bench.rivals import beside_rivals
from lade.apps.bench.run import Result, contest, summarise, warm_up
from lade.apps.chat.view import DRAFTED, AnswerView
from lade.apps.cli.generate import encode_prompts
from lade.apps.cli.loading import bar, check, console, working
from lade.compat import dtype_of
from lade.forward.packed import formats_of
from lade.machine.threads import num_cores
from lade.models.loading import LoadedModel, title_of
from lade.models.settings import Settings
from lade.models.stream import TextStream, without_controls
from lade.probing.plan import probe
from lade.stats import Step

_LEGEND = ": drafted by the n-gram pool and accepted. Plain: the model's own token."
_SHOWN = 300  # characters of a prompt of the demo
_OF_DEMO = ("plain", "prompt_lookup", "lade")


def compare(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    file: Path | None = None,
    is_demo: bool = False,
    is_busy: bool = False,
    has_rivals: bool = False,
) -> None:
    """Have each prompt answered by every method in turn; print and write the results.

    Args:
        file: of the results; None to write none.
        is_demo: whether to show the check of the model first, and the answers of three methods.
        is_busy: whether to compare beside busy processes instead.
        has_rivals: whether other engines answer, too.
    """
    inputs = encode_prompts(loaded, [each.text for each in prompts], settings.max_new_tokens)
    out, results, stopped = Console(highlight=False), list[Result](), None
    shown, methods = None, METHODS
    if has_rivals:
        most = max(each["input_ids"].shape[1] for each in inputs) + settings.max_new_tokens
        methods = METHODS | beside_rivals(loaded, most)
    if is_demo:
        check(loaded)
        shown = _Shown(out, loaded)
        methods = {name: shown.by(name) for name in _OF_DEMO}
    with ExitStack() as stack:
        if is_busy:  # whose loads are many: one table for all prompts
            methods = stack.enter_context(beside_busy(num_cores()))
            prompts = [each._replace(category=OVERALL) for each in prompts]
        with working("Warming up: each method answers shortly"):
            makers = {name: METHODS.get(name, make) for name, make in methods.items()}
            warm_up(loaded, makers, settings)
        answer = contest(loaded.model, methods, settings)
        bars = stack.enter_context(
            bar(MofNCompleteColumn(), TimeRemainingColumn(), is_shown=not is_demo)
        )
        try:
            for number in bars.track(range(len(prompts)), description="answering"):
                if shown is not None:
                    shown.prompt(prompts[number])
                results.append(answer([prompts[number]], inputs[number]))
                if shown is not None:
                    shown.result(results[-1])
        except KeyboardInterrupt as error:
            if not results:
                raise
            stopped = error
    verification = probe(loaded.model).verification
    caption = None if is_demo else f"verification: {verification}"
    out.print(table(results, [*methods], settings.describe(), caption), crop=False)
    if any(each.answers["lade"].rows != each.answers["plain"].rows for each in results):
        out.print(f"[dim]{why_different(loaded.model)}[/dim]", soft_wrap=True)
    if file is not None:
        summary = {
            group: {name: summarise(part, name)._asdict() for name in methods}
            for group, part in groups(results).items()
        }
        how = {**describe_model(loaded), **asdict(settings), "verification": verification}
        how["interrupted"] = stopped is not None
        content = {"settings": how, "summary": summary}
        file.write_text(f"{json.dumps(content, indent=1)}\n", encoding="utf-8")
        console.print(f"[dim]written to {file}[/dim]", soft_wrap=True)
    if stopped is not None:
        console.print(f"stopped after {len(results)} of {len(inputs)} prompts")
        raise stopped


def describe_model(loaded: LoadedModel) -> dict[str, Any]:
    """Return the description of a model, and of how it runs, for results."""
    return {
        "model": title_of(loaded.name),
        "dtype": str(dtype_of(loaded.model)).removeprefix("torch."),
        **({"weights": ", ".join(formats)} if (formats := formats_of(loaded.model)) else {}),
        "device": str(loaded.model.device),
        "threads": torch.get_num_threads(),
    }


# --- the demo -------------------------------------------------------------------------------


class _Shown:
    """Shows what a demo does, the model and its check first."""

    def __init__(self, out: Console, loaded: LoadedModel) -> None:
        self._out, self._view, self._stream = out, AnswerView(out), TextStream(loaded.tokenizer)
        self._streamer = TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._streamer.on_finalized_text = self._text
        model, described = loaded.model, describe_model(loaded)
        num_bytes = sum(weight.nbytes for weight in model.parameters())
        where = described["device"]
        if model.device.type == "cpu":
            where += f", {described['threads']} threads"
        elif model.device.type == "cuda":
            where += f" ({torch.cuda.get_device_name(model.device)})"
        out.print(
            f"[bold]{escape(described['model'])}[/bold]: {type(model).__name__}, "
            f"{num_bytes / 1e6:,.0f} MB of weights, "
            f"{described.get('weights', described['dtype'])}, {where}",
            soft_wrap=True,
        )
        versions = {"lade": __version__, "python": platform.python_version()}
        versions |= {name: metadata.version(name) for name in ("torch", "transformers", "numba")}
        line = ", ".join(f"{name} {version}" for name, version in versions.items())
        line += f"; {platform.machine()}, {get_host_cpu_name()}"
        out.print(f"[dim]{line}[/dim]", soft_wrap=True)
        out.print(str(probe(model)), markup=False, soft_wrap=True)
        if out.is_terminal:
            out.print(Text.assemble("\n", ("Green", DRAFTED), _LEGEND))

    def prompt(self, prompt: Prompt) -> None:
        """Print the beginning of a prompt below a line."""
        self._out.rule(f"[bold]{prompt.id}", align="left")
        flat = without_controls(prompt.text.strip())
        cut = flat if len(flat) <= _SHOWN else f"{flat[:_SHOWN].rpartition(' ')[0]} …"
        self._out.print(Text(cut, style="italic"), soft_wrap=not self._out.is_terminal)

    def by(self, name: str) -> Callable[[], Method]:
        """Return a maker of a method that shows its answers below its name."""
        method = METHODS[name]()
        options: Any = {"streamer": self._streamer}
        if name == "lade":
            options = {"on_step": self._step}

        def answer(model: Any, inputs: dict[str, Any], given: dict[str, Any]) -> Answer:
            self._out.print(f"\n[bold]{name}[/bold]")
            found = method(model, inputs, {**given, **options})
            self._view.write(self._stream.end() + "\n")
            return found

        return lambda: answer

    def _text(self, text: str, stream_end: bool = False) -> None:
        self._view.write(text, "dim")

    def _step(self, step: Step) -> None:
        """Show the tokens of a step, drafted tokens in a colour."""
        for index, token_id in enumerate(step.token_ids):
            self._view.write(self._stream.put(token_id), DRAFTED * (index < step.num_accepted))

    def result(self, result: Result) -> None:
        """Hold the methods' answers to a prompt against plain's."""
        for line in compared(result.answers):
            self._out.print(Text(line, style="dim"), soft_wrap=True)
        self._out.print()
