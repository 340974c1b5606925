"""`lade check`: the verification a model gets, the reasons, and its speed-up on this machine."""

from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from lade.bench.baselines import Answer, plain
from lade.bench.environment import environment
from lade.bench.methods import Lade
from lade.bench.settings import BenchSettings
from lade.cli.bench import describe_model
from lade.cli.comparison import BothAnswers, table_of, total_of, why_different
from lade.cli.demo_prompts import DEMO_PROMPTS
from lade.cli.loading import bar, console
from lade.cli.prompting import encode_prompt
from lade.cli.results import ResultFiles, keeping
from lade.errors import in_one_line
from lade.models.loading import LoadedModel
from lade.models.prompts import num_positions
from lade.probing.report import Probe, probe

_WARM_UP_TOKENS = 8
# Per answer: enough to measure a rate; as long as the demo's.
_MIN_TOKENS, _MAX_TOKENS = 16, 128
# Share of the time for plain generate: lade needs about as much or less, and prefills add some.
_SHARE_OF_PLAIN = 0.4

_LABELS = {
    "tree": "tree: all candidates in one forward",
    "chain": "chain: the best candidate alone, in one forward",
    "snapshot": "snapshot: the best candidate alone, from a copy of the state",
    "plain": "plain: no drafts, so the same text at plain speed",
}


def run(loaded: LoadedModel, seconds: float, files: ResultFiles) -> None:
    """Check a model and print the findings, partial ones too after an interruption."""
    files.check()
    out = Console(highlight=False)
    made = environment()
    out.print(_described(loaded))
    versions = ("lade", "torch", "transformers", "numba")
    out.print(f"[dim]{', '.join(f'{name} {made[name]}' for name in versions)}; {made['cpu']}[/dim]")
    with console.status("checking how the model verifies drafts …"):
        found = probe(loaded.model)
    _tell_verification(out, found)
    rows: list[BothAnswers] = []
    why_not = "lade decodes the model plainly" if found.verification == "plain" else None
    if seconds <= 0:
        why_not = why_not or "not asked for"
    with keeping([found]) as stopped:
        why_not = why_not or measure(loaded, seconds, rows)
    is_interrupted = not isinstance(stopped.by, Exception | None)
    if stopped.by is not None and not is_interrupted:  # by too little memory, for one
        why_not = in_one_line(stopped.by)
    _tell_speed(out, rows, why_not)
    content = {
        "environment": made,
        "settings": {**describe_model(loaded), "interrupted": stopped.by is not None},
        "verification": found.verification,
        "attention": found.attention,
        "execution": found.execution,
        "reasons": dict(found.reasons),
        "speedup": total_of(rows).speedup if rows else None,
        "prompts": [row.as_dict() for row in rows],
    }
    files.show(content, *([table_of(rows)] if rows else []))
    if any(row.difference is not None for row in rows):
        out.print(f"[dim]{why_different(loaded.model)}[/dim]")
    if is_interrupted:
        stopped.pass_on()


def measure(loaded: LoadedModel, seconds: float, rows: list[BothAnswers]) -> str | None:
    """Answer prompts with plain generate and lade in turn until the time is up.

    The first prompt is always answered; `rows` receives each as it is, so an interruption loses
    none. Return why nothing was measured; None if something was.
    """
    limit = num_positions(loaded.model)
    encoded = [(title, encode_prompt(loaded, text)) for title, text in DEMO_PROMPTS]
    prompts = [
        (title, inputs)
        for title, inputs in encoded
        if limit is None or inputs["input_ids"].shape[1] + _MAX_TOKENS <= limit
    ]
    if not prompts:
        return "the model has positions for none of the prompts"
    with bar() as bars:
        task = bars.add_task("warming up", total=seconds)
        num_tokens = _answer_length(loaded, prompts[0][1], seconds, len(prompts))
        num_done, start = 0, perf_counter()
        while num_done == 0 or perf_counter() - start < seconds:
            place = num_done % len(prompts)
            title, inputs = prompts[place]
            bars.update(task, description=title, completed=perf_counter() - start)
            is_plain_first = (num_done + num_done // len(prompts)) % 2 == 0
            answers = _both(loaded.model, inputs, num_tokens, plain_first=is_plain_first)
            row = BothAnswers.of(title, loaded.model, inputs, *answers)
            if num_done < len(prompts):
                rows.append(row)
            else:
                rows[place].add(row)
            num_done += 1
    return None


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


def _tell_speed(out: Console, rows: list[BothAnswers], why_not: str | None) -> None:
    if not rows:
        out.print(f"\n[bold]Speed-up[/bold] not measured: {escape(why_not or 'stopped')}")
        return
    out.print(f"\n[bold]Speed-up {total_of(rows).speedup:.2f}x[/bold] over plain generate")
    if why_not is not None:
        out.print(f"[dim]  stopped early: {escape(why_not)}[/dim]")
