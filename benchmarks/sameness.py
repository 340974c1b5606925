"""Whether drafts, pools, other calls and load change an answer: `sameness`.

Each prompt is answered by `generate` in float32, from the numbers that the model holds. All ways of
lade must give the same tokens, whatever weights are stored in.
"""

import copy
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

import lade
from benchmarks.environment import environment
from benchmarks.report import Keeping, progress_bar, sheet, show
from lade.apps.cli.bench import describe_model
from lade.models.prompts import encode
from lade.models.settings import Settings

if TYPE_CHECKING:
    from benchmarks.prompts import Chosen
    from lade.models.loading import LoadedModel

_NUMBERS = (0, 3, 7, 15, 40)  # of draft tokens
_BATCH = 4
_SEC = 600

Prompt = Mapping[str, Any]  # of `generate`: input_ids and attention_mask
Answers = list[list[int]]  # new tokens


def run(loaded: "LoadedModel", chosen: "Chosen", max_new_tokens: int, file: Path | None) -> None:
    """Count the answers of each way that are the same; print and write the counts."""
    model = loaded.model
    prompts = [encode(loaded.tokenizer, each.text) for each in chosen.prompts]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens}
    options |= {"eos_token_id": None}
    used, kept = lade.NGramPool(), lade.NGramPool()

    def by_lade(num: int | None = None, **given: Any) -> Callable[[], Answers]:
        given = {**options, **given, "config": lade.Config(max_draft_tokens=num)}
        return lambda: [_answer(lade.generate(model, **each, **given), each) for each in prompts]

    def by_generate(of: Any) -> Answers:
        return [_answer(type(of).generate(of, **each, **options), each) for each in prompts]

    def after_a_prefix(prompt: Prompt) -> list[int]:
        given = {"pool": kept, "config": lade.Config(reuses_prefix=True), **options}
        half = prompt["input_ids"].shape[1] // 2
        lade.generate(model, **{name: part[:, :half] for name, part in prompt.items()}, **given)
        return _answer(lade.generate(model, **prompt, **given), prompt)

    def of_requests() -> Answers:
        with lade.Batcher(model, max_batch_size=8) as batcher:
            requests = [batcher.submit(**each, **options) for each in prompts]
            pairs = zip(requests, prompts, strict=True)
            return [_answer(request.result(_SEC), prompt) for request, prompt in pairs]

    ways: dict[str, Callable[[], Answers]] = {
        **{f"{num} draft tokens": by_lade(num) for num in _NUMBERS},
        "auto": by_lade(),
        "a pool of these texts": by_lade(pool=used),
        "the same pool again": by_lade(pool=used),
        f"batches of {_BATCH}": lambda: _of_batches(model, prompts, options),
        "a Batcher, 8 at once": of_requests,
        "after a kept prefix": lambda: [*map(after_a_prefix, prompts)],
        "one thread": lambda: _on_threads(1, by_lade()),
        "eight threads": lambda: _on_threads(8, by_lade()),
        "beside a busy process": lambda: _beside_a_busy_process(by_lade()),
        "generate, as stored": lambda: by_generate(model),
    }
    counts: dict[str, int] = {}
    with Keeping(counts) as keeping, progress_bar() as bars:
        task = bars.add_task("answering", total=len(ways) + 1)
        expected = by_generate(copy.deepcopy(model).float())
        for name, way in ways.items():
            bars.advance(task)
            counts[name] = sum(mine == theirs for mine, theirs in zip(way(), expected, strict=True))
    content = {
        "environment": environment(),
        "settings": {
            **describe_model(loaded),
            **asdict(Settings(max_new_tokens)),
            "prompts": chosen.described,
        },
        "num": len(prompts),
        "num_same_text": counts,
    }
    rows = [[(name, str(each)) for name, each in counts.items()]]
    show(file, content, sheet(f"Texts of float32, of {len(prompts)}", ("", "same"), rows))
    keeping.end(f"stopped after {len(counts)} of {len(ways)} ways")


def _answer(output: Any, prompt: Prompt) -> list[int]:
    new: list[int] = output[0, prompt["input_ids"].shape[1] :].tolist()
    return new


def _of_batches(model: Any, prompts: Sequence[Prompt], options: dict[str, Any]) -> Answers:
    answers: Answers = []
    for start in range(0, len(prompts), _BATCH):
        some = prompts[start : start + _BATCH]
        longest = max(each["input_ids"].shape[1] for each in some)
        batch: dict[str, Any] = {
            name: torch.cat([pad(each[name], (longest - each[name].shape[1], 0)) for each in some])
            for name in some[0]
        }
        answers += lade.generate(model, **batch, **options)[:, longest:].tolist()
    return answers


def _on_threads(num: int, answer: Callable[[], Answers]) -> Answers:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        return answer()
    finally:
        torch.set_num_threads(num_threads)


def _spin() -> None:
    while True:
        pass


def _beside_a_busy_process(answer: Callable[[], Answers]) -> Answers:
    process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    process.start()
    try:
        return answer()
    finally:
        process.kill()
        process.join()
