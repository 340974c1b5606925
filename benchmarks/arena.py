"""The arena: methods that decode the same texts live, at equal numbers of draft tokens.

In half precision the texts of two methods soon differ, and with them what can be drafted. So
`generate` writes each answer first, and every method then has to write just that. What it drafts,
and what it learns from the logits of draft tokens, rejected ones too, is all its own.

Time is not measured here, where methods in Python stand beside compiled ones. Given what forwards
take by their number of tokens (`forwards.py`), every method counts by tokens a second of its
forwards, at the draft size that is best for it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.table import Table
from torch import Tensor
from transformers import LogitsProcessorList

from benchmarks.environment import environment
from benchmarks.methods import METHODS as ALL_METHODS
from benchmarks.methods import Given
from benchmarks.prompts import Chosen, fingerprint
from benchmarks.report import Keeping, msec_text, progress_bar, share_text, sheet, show
from benchmarks.rivals.catalogue import RIVALS
from lade.apps.bench.methods import Answer, Method, plain
from lade.apps.bench.prompts import Prompt
from lade.apps.bench.report import LOOPS, OVERALL, groups
from lade.apps.bench.run import Result, stats_of
from lade.apps.cli.bench import describe_model
from lade.apps.cli.generate import encode_prompts
from lade.config import Config
from lade.drafting.tables import table_for
from lade.models.loading import LoadedModel
from lade.models.settings import Settings
from lade.probing.plan import probe
from lade.stats import ends_in_loop

#: The methods that draft nothing but what they verify; without a table, two of lade's are the same.
METHODS = {
    name: ALL_METHODS[name]
    for name in (
        *("lade", "lade_untabled", "lade_fresh"),
        *RIVALS,
    )
}
_NUM_BEFORE = 300  # tokens of prompt and answer before a step, in about the middle of such prompts


class Point(NamedTuple):
    """One method with one draft size, over the answers of one group."""

    group: str  # a category, `OVERALL` (all answers without loops) or `LOOPS`
    method: str
    max_draft_tokens: int
    num_answers: int
    num_tokens: int
    mean_accepted_tokens: float
    draft_tokens_per_step: float
    acceptance_rate: float
    draft_sec_per_step: float
    tokens_per_sec: float | None = None  # of forwards, by their given costs


class ForwardCosts:
    """Seconds of a forward of lade by its number of tokens, from a result of `forwards.py`."""

    def __init__(self, file: Path) -> None:
        measured = json.loads(file.read_text("utf-8"))["seconds"]["lade"]
        nearest = min(measured, key=lambda before: abs(int(before) - _NUM_BEFORE))
        self._sizes, self._sec = zip(*measured[nearest].items(), strict=True)

    def tokens_per_sec(self, mean_accepted_tokens: float, draft_tokens_per_step: float) -> float:
        """Return what steps of one size emit in the time of their forwards."""
        sec = np.interp(1 + draft_tokens_per_step, [*map(int, self._sizes)], self._sec)
        return mean_accepted_tokens / float(sec)


class SameText:
    """A logits processor that leaves one token possible at each place: that of a given text."""

    def __init__(self, num_prompt_tokens: int, token_ids: Sequence[int]) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._token_ids = token_ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores that are -inf for every token but the text's."""
        token_id = self._token_ids[input_ids.shape[1] - self._num_prompt_tokens]
        only = torch.full_like(scores, -torch.inf)
        only[:, token_id] = 0.0
        return only


def run_arena(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    methods: Sequence[str],
    draft_sizes: Sequence[int],
    settings: Settings,
    config: Config,
    *,
    results: list[Result],
    on_answer: Callable[[], None] = lambda: None,
) -> None:
    """Let every method write every text with every draft size, appending a result a prompt.

    Each method starts afresh with every draft size, and keeps what it has learned from prompt to
    prompt where it keeps anything. Its answers are named by both.

    Raises:
        RuntimeError: a method wrote another text, which only a bug can cause.
    """
    options, texts = settings.options(), [prompt.text for prompt in prompts]
    inputs = encode_prompts(loaded, texts, settings.max_new_tokens)
    running: dict[tuple[str, int], Method] = {
        (name, size): METHODS[name].make(Given(replace(config, max_draft_tokens=size)))
        for size in draft_sizes
        for name in methods
    }
    for prompt, given in zip(prompts, inputs, strict=True):
        (text,) = plain(loaded.model, given, options).rows
        same = LogitsProcessorList([SameText(given["input_ids"].shape[1], text)])
        forced = {**options, "max_new_tokens": len(text), "logits_processor": same}
        answers: dict[str, Answer] = {}
        for (name, size), method in running.items():
            answers[f"{name} {size}"] = answer = method(loaded.model, given, forced)
            if answer.rows != [text]:
                raise RuntimeError(f"expected {name} to write the text of generate")
            on_answer()
        results.append(Result([prompt], len(text), answers, ends_in_loop(text)))


def points(results: Sequence[Result], costs: ForwardCosts | None = None) -> list[Point]:
    """Sum up answers by group, in the order of their methods."""
    made = []
    for group, part in groups(results).items():
        for name in part[0].answers:
            method, _, size = name.partition(" ")
            stats = stats_of(result.answers[name] for result in part)
            sums = {name: getattr(stats, name) for name in Point._fields[4:-1]}
            if costs is not None:
                of_steps = stats.mean_accepted_tokens, stats.draft_tokens_per_step
                sums["tokens_per_sec"] = costs.tokens_per_sec(*of_steps)
            made.append(Point(group, method, int(size), len(part), **sums))
    return made


def table(made: Sequence[Point]) -> Table:
    """Return a table of all answers without loops and, in a section apart, of those with loops."""
    best = {
        (each.group, each.method): each  # the last one is kept
        for each in sorted(made, key=lambda point: point.tokens_per_sec or 0.0)
    }
    sections = [
        [
            (
                *(f"{point.group} ({point.num_answers})", point.method),
                *(str(point.max_draft_tokens), f"{point.mean_accepted_tokens:.2f}"),
                f"{point.draft_tokens_per_step:.1f}",
                share_text(point.acceptance_rate),
                msec_text(point.draft_sec_per_step),
                "" if point.tokens_per_sec is None else f"{point.tokens_per_sec:.1f}",
                "*" if point.tokens_per_sec and best[point.group, point.method] is point else "",
            )
            for point in made
            if point.group == group
        ]
        for group in (OVERALL, LOOPS)
    ]
    title = "Live, every step verifying as many draft tokens as it may, loops apart"
    headings = (
        *("answers", "method", "max draft tokens", "MAT", "draft tokens/step", "accepted"),
        *("draft ms/step", "tokens/s of forwards", "best"),
    )
    caption = "All methods write the texts of generate."
    return sheet(title, headings, list(filter(None, sections)), caption)


def run(
    loaded: LoadedModel,
    chosen: Chosen,
    methods: Sequence[str],
    draft_sizes: Sequence[int],
    settings: Settings,
    file: Path | None,
    costs: Path | None = None,
) -> None:
    """Run the arena; print and write the results, even after an interruption."""
    of_forwards = None if costs is None else ForwardCosts(costs)
    num_answers = len(chosen.prompts) * len(methods) * len(draft_sizes)
    prewarmed = table_for(loaded.model)
    results: list[Result] = []
    with Keeping(results) as kept, progress_bar() as bars:
        task = bars.add_task("answering", total=num_answers)
        run_arena(
            *(loaded, chosen.prompts, methods, draft_sizes, settings, Config()),
            results=results,
            on_answer=lambda: bars.advance(task),
        )
    described: dict[str, Any] = {
        **describe_model(loaded),
        **asdict(settings),
        "prompts": chosen.described,
        "methods": {name: METHODS[name].description for name in methods},
        "draft_sizes": [*draft_sizes],
        "num_table_contexts": None if prewarmed is None else prewarmed.pool.num_contexts,
        "verification": probe(loaded.model).verification,
        "costs": None if costs is None else fingerprint(costs),
        "interrupted": kept.by is not None,
    }
    measured = points(results, of_forwards)
    runs = [point._asdict() for point in measured if point.group == OVERALL]
    content = {"environment": environment(), "settings": described, "runs": runs}
    show(file, content, table(measured))
    kept.end(f"stopped after {len(results)} of {len(chosen.prompts)} prompts")
