"""Whether drafts, pools, other calls and load change an answer: `sameness`.

Each prompt is answered without drafts first. All other ways must give the same tokens and, but in a
batch, whose rows return no logits here, bit for bit the same logits. `generate` is held against the
same answers, and against itself with another attention and on one thread.
"""

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import lade
from benchmarks.environment import environment
from benchmarks.report import Keeping, progress_bar, sheet, show
from lade.apps.cli.bench import describe_model
from lade.compat import attention_of
from lade.compat.view import with_attention
from lade.models.prompts import encode
from lade.models.settings import Settings

if TYPE_CHECKING:
    from benchmarks.prompts import Chosen
    from lade.models.loading import LoadedModel

_NUMBERS = (3, 7, 15, 40)  # of draft tokens
_BATCH = 4
_SEC = 600


Prompt = Mapping[str, Any]  # of `generate`: input_ids and attention_mask


class TextAndLogits(NamedTuple):
    """The new tokens of an answer, and their logits, [num_tokens, vocab_size], where known."""

    token_ids: list[int]
    logits: Tensor | None = None


def run(loaded: "LoadedModel", chosen: "Chosen", max_new_tokens: int, file: Path | None) -> None:
    """Count the answers of each way that are the same; print and write the counts."""
    model = loaded.model
    prompts = [encode(loaded.tokenizer, each.text) for each in chosen.prompts]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens}
    options |= {"eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    used, kept = lade.NGramPool(), lade.NGramPool()

    def by_lade(num: int | None = None, **given: Any) -> Callable[[], list[TextAndLogits]]:
        given = {**options, **given, "config": lade.Config(max_draft_tokens=num)}
        return lambda: [_answer(lade.generate(model, **each, **given), each) for each in prompts]

    def by_generate(of: Any = model) -> list[TextAndLogits]:
        return [_answer(of.generate(**each, **options), each) for each in prompts]

    def after_a_prefix(prompt: Prompt) -> TextAndLogits:
        config = lade.Config(reuses_prefix=True)
        given: dict[str, Any] = {"pool": kept, "config": config, **options}
        half = prompt["input_ids"].shape[1] // 2
        lade.generate(model, **{name: part[:, :half] for name, part in prompt.items()}, **given)
        return _answer(lade.generate(model, **prompt, **given), prompt)

    def of_requests() -> list[TextAndLogits]:
        with lade.Batcher(model, max_batch_size=8) as batcher:
            requests = [batcher.submit(**each, **options) for each in prompts]
            pairs = zip(requests, prompts, strict=True)
            return [_answer(request.result(_SEC), prompt) for request, prompt in pairs]

    ways: dict[str, Callable[[], list[TextAndLogits]]] = {
        **{f"{num} draft tokens": by_lade(num) for num in _NUMBERS},
        "auto": by_lade(),
        "a pool of these texts": by_lade(pool=used),
        "the same pool again": by_lade(pool=used),
        f"batches of {_BATCH}": lambda: _of_batches(model, prompts, max_new_tokens),
        "a Batcher, 8 at once": of_requests,
        "after a kept prefix": lambda: [*map(after_a_prefix, prompts)],
        "one thread": lambda: _on_one_thread(by_lade()),
        "beside a busy process": lambda: _beside_a_busy_process(by_lade()),
    }
    others: dict[str, Callable[[], list[TextAndLogits]]] = {
        "one_thread": lambda: _on_one_thread(by_generate)
    }
    if attention_of(model) == "sdpa":
        others["eager"] = lambda: by_generate(with_attention(model, "eager"))
    counts: dict[str, dict[str, int | None]] = {}
    of_generate: dict[str, dict[str, int | None]] = {}
    with Keeping(counts) as keeping, progress_bar() as bars:
        task = bars.add_task("answering", total=len(ways) + len(others) + 2)

        def done(answers: list[TextAndLogits]) -> list[TextAndLogits]:
            bars.advance(task)
            return answers

        alone = done(by_lade(0)())
        for name, way in ways.items():
            counts[name] = _counted(done(way()), alone)
        plain = done(by_generate())
        of_generate["lade"] = _counted(alone, plain)
        for name, way in others.items():
            of_generate[name] = _counted(done(way()), plain)
    content = {
        "environment": environment(),
        "settings": {
            **describe_model(loaded),
            **asdict(Settings(max_new_tokens)),
            "prompts": chosen.described,
        },
        "of_lade_without_drafts": counts,
        "of_generate": of_generate,
    }
    parts = {"as lade without drafts": counts, "as generate": of_generate}
    rows = [
        [
            (part, name, *(str(each[what]) for what in ("num_same_text", "num_same_logits")))
            for name, each in of.items()
        ]
        for part, of in parts.items()
    ]
    show(file, content, sheet(f"Same of {len(prompts)}", ("", "", "texts", "logits"), rows))
    keeping.end(f"stopped after {len(counts)} of {len(ways)} ways")


def _answer(output: Any, prompt: Prompt) -> TextAndLogits:
    new = output.sequences[0, prompt["input_ids"].shape[1] :].tolist()
    return TextAndLogits(new, torch.stack(output.logits)[:, 0])


def _of_batches(model: Any, prompts: Sequence[Prompt], max_new_tokens: int) -> list[TextAndLogits]:
    answers: list[TextAndLogits] = []
    for start in range(0, len(prompts), _BATCH):
        some = prompts[start : start + _BATCH]
        longest = max(each["input_ids"].shape[1] for each in some)
        batch: dict[str, Any] = {
            name: torch.cat([pad(each[name], (longest - each[name].shape[1], 0)) for each in some])
            for name in some[0]
        }
        given: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
        rows = lade.generate(model, **batch, max_new_tokens=max_new_tokens, **given)
        answers += [TextAndLogits(row) for row in rows[:, longest:].tolist()]
    return answers


def _on_one_thread(answer: Callable[[], list[TextAndLogits]]) -> list[TextAndLogits]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return answer()
    finally:
        torch.set_num_threads(num_threads)


def _spin() -> None:
    while True:
        pass


def _beside_a_busy_process(answer: Callable[[], list[TextAndLogits]]) -> list[TextAndLogits]:
    process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    process.start()
    try:
        return answer()
    finally:
        process.kill()
        process.join()


def _counted(
    answers: Sequence[TextAndLogits], expected: Sequence[TextAndLogits]
) -> dict[str, int | None]:
    """Return how many are the same, of texts and, where known, of logits, bit for bit."""
    pairs = [*zip(answers, expected, strict=True)]
    texts = [mine.token_ids == theirs.token_ids for mine, theirs in pairs]
    logits = [
        torch.equal(*(each.view(torch.uint8) for each in (mine.logits, theirs.logits)))
        for mine, theirs in pairs
        if mine.logits is not None and theirs.logits is not None
    ]
    return {
        "num": len(pairs),
        "num_same_text": sum(texts),
        "num_same_logits": sum(logits) if logits else None,
    }
