"""`lade demo`: compare plain generate and lade on the same prompts, streaming lade's answers."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.text import Text

from lade.bench.baselines import plain
from lade.bench.environment import environment
from lade.bench.methods import Lade
from lade.bench.report import write_json
from lade.bench.settings import BenchSettings
from lade.bench.tables import Sheet
from lade.chat.pieces import TextStream
from lade.cli.bench import check_writable, keeping, print_sheet
from lade.cli.demo_prompts import DEMO_PROMPTS
from lade.cli.drafting import sources_text
from lade.cli.pool import open_pools
from lade.cli.prewarm import prewarm_once
from lade.cli.prompting import check_prompts, read_typed
from lade.closeness import is_exact_in, limit_of
from lade.config import Config
from lade.drafting.drafter import Drafter
from lade.models.loading import LoadedModel, encode
from lade.probing.report import probe
from lade.stats import DecodeStats, Step
from ngram_pool import NGramPool

_DRAFTED = "bold green"
_OWN = ""
_HEADINGS = (
    *("prompt", "tokens", "plain tokens/s", "lade tokens/s", "speed-up", "MAT"),
    *("draft tokens/step", "text"),
)


class Difference(NamedTuple):
    """Where two answers diverge."""

    place: int  # of the first different token, counted from 1
    gap: float  # between the model's top two logits there, recomputed from the whole text
    is_tie: bool  # whether rounding alone may close the gap


class Row(NamedTuple):
    """One line of the table."""

    title: str
    num_plain: int
    plain_sec: float
    stats: DecodeStats
    lade_sec: float
    difference: Difference | None  # None if the texts are the same


def run(
    loaded: LoadedModel,
    prompts: list[str],
    max_new_tokens: int,
    config: Config,
    pool_paths: Sequence[Path],
    save_path: Path | None,
    json_path: Path | None,
    prewarms: bool,
    drafter: Drafter | None = None,
) -> None:
    """Answer each prompt with both methods, streaming lade's answer, and print a table.

    Before that, the model is prewarmed if it has not been.
    """
    check_writable(json_path)
    titled = [(f"prompt {i + 1}", read_typed(prompt)) for i, prompt in enumerate(prompts)]
    titled = titled or DEMO_PROMPTS
    check_prompts(loaded, [prompt for _, prompt in titled], max_new_tokens)
    if prewarms and config.verification != "plain":
        prewarm_once(loaded)
    out = Console(highlight=False)
    model = loaded.model
    dtype = str(model.dtype).removeprefix("torch.")
    out.print(
        f"[bold]{Path(loaded.name).name}[/bold], {dtype}, {model.device}, "
        f"{torch.get_num_threads()} threads. Each prompt is answered by plain generate, unseen, "
        "and then by lade. Text is shown as lade commits it:"
    )
    drafting = "by the n-gram pool" if drafter is None else "by the n-gram pool and others"
    out.print(Text(f"drafted {drafting} and accepted by the model", style=_DRAFTED), end="")
    out.print(", or the model's own token.\n")
    warm_up = encode(loaded.tokenizer, "Count from one to ten.", model.device)
    plain(model, warm_up, BenchSettings(8).options())
    Lade(config, drafter=drafter)(model, warm_up, BenchSettings(8).options())
    rows: list[Row] = []
    with keeping(rows) as stopped, open_pools(loaded, pool_paths, save_path) as pools:
        _answer_all(loaded, titled, max_new_tokens, config, pools, drafter, out, rows)
    if stopped.by is not None:
        out.print()
    print_sheet(_table(rows))
    stopped.tell(f"stopped after {len(rows)} of {len(titled)} prompts")
    total = DecodeStats()
    for row in rows:
        total.add(row.stats)
    if text := sources_text(total.sources):
        out.print(f"[dim]{text}[/dim]", soft_wrap=True)
    if any(row.difference is not None for row in rows):
        out.print(f"[dim]{why_different(model)}[/dim]")
    if json_path is not None:
        settings: dict[str, Any] = {"model": Path(loaded.name).name, "dtype": dtype}
        settings |= {"device": str(model.device), "threads": str(torch.get_num_threads())}
        settings |= {"max_new_tokens": str(max_new_tokens), "interrupted": stopped.by is not None}
        settings["pools"] = [path.name for path in pool_paths]
        settings["verification"] = config.verification or probe(model).verification
        content = {"environment": environment(), "settings": settings}
        write_json(json_path, {**content, "prompts": [_as_json(row) for row in rows]})
        out.print(f"[dim]written to {json_path}[/dim]")
    stopped.pass_on()


def _answer_all(
    loaded: LoadedModel,
    titled: list[tuple[str, str]],
    max_new_tokens: int,
    config: Config,
    pools: Sequence[NGramPool],
    drafter: Drafter | None,
    out: Console,
    rows: list[Row],
) -> None:
    """Answer each prompt with both methods, appending to `rows` as each is done."""
    model = loaded.model
    options = BenchSettings(max_new_tokens).options()
    for title, prompt in titled:
        out.rule(f"[bold]{title}", align="left")
        out.print(Text(_shortened(prompt), style="dim"))
        inputs = encode(loaded.tokenizer, prompt, model.device)
        with out.status("plain generate …"):
            expected = plain(model, inputs, options)
        printer = TokenPrinter(loaded.tokenizer, out)
        got = Lade(config, pools, printer.show, drafter)(model, inputs, options)
        out.print()
        assert got.stats is not None, "lade counts its steps"
        difference = find_difference(model, inputs, expected.rows[0], got.rows[0])
        rows.append(Row(title, expected.num_tokens, expected.sec, got.stats, got.sec, difference))
        speedup = (got.num_tokens / got.sec) / (expected.num_tokens / expected.sec)
        out.print(f"[dim]{speedup:.2f}x plain, {verdict(difference)}[/dim]\n")


class TokenPrinter:
    """Printer of tokens as text as they come, drafted ones in a colour of their own."""

    def __init__(self, tokenizer: Any, out: Console) -> None:
        self._stream = TextStream(tokenizer)
        self._out = out

    def show(self, step: Step) -> None:
        """Print what a step committed."""
        for i, token_id in enumerate(step.token_ids):
            text = self._stream.put(token_id)
            if text:
                style = _DRAFTED if i < step.num_accepted else _OWN
                self._out.print(Text(text, style=style), end="", soft_wrap=True)
        sys.stdout.flush()


def find_difference(
    model: Any, inputs: dict[str, Any], expected: list[int], got: list[int]
) -> Difference | None:
    """Return where two answers diverge and whether it was a tie; None if they are the same."""
    if expected == got:
        return None
    shared = 0
    while shared < min(len(expected), len(got)) and expected[shared] == got[shared]:
        shared += 1
    prefix = torch.tensor(
        [inputs["input_ids"][0].tolist() + expected[:shared]], device=model.device
    )
    with torch.no_grad():
        logits = model(input_ids=prefix, use_cache=False).logits[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    gap = best - second
    return Difference(shared + 1, gap, gap <= limit_of(model) * float(logits.std()))


def why_different(model: Any) -> str:
    """Explain why two answers may differ in the model's dtype."""
    dtype = str(model.dtype).removeprefix("torch.")
    if is_exact_in(model):
        return f"The text should be the same in {dtype}: this is a fault of lade, please report it."
    return (
        f"In {dtype}, a forward over several tokens rounds differently from one over a single "
        "token, and where the model's two best tokens are nearly tied, the texts may part. "
        "--dtype float32 gives the same text."
    )


def verdict(difference: Difference | None) -> str:
    """Describe in a few words whether two answers are the same."""
    if difference is None:
        return "same"
    why = "tie" if difference.is_tie else f"gap {difference.gap:.3g}"
    return f"differs at {difference.place} ({why})"


def _table(rows: list[Row]) -> Sheet:
    total = DecodeStats()
    for row in rows:
        total.add(row.stats)
    plain_sec, lade_sec = sum(row.plain_sec for row in rows), sum(row.lade_sec for row in rows)
    num_plain = sum(row.num_plain for row in rows)
    num_same = sum(row.difference is None for row in rows)
    overall = _cells(Row("overall", num_plain, plain_sec, total, lade_sec, None))
    return Sheet(
        "Plain generate against lade, same machine, same run",
        _HEADINGS,
        1,
        [[_cells(row) for row in rows], [(*overall[:-1], f"{num_same} of {len(rows)} same")]],
    )


def _cells(row: Row) -> tuple[str, ...]:
    plain_rate, lade_rate = row.num_plain / row.plain_sec, row.stats.num_tokens / row.lade_sec
    return (
        row.title,
        str(row.stats.num_tokens),
        f"{plain_rate:.1f}",
        f"{lade_rate:.1f}",
        f"{lade_rate / plain_rate:.2f}x",
        f"{row.stats.mean_accepted_tokens:.2f}",
        f"{row.stats.draft_tokens_per_step:.1f}",
        verdict(row.difference),
    )


def _as_json(row: Row) -> dict[str, Any]:
    difference = row.difference
    text = "same text"
    if difference is not None:
        text = f"differs at token {difference.place}, gap {difference.gap:.3g}"
    entry = {name: value for name, value in row._asdict().items() if name != "difference"}
    return {**entry, "stats": row.stats.as_dict(), "text": text}


def _shortened(prompt: str) -> str:
    flat = prompt.strip()
    return flat if len(flat) <= 300 else f"{flat[:298].rstrip()} …"
