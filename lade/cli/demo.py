"""`lade demo`: the check of a model, and prompts answered by `generate`, lookup and lade."""

import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from llvmlite.binding import get_host_cpu_name  # the microarchitecture, such as znver5
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from lade._version import __version__
from lade.bench.comparison import Side, compared, why_different
from lade.bench.methods import Answer, Lade, Method, plain, prompt_lookup
from lade.bench.prompts import DEMO_PROMPTS, Prompt, read_prompts
from lade.bench.report import empty_table, table
from lade.bench.run import Contest, Result, warm_up
from lade.cli.bench import describe_model
from lade.cli.loading import check, working
from lade.cli.prewarm import note_missing_table
from lade.cli.prompting import encode_prompts, read_typed
from lade.models.loading import LoadedModel
from lade.models.settings import Settings
from lade.models.stream import TextStream, without_controls
from lade.probing.plan import Probe, probe
from lade.stats import Step
from ngram_pool import NGramPool

_DRAFTED = "bold green"
_LEGEND = ": drafted by the n-gram pool and accepted. Plain: the model's own token."
_SHOWN = 300  # characters of a prompt
_TIMES = 2.5  # as long as plain generate, prompt lookup and lade usually take together
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
    check(loaded)
    found = probe(model)
    _show_model(out, loaded, found)
    usual: dict[str, Callable[[], Method]] = {
        "plain": lambda: plain,
        "prompt_lookup": lambda: prompt_lookup,
    }
    with working("Warming up: each method answers shortly"):
        timed = warm_up(loaded, {**usual, "lade": Lade}, settings)["plain"]
    _show_time(out, timed, settings, len(prompts))
    shown, results = _Shown(out, loaded.tokenizer, len(prompts)), list[Result]()
    methods = {
        "plain": shown.by("plain generate", plain, streamer=shown),
        "prompt_lookup": shown.by("prompt lookup", prompt_lookup, streamer=shown),
        "lade": shown.by("lade", Lade(pool=NGramPool(), on_step=shown.step)),
    }
    contest = Contest(model, methods, settings)
    with shown.live:
        for prompt, given in zip(prompts, inputs, strict=True):
            out.rule(f"[bold]{prompt.id}", align="left")
            flat = without_controls(prompt.text.strip())
            cut = flat if len(flat) <= _SHOWN else f"{flat[:_SHOWN].rpartition(' ')[0]} …"
            out.print(Text(cut, style="italic"))
            results.append(contest.answer([prompt], given))
            _show_sides(out, results[-1])
    names = [*results[0].answers]
    out.print(table(results, names, settings.describe()), crop=False)
    if any(each.answers["lade"].rows != each.answers["plain"].rows for each in results):
        out.print(f"[dim]{why_different(model)}[/dim]")
    if found.verification != "plain":
        note_missing_table(loaded)


@dataclass
class _Run:
    """The answers of a method so far."""

    num_answers: int = 0
    num_tokens: int = 0
    sec: float = 0.0  # of whole answers
    begun: float | None = None  # when the answer that is being given began

    @property
    def tokens_per_sec(self) -> float:
        """Tokens per second, 0 before the first answer begins."""
        sec = self.sec + (perf_counter() - self.begun if self.begun else 0.0)
        return self.num_tokens / sec if sec else 0.0


class _Shown:
    """Shows answers as they come, in lines that end between words; a streamer of `generate`.

    In a terminal, the line that grows and a table of the methods so far stand below whole lines.
    """

    def __init__(self, out: Console, tokenizer: Any, num_prompts: int) -> None:
        self._out, self._stream, self._num_prompts = out, TextStream(tokenizer), num_prompts
        self._line, self._word = Text(), Text()  # neither is printed yet
        self._runs: dict[str, _Run] = {}
        self._run, self._has_prompt = _Run(), False  # `generate` gives prompts to streamers first
        self.live = Live(
            console=out, get_renderable=self._below, transient=True, refresh_per_second=8
        )

    def by(self, title: str, method: Method, **options: Any) -> Callable[[], Method]:
        """Return a maker of a method that shows its answers below a title."""
        run = self._runs[title] = _Run()

        def answer(model: Any, inputs: dict[str, Any], given: dict[str, Any]) -> Answer:
            self._out.print(f"\n[bold]{title}[/bold]")
            self._run, self._has_prompt, run.begun = run, False, perf_counter()
            self.live.refresh()
            found = method(model, inputs, {**given, **options})
            self._put(self._stream.end() + "\n", "")
            run.num_answers, run.sec, run.begun = run.num_answers + 1, run.sec + found.sec, None
            return found

        return lambda: answer

    def put(self, value: torch.Tensor) -> None:
        """Show tokens of `generate`'s, dimmed."""
        for token_id in value.flatten().tolist() if self._has_prompt else ():
            self._put_token(token_id, "dim")
        self._has_prompt = True

    def end(self) -> None:
        """Have no more tokens; the method's end shows the rest."""

    def step(self, step: Step) -> None:
        """Show the tokens of a step, drafted tokens in a colour."""
        for index, token_id in enumerate(step.token_ids):
            self._put_token(token_id, _DRAFTED * (index < step.num_accepted))

    def _put_token(self, token_id: int, style: str) -> None:
        self._run.num_tokens += 1
        self._put(self._stream.put(token_id), style)

    def _put(self, text: str, style: str) -> None:
        for part in re.split(r"(\s)", without_controls(text)):
            if not part.isspace():
                self._word.append(part, style)
                continue
            is_full = self._line.cell_len + self._word.cell_len > self._out.width
            if self._line and is_full and self._out.is_terminal:
                self._print_line()
            self._line.append(self._word).append(part * (part != "\n"))
            self._word = Text()
            if part == "\n":
                self._print_line()

    def _print_line(self) -> None:
        line, self._line = self._line, Text()
        line.rstrip()
        self._out.print(line, soft_wrap=True)

    def _below(self) -> Group:
        made = empty_table("", None)
        made.add_column("so far")
        for heading in ("prompts", "tokens", "tokens/s"):
            made.add_column(heading, justify="right")
        for title, run in self._runs.items():
            answers = f"{run.num_answers} of {self._num_prompts}"
            made.add_row(title, answers, f"{run.num_tokens:,}", f"{run.tokens_per_sec:.1f}")
        return Group(self._line + self._word, made)


def _show_sides(out: Console, result: Result) -> None:
    """Print a line for each method's answer to a prompt."""
    sides = [Side(name, each.rows[0], each.sec) for name, each in result.answers.items()]
    for line in compared(sides):
        out.print(Text(line, style="dim"))
    out.print()


def _show_time(out: Console, timed: Answer, settings: Settings, num_prompts: int) -> None:
    """Print the next part and its estimated time, by a short answer of plain generate."""
    sec = timed.sec / timed.num_tokens * settings.max_new_tokens * num_prompts * _TIMES
    about = f"{sec:.0f} seconds" if sec < 100 else f"{sec / 60:.0f} minutes"
    prompts = f"{num_prompts} prompts are" if num_prompts > 1 else "The prompt is"
    line = f"{prompts} answered by three methods, which takes about {about}."
    out.print(f"\n{line}", soft_wrap=True)
    if out.is_terminal:
        out.print(Text.assemble(("Green", _DRAFTED), _LEGEND))


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
