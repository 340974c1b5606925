"""Whole answers: `generate`, `generate` with a compiled static cache, and lade, in turn.

Drafts are replayed so that the requested number of tokens is accepted; all else is the work that
lade does. Next file: `real.py`.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch

from lade.bench.baselines import Answer, Method, plain
from lade.bench.gpu.drafter import ReplayedDrafter
from lade.bench.gpu.shapes import KnownModel, Shape, random_prompt
from lade.bench.gpu.stage import Stage
from lade.bench.methods import Lade
from lade.compat import Model
from lade.config import Config
from lade.stats import DecodeStats

#: By name, in the order of tables.
METHODS = {
    "plain": "generate",
    "static": 'generate(cache_implementation="static"), which transformers compiles on CUDA',
    "lade": "lade.generate, drafts replayed at the MAT asked for",
}

_NUM_PROMPTS = 2
_MAX_ROUNDS = 3  # over all prompts
_NUM_WARM_UPS = 2  # the first compiles or captures; with a compiled graph, the second records
_FEW_TOKENS = 8  # for warming up what neither compiles nor captures


def measure_speed(
    known: KnownModel, shape: Shape, counts: Sequence[int], num_nodes: int, stage: Stage
) -> None:
    """Run every method on the same prompts in turn and summarise the results.

    Args:
        known: the model.
        shape: has the lengths of prompts and answers.
        counts: how many draft tokens successive steps of lade accept.
        num_nodes: nodes of each of its trees, the root included.
        stage: receives a row per method; methods that fail are left out with the reason.
    """
    drafter = ReplayedDrafter(known.successors, counts, num_nodes - 1)
    methods: dict[str, Method] = {
        "plain": plain,
        "static": _static,
        "lade": Lade(Config(max_draft_tokens=num_nodes - 1), drafter=drafter),
    }
    device = known.model.device
    prompts = [
        random_prompt(shape, shape.prompt_length, seed).to(device) for seed in range(_NUM_PROMPTS)
    ]
    warm_ups = _warm_up(known.model, methods, shape, prompts[0], stage)
    answers: dict[str, list[Answer]] = {name: [] for name in warm_ups}
    prefills: list[float] = []
    options = _options(shape.max_new_tokens)
    try:
        for number in range(_MAX_ROUNDS * _NUM_PROMPTS):
            if number >= _NUM_PROMPTS and not stage.has_time:
                break
            prompt = prompts[number % _NUM_PROMPTS]
            stage.say(f"{stage.title}: answer {number + 1} of each method")
            prefills.append(plain(known.model, _inputs(prompt), _options(1)).sec)
            first = number % max(1, len(answers))
            for name in (*[*answers][first:], *[*answers][:first]):
                answers[name].append(methods[name](known.model, _inputs(prompt), options))
    finally:  # keep what was measured, even if the rest was interrupted
        last_tokens = [int(prompt[0, -1]) for prompt in prompts]
        stage.rows += _rows(known, shape, answers, median(prefills or [0.0]), last_tokens, warm_ups)


def _warm_up(
    model: Model,
    methods: Mapping[str, Method],
    shape: Shape,
    prompt: torch.Tensor,
    stage: Stage,
) -> dict[str, float]:
    """Run each method before it is timed; return the seconds taken, by method that ran."""
    took = {}
    for name, method in methods.items():
        if not stage.may_begin(name):
            continue
        # A compiler can fail in many ways, none of them lade's fault.
        with stage.part(name, *([Exception] if name == "static" else [])):
            start = perf_counter()
            num_tokens = _FEW_TOKENS if name == "plain" else shape.max_new_tokens
            for _ in range(_NUM_WARM_UPS):
                method(model, _inputs(prompt), _options(num_tokens))
            took[name] = perf_counter() - start
    return took


def _static(model: Model, inputs: dict[str, Any], options: dict[str, Any]) -> Answer:
    return plain(model, inputs, {**options, "cache_implementation": "static"})


def _inputs(prompt: torch.Tensor) -> dict[str, Any]:
    return {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}


def _options(max_new_tokens: int) -> dict[str, Any]:
    return {"do_sample": False, "max_new_tokens": max_new_tokens}


def _rows(
    known: KnownModel,
    shape: Shape,
    answers: Mapping[str, Sequence[Answer]],
    prefill_sec: float,
    last_tokens: Sequence[int],
    warm_ups: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Return a row per method; times are medians, and ratios are ratios of medians."""
    expected = [known.answer(token_id, shape.max_new_tokens) for token_id in last_tokens]
    secs = {
        name: median(answer.sec for answer in of_method)
        for name, of_method in answers.items()
        if of_method
    }
    rows: list[dict[str, Any]] = []
    for name, sec in secs.items():
        of_method = answers[name]
        texts = [answer.rows[0] for answer in of_method]
        is_known = [text == expected[i % len(expected)] for i, text in enumerate(texts)]
        num_tokens = shape.max_new_tokens
        rows.append(
            {
                "method": name,
                "prompt_length": shape.prompt_length,
                "num_tokens": num_tokens,
                "num_repeats": len(of_method),
                "sec": sec,
                "tokens_per_sec": num_tokens / sec,
                "prefill_sec": prefill_sec,
                "tokens_per_sec_after_prefill": (
                    (num_tokens - 1) / (sec - prefill_sec) if sec > prefill_sec else None
                ),
                **{
                    f"speedup_over_{other}": secs[other] / sec if other in secs else None
                    for other in ("plain", "static")
                },
                "warm_up_sec": warm_ups[name],
                "share_of_known_text": fmean(is_known),
                **_counts([answer.stats for answer in of_method if answer.stats is not None]),
            }
        )
    return rows


def _counts(stats: Sequence[DecodeStats]) -> dict[str, Any]:
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
