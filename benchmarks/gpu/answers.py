"""Whole answers: `generate`, `generate` with a compiled static cache, and lade by execution.

"installed" is lade as it is without any setting: run eagerly, its budget choosing trees.

Drafts are replayed so that the requested number of tokens is accepted; all else is the work that
lade does. Methods whose clean-up disturbs others (`static` frees memory that recordings use) are
not to share a process with them. Next file: `work.py`.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.device import forget_peak, peak_bytes
from benchmarks.gpu.drafter import ReplayedDrafter
from benchmarks.gpu.shapes import KnownModel, Shape, random_prompt
from benchmarks.gpu.stage import Stage
from benchmarks.gpu.used import NotingLade, recorded_or_fixed
from lade.bench.baselines import Answer, Method, plain
from lade.compat import Model, attention_of, is_compiled_by_generate
from lade.config import Config, Execution
from lade.gpu.policy import DevicePolicy
from lade.probing.profile import release
from lade.stats import DecodeStats

EXECUTIONS: tuple[Execution, ...] = ("eager", "graphs", "compiled")

NUM_PROMPTS = 2
MAX_ROUNDS = 3  # of as many other prompts each
_SHORTER = 3  # tokens that each prompt has less than the one before: no shape comes twice
#: Of the stage for batches; one prompt at once is what other stages measure.
BATCH_SIZES = (4, 8)
_MAX_SEC = 20.0  # of answers, once every prompt is answered
_NUM_WARM_UPS = 2  # the first compiles or captures; with a compiled graph, the second records
_FEW_TOKENS = 8  # for warming up what neither compiles nor captures


class Decoding(NamedTuple):
    """Options of `generate` that all methods get."""

    name: str
    options: Mapping[str, Any]


GREEDY = Decoding("greedy", {"do_sample": False})
SAMPLED = Decoding(
    "sampling at temperature 0.7, top-p 0.9",
    {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0},
)


class Replayed(NamedTuple):
    """Drafts that are accepted as in recorded decoding."""

    counts: Sequence[int]  # of draft tokens that successive steps accept; then they repeat
    num_nodes: int  # of a step's tree, its root included


def measure_answers(
    known: KnownModel,
    shape: Shape,
    name: str,
    replayed: Replayed,
    stage: Stage,
    decoding: Decoding = GREEDY,
    policy: DevicePolicy | None = None,
    num_rows: int = 1,
) -> None:
    """Answer prompts with a method, each of its own length; summarise the results after each.

    Of equal lengths, steps of lade would have shapes that the warm-up has had, which is not what
    users have, and where something is built for each shape it would not show.
    """
    device = known.model.device
    forget_peak(device)
    method = _method(name, known, replayed, policy)
    lengths = [shape.prompt_length - _SHORTER * i for i in range(MAX_ROUNDS * NUM_PROMPTS + 1)]
    prompts = [
        torch.cat([random_prompt(shape, length, num_rows * i + row) for row in range(num_rows)])
        for i, length in enumerate(lengths)
    ]
    expected = [
        [known.answer(last, shape.max_new_tokens) for last in prompt[:, -1].tolist()]
        for prompt in prompts
    ]
    prompts = [prompt.to(device) for prompt in prompts]
    options = {**decoding.options, "max_new_tokens": shape.max_new_tokens}
    warm_up_sec = _warm_up(known.model, name, method, options, prompts.pop(), stage)
    if warm_up_sec is None:
        return
    answers: list[Answer] = []
    prefills: list[float] = []
    others = [*stage.rows]
    start = perf_counter()
    for number, prompt in enumerate(prompts):
        is_over = perf_counter() - start > _MAX_SEC or not stage.has_time
        if number >= NUM_PROMPTS and is_over:
            break
        stage.say(f"{stage.title}: {name}, answer {number + 1}")
        one_token = {"do_sample": False, "max_new_tokens": 1}
        prefills.append(plain(known.model, _inputs(prompt), one_token).sec)
        torch.manual_seed(number)
        answers.append(method(known.model, _inputs(prompt), options))
        row = {
            "method": name,
            "decoding": decoding.name,
            "prompt_length": shape.prompt_length,
            **summary_of(answers, median(prefills), expected),
            "warm_up_sec": warm_up_sec,
            "peak_bytes": peak_bytes(device),
            **_used(known.model, name, method),
        }
        stage.replace([*others, row])


def measure_side_by_side(
    known: KnownModel,
    shape: Shape,
    replayed: Replayed,
    stage: Stage,
    decoding: Decoding = GREEDY,
    policy: DevicePolicy | None = None,
    nums_rows: Sequence[int] = (1,),
) -> None:
    """Measure plain `generate` and lade with recorded steps, one after the other, by batch size.

    Arguments are those of `measure_answers`, but for `nums_rows`: how many prompts at once.
    """
    for num_rows in nums_rows:
        for name in ("plain", "graphs"):
            with stage.part(f"{name}, {num_rows} at once"):
                measure_answers(*(known, shape, name, replayed, stage, decoding, policy, num_rows))
            release(known.model)


def _method(
    name: str,
    known: KnownModel,
    replayed: Replayed,
    policy: DevicePolicy | None,
) -> Method:
    if name == "plain":
        return plain
    if name == "static":
        return _static
    if name == "installed":
        return replaying_lade(known, *replayed, "eager", policy, verifies_all=False)
    (execution,) = (each for each in EXECUTIONS if each == name)
    return replaying_lade(known, *replayed, execution, policy, verifies_all=True)


def replaying_lade(
    known: KnownModel,
    counts: Sequence[int],
    num_nodes: int,
    execution: Execution,
    policy: DevicePolicy | None,
    *,
    verifies_all: bool,
) -> NotingLade:
    """Return lade with replayed drafts."""
    if execution == "graphs":
        execution = recorded_or_fixed(known.model.device, policy)
    config = Config(
        max_draft_tokens=num_nodes - 1 if verifies_all else None,
        execution=execution,
        uses_table=False,  # it would only be looked for
    )
    return NotingLade(config, ReplayedDrafter(known.successors, counts, num_nodes - 1), policy)


def _static(model: Model, inputs: dict[str, Any], options: dict[str, Any]) -> Answer:
    return plain(model, inputs, {**options, "cache_implementation": "static"})


def _warm_up(
    model: Model,
    name: str,
    method: Method,
    options: Mapping[str, Any],
    prompt: torch.Tensor,
    stage: Stage,
) -> float | None:
    """Run a method before it is timed; return the seconds that took, or None if it cannot run."""
    if not stage.may_begin(f"warming {name} up"):
        return None
    # A compiler can fail in many ways, none of them lade's fault.
    took: list[float] = []
    with stage.part(name, *([Exception] if name == "static" else [])):
        few = {"max_new_tokens": _FEW_TOKENS} if name == "plain" else {}
        while len(took) < _NUM_WARM_UPS:
            start = perf_counter()
            method(model, _inputs(prompt), {**options, **few})
            took.append(perf_counter() - start)
    return sum(took) if len(took) == _NUM_WARM_UPS else None


def _inputs(prompt: torch.Tensor) -> dict[str, Any]:
    return {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}


def summary_of(
    answers: Sequence[Answer], prefill_sec: float, expected: Sequence[list[list[int]]]
) -> dict[str, Any]:
    """Return the columns of a method that has answered all prompts in turn; times are medians."""
    sec = median(answer.sec for answer in answers)
    num_rows = len(expected[0])
    num_tokens = sum(map(len, expected[0]))
    is_known = [
        text == known
        for i, answer in enumerate(answers)
        for text, known in zip(answer.rows, expected[i], strict=True)
    ]
    return {
        "num_rows": num_rows,
        "num_tokens": num_tokens,
        "num_repeats": len(answers),
        "sec": sec,
        "tokens_per_sec": num_tokens / sec,
        "prefill_sec": prefill_sec,
        "tokens_per_sec_after_prefill": (
            (num_tokens - num_rows) / (sec - prefill_sec) if sec > prefill_sec else None
        ),
        "share_of_known_text": fmean(is_known),
        **counts_of([answer.stats for answer in answers if answer.stats is not None]),
    }


def counts_of(stats: Sequence[DecodeStats]) -> dict[str, Any]:
    """Return what lade's steps did and how long they took; empty for other methods."""
    total = DecodeStats()
    for each in stats:
        total.add(each)
    if total.num_steps == 0:
        return {}
    own_sec = total.draft_sec + total.verify_sec + total.commit_sec
    return {
        "num_steps": total.num_steps,
        "mean_accepted_tokens": total.mean_accepted_tokens,
        "draft_tokens_per_step": total.draft_tokens_per_step,
        "forward_sec_per_step": total.forward_sec / total.num_steps,
        "own_sec_per_step": own_sec / total.num_steps,
    }


def _used(model: Model, name: str, method: Method) -> dict[str, Any]:
    """Return which attention and execution a method used, and what it recorded in all."""
    if isinstance(method, NotingLade):
        assert method.used is not None
        return {
            **method.used._asdict(),
            "num_recorded": method.tally.num_recorded,
            "num_replayed": method.tally.num_replayed,
            "recording_sec": method.tally.recording_sec,
            "recording_bytes": method.tally.recording_bytes,
        }
    is_compiled = name == "static" and is_compiled_by_generate(model)
    return {"attention": attention_of(model), "execution": "compiled" if is_compiled else "eager"}
