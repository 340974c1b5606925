"""`lade check`: the verification a model gets, the reasons, and its speed-up on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn

from lade.bench.baselines import Answer, plain
from lade.bench.environment import environment
from lade.bench.methods import Lade
from lade.bench.report import rounded, write_json
from lade.bench.settings import BenchSettings
from lade.cli.bench import check_writable, describe_model, keeping
from lade.cli.demo import Difference, find_difference, why_different
from lade.cli.demo_prompts import DEMO_PROMPTS
from lade.cli.loading import console
from lade.cli.prompting import encode_prompt
from lade.errors import in_one_line
from lade.models.loading import LoadedModel
from lade.probing.report import Probe, probe

_WARM_UP_TOKENS = 8
# Per answer: enough to measure a rate; as long as the demo's.
_MIN_TOKENS, _MAX_TOKENS = 16, 128
# Share of the time for plain generate: lade needs about as much or less, and prefills add some.
_SHARE_OF_PLAIN = 0.4

_LABELS = {
    "tree": "tree: all candidates in one forward",
    "rows": "rows: candidates as rows of a batch",
    "chain": "chain: the best candidate alone, in one forward",
    "snapshot": "snapshot: the best candidate alone, from a copy of the state",
    "plain": "plain: no drafts, so the same text at plain speed",
}


@dataclass(slots=True)
class Measured:
    """Measurements of both methods on one prompt, repeated while there is time."""

    title: str
    difference: Difference | None
    plain_rates: list[float] = field(default_factory=list)  # tokens per second
    lade_rates: list[float] = field(default_factory=list)
    speedups: list[float] = field(default_factory=list)  # of lade over plain, per pair of answers

    @property
    def speedup(self) -> float:
        """Median speed-up over the repeats."""
        return median(self.speedups)


def run(loaded: LoadedModel, seconds: float, json_path: Path | None) -> None:
    """Check a model and print the findings, partial ones too after an interruption."""
    check_writable(json_path)
    out = Console(highlight=False)
    made = environment()
    out.print(_described(loaded))
    versions = ("lade", "torch", "transformers", "numba")
    out.print(f"[dim]{', '.join(f'{name} {made[name]}' for name in versions)}; {made['cpu']}[/dim]")
    with console.status("checking how the model verifies drafts …"):
        found = probe(loaded.model)
    _tell_verification(out, found)
    measured: list[Measured] = []
    why_not = "lade decodes the model plainly" if found.verification == "plain" else None
    if seconds <= 0:
        why_not = why_not or "not asked for"
    with keeping([found]) as stopped:
        why_not = why_not or measure(loaded, seconds, measured)
    is_interrupted = not isinstance(stopped.by, Exception | None)
    if stopped.by is not None and not is_interrupted:  # by too little memory, for one
        why_not = in_one_line(stopped.by)
    _tell_speed(out, loaded.model, measured, why_not)
    if json_path is not None:
        write_json(json_path, _as_json(loaded, found, measured, made, stopped.by is not None))
        console.print(f"[dim]written to {json_path}[/dim]")
    if is_interrupted:
        stopped.pass_on()


def measure(loaded: LoadedModel, seconds: float, measured: list[Measured]) -> str | None:
    """Answer prompts with plain generate and lade in turn until the time is up.

    Args:
        loaded: the model.
        seconds: after this time, no answer is begun; the first prompt is always answered.
        measured: receives the measurements as they are made, so an interruption loses none.

    Returns:
        Why nothing was measured; None if something was.
    """
    prompts = _fitting(loaded)
    if not prompts:
        return "the model has positions for none of the prompts"
    by_title: dict[str, Measured] = {}
    columns = (TextColumn("{task.description}"), BarColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("warming up", total=seconds)
        num_tokens = _answer_length(loaded, prompts[0][1], seconds, len(prompts))
        num_done, start = 0, perf_counter()
        while num_done == 0 or perf_counter() - start < seconds:
            title, inputs = prompts[num_done % len(prompts)]
            bars.update(task, description=title, completed=perf_counter() - start)
            is_plain_first = (num_done + num_done // len(prompts)) % 2 == 0
            expected, got = _both(loaded.model, inputs, num_tokens, plain_first=is_plain_first)
            if title not in by_title:
                difference = find_difference(loaded.model, inputs, expected.rows[0], got.rows[0])
                by_title[title] = Measured(title, difference)
                measured.append(by_title[title])
            rates = [answer.num_tokens / answer.sec for answer in (expected, got)]
            by_title[title].plain_rates.append(rates[0])
            by_title[title].lade_rates.append(rates[1])
            by_title[title].speedups.append(rates[1] / rates[0])
            num_done += 1
    return None


def _fitting(loaded: LoadedModel) -> list[tuple[str, dict[str, Any]]]:
    """Return the encoded prompts that leave the model room for an answer."""
    config = loaded.model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    encoded = [(title, encode_prompt(loaded, text)) for title, text in DEMO_PROMPTS]
    return [
        (title, inputs)
        for title, inputs in encoded
        if limit is None or inputs["input_ids"].shape[1] + _MAX_TOKENS <= limit
    ]


def _answer_length(
    loaded: LoadedModel, inputs: dict[str, Any], seconds: float, num_prompts: int
) -> int:
    """Return the answer length at which every prompt gets a turn; warms up both methods."""
    for _ in range(2):  # the first compiles, and measures what steps cost
        answers = _both(loaded.model, inputs, _WARM_UP_TOKENS, plain_first=True)
    rate = answers[0].num_tokens / answers[0].sec
    return int(min(_MAX_TOKENS, max(_MIN_TOKENS, seconds * _SHARE_OF_PLAIN * rate / num_prompts)))


def _both(
    model: Any, inputs: dict[str, Any], num_tokens: int, *, plain_first: bool
) -> tuple[Answer, Answer]:
    """Answer a prompt with both methods; the caller alternates the order, as machines slow down."""
    options = BenchSettings(num_tokens).options()
    if plain_first:
        expected = plain(model, inputs, options)
        return expected, Lade(None)(model, inputs, options)
    got = Lade(None)(model, inputs, options)
    return plain(model, inputs, options), got


# --- output ---------------------------------------------------------------------------------


def _described(loaded: LoadedModel) -> str:
    model = loaded.model
    num_weights = sum(weight.numel() for weight in model.parameters())
    where = str(model.device)
    if model.device.type == "cpu":
        where += f", {torch.get_num_threads()} threads"
    elif model.device.type == "cuda":
        where += f" ({torch.cuda.get_device_name(model.device)})"
    dtype = str(model.dtype).removeprefix("torch.")
    return (
        f"[bold]{escape(Path(loaded.name).name)}[/bold]: {type(model).__name__}, "
        f"{num_weights / 1e6:,.1f} million weights, {dtype}, {where}"
    )


def _tell_verification(out: Console, found: Probe) -> None:
    out.print(f"\n[bold]Verification[/bold] by {_LABELS[found.verification]}")
    out.print(f"[dim]  attention {found.attention}, execution {found.execution}[/dim]")
    for verification, reason in found.reasons.items():
        out.print(Padding(f"not by {verification}: {reason}", (0, 0, 0, 2)), markup=False)


def _tell_speed(
    out: Console, model: Any, measured: Sequence[Measured], why_not: str | None
) -> None:
    if not measured:
        out.print(f"\n[bold]Speed-up[/bold] not measured: {escape(why_not or 'stopped')}")
        return
    speedups = [each.speedup for each in measured]
    rates = [median(rate for each in measured for rate in getattr(each, name)) for name in _RATES]
    noun = "prompt" if len(measured) == 1 else "prompts"
    out.print(
        f"\n[bold]Speed-up {median(speedups):.2f}x[/bold] over plain generate: "
        f"{rates[0]:.1f} → {rates[1]:.1f} tokens/s"
    )
    if len(measured) > 1:
        out.print(
            f"[dim]  the median of {len(measured)} prompts; {min(speedups):.2f}x to "
            f"{max(speedups):.2f}x[/dim]"
        )
    for each in measured:
        out.print(f"  {each.title:<12}{each.speedup:.2f}x")
    if why_not is not None:
        out.print(f"[dim]  stopped early: {escape(why_not)}[/dim]")
    num_same = sum(each.difference is None for each in measured)
    out.print(f"[bold]Text[/bold] the same for {num_same} of {len(measured)} {noun}")
    if num_same < len(measured):
        out.print(Padding(f"[dim]{why_different(model)}[/dim]", (0, 0, 0, 2)))


_RATES = ("plain_rates", "lade_rates")


def _as_json(
    loaded: LoadedModel,
    found: Probe,
    measured: Sequence[Measured],
    made: dict[str, Any],
    was_interrupted: bool,
) -> dict[str, Any]:
    return {
        "environment": made,
        "settings": {
            **describe_model(loaded),
            "interrupted": was_interrupted,
        },
        "verification": found.verification,
        "attention": found.attention,
        "execution": found.execution,
        "reasons": dict(found.reasons),
        "speedup": round(median(each.speedup for each in measured), 4) if measured else None,
        "prompts": [
            rounded(
                {
                    "title": each.title,
                    "speedup": each.speedup,
                    "plain_tokens_per_sec": median(each.plain_rates),
                    "lade_tokens_per_sec": median(each.lade_rates),
                    "same_text": each.difference is None,
                    "repeats": len(each.speedups),
                }
            )
            for each in measured
        ],
    }
