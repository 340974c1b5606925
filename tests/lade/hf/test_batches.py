"""Batches: rows that finish early, run ahead, wait for each other, and share one pool."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import lade
from lade.budget.budget import Budget
from lade.compat import MARKS_CACHES
from lade.drafting.drafts import chain
from ngram_pool import Draft
from tests.lade.both import EIGHT, THREE, ListStreamer, both, same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import VOCAB_SIZE, BatchDrafter, random_prompt, tiny_model
from tests.ngram_pool.checking import check_pool

# An output of parts returns its cache, in which finished rows stay.
TOKENS: dict[str, Any] = {"return_dict_in_generate": False}
SIX = lade.Config(max_draft_tokens=6)


def batch_of(rng: np.random.Generator, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts, padded on the left."""
    prompts = [random_prompt(rng)[0] for _ in range(num_rows)]
    length = max(map(len, prompts))
    ids = torch.zeros((num_rows, length), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = prompt
        mask[row, length - len(prompt) :] = 1
    return ids, mask


def _after(begin: Callable[[], object], *args: Any, **options: Any) -> Any:
    """Forget what plain `generate` has noted, and run lade."""
    begin()
    return lade.generate(*args, **options)


@pytest.mark.parametrize(
    ("family", "num_rows"),
    [
        ("llama", 2),
        ("llama", 9),
        ("gpt2", 5),
        pytest.param("deepseek_v3", 9, marks=pytest.mark.exhaustive),
    ],
)
def test_a_greedy_row_has_the_tokens_it_would_have_alone(family: str, num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    model = shared_model(family, seed=num_rows)
    ids, mask = batch_of(rng, num_rows)
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": [*range(0, 97, 7)]}
    options |= {"max_new_tokens": 40, "pad_token_id": 0}
    pool = lade.NGramPool()
    for _ in range(2):  # a second time, with all answers in the pool
        got = lade.generate(model, ids, attention_mask=mask, pool=pool, config=SIX, **options)
        for row in range(num_rows):
            prompt = ids[row : row + 1, mask[row] == 1]
            alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
            answer = alone[0, prompt.shape[1] :]
            mine = got[row, ids.shape[1] :]
            assert mine[: len(answer)].tolist() == answer.tolist()
            assert mine[len(answer) :].tolist() == [0] * (len(mine) - len(answer))
    check_pool(pool)
    assert list(pool._sequences) == [0]


@pytest.mark.usefixtures("trusted")
def test_finished_rows_leave_the_forward() -> None:
    model = shared_model("llama", seed=5)
    free = model.generate(THREE, attention_mask=(THREE != 0).long(), max_new_tokens=30)
    # Rows end after 5 and 15 tokens and not at all.
    ends = [int(free[0, 12]), int(free[2, 22])]
    sizes: list[tuple[int, ...]] = []

    def watch(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        sizes.append(tuple(inputs["input_ids"].shape))

    handle = model.register_forward_pre_hook(watch, with_kwargs=True)
    both(model, THREE, do_sample=False, eos_token_id=ends)  # with all outputs: all rows stay
    by = partial(_after, sizes.clear)
    options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": ends, **TOKENS}
    same_as_generate(model, THREE, config=lade.Config(max_draft_tokens=0), by=by, **options)
    handle.remove()
    if MARKS_CACHES:  # else the cache may be the caller's, who gets all of it
        assert sizes[0] == (1, int((THREE != 0).sum()))  # the prompts, without their padding
    rows = [shape[0] for shape in sizes[1:]]
    assert rows[0] == 3
    assert sum(size < 3 for size in rows) >= 5


def test_rows_without_padding_go_on_until_the_last_is_finished() -> None:
    """Without an EOS token `generate` pads nothing; stop strings then end rows one by one."""
    model = tiny_model("llama", seed=2)
    model.generation_config.eos_token_id = None

    def ends(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 4 == 0

    expected, _ = both(model, THREE, eos_token_id=None, stopping_criteria=[ends])
    done = (expected.sequences[:, 7:] % 4 == 0).int()
    assert len(set(done.argmax(dim=1).tolist())) > 1  # they did end at different times


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.5}])
def test_streamers_get_each_column_once_all_rows_have_it(options: dict[str, Any]) -> None:
    model = shared_model("llama", seed=1)
    for accept in (0.0, 0.6, 1.0):
        theirs, mine = ListStreamer(), ListStreamer()
        fresh = partial(next, iter([{"streamer": each} for each in (theirs, mine)]))
        common: dict[str, Any] = {"eos_token_id": [*range(0, 97, 5)], "seed": 1, **options}
        same_as_generate(model, THREE, accept=accept, config=SIX, fresh=fresh, **common)
        assert mine.events == theirs.events
        assert mine.events[-1] == "end"


def test_rows_learn_from_each_other() -> None:
    """The first prompt holds the second's answer; nothing else does."""
    model = shared_model("llama", seed=6)
    prompt = torch.tensor([[5, 6, 7]])
    mask = torch.ones_like(prompt)
    answer = model.generate(prompt, attention_mask=mask, max_new_tokens=40, do_sample=False)
    padded = torch.zeros_like(answer)
    padded[0, -3:] = prompt
    ids = torch.cat([answer, padded])
    options: dict[str, Any] = {
        "attention_mask": (torch.arange(ids.shape[1]) >= torch.tensor([[0], [40]])).long(),
        "max_new_tokens": 30,
        "do_sample": False,
        "config": lade.Config(max_draft_tokens=8),
    }
    steps: list[lade.Step] = []
    lade.generate(model, ids, on_step=steps.append, **options)
    by_row = [[step for step in steps if step.row == row] for row in (0, 1)]
    assert sum(len(step.token_ids) for step in by_row[1]) == 30
    assert len(by_row[1]) < 10  # 8 drafted tokens at a time


def test_a_row_waits_rather_than_hold_too_much_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lade.sampling.exact._MAX_NOISE_BYTES", 1)
    monkeypatch.setattr("lade.sampling.exact._MIN_LEAD", 3)
    model = shared_model("llama", seed=1)
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "max_new_tokens": 40}
    options["pad_token_id"] = 0
    mask = (THREE != 0).long()
    torch.manual_seed(0)
    expected = model.generate(THREE, attention_mask=mask, **options)

    class OneFast(BatchDrafter):
        """Knows the answer of the first row alone."""

        def draft(self, sequence: int, committed: Any, max_draft_tokens: int) -> Any:
            if sequence == 0:
                return super().draft(sequence, committed, max_draft_tokens)
            return Draft.empty()

    answers = [row[int((m == 0).sum()) :] for row, m in zip(expected.tolist(), mask, strict=True)]
    drafter = OneFast(answers, np.random.default_rng(0), 1.0)
    lengths = [0, 0, 0]
    leads = []

    def watch(step: lade.Step) -> None:
        lengths[step.row] += len(step.token_ids)
        if step.row == 2:  # the last to be told of a step
            leads.append(max(lengths) - min(lengths))

    by = partial(lade.generate, on_step=watch)
    same_as_generate(model, THREE, drafter=drafter, config=EIGHT, by=by, **options)
    assert 2 <= max(leads) <= 3


def test_padding_has_no_say_in_how_much_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would promise all its nodes for certain, and rows that go together would not profit."""

    asked: list[int] = []

    class Watching(Budget):
        def num_nodes(self, probs: Any, num_pending: int) -> int:
            asked.append(len(probs))
            return super().num_nodes(probs, num_pending)

    model = tiny_model("llama", seed=1)
    widths = []
    model.register_forward_pre_hook(
        lambda module, args, inputs: widths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    mask = (THREE != 0).long()
    free = model.generate(THREE, attention_mask=mask, do_sample=False, max_new_tokens=1)
    options: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "max_time": 1000}
    options |= {"max_new_tokens": 25, "eos_token_id": int(free[0, -1]), "pad_token_id": 0}
    expected = model.generate(THREE, **options)
    drafter = BatchDrafter([[]] * 3, np.random.default_rng(0), 0.0)
    monkeypatch.setattr(drafter, "draft", lambda *args: chain([3]))
    lade.warm_up(model, num_rows=3)
    monkeypatch.setattr("lade.hf.generation.MeasuredBudget", lambda *_: Watching(30))
    widths.clear()
    got = lade.generate(model, THREE, drafter=drafter, **options)
    assert got.tolist() == expected.tolist()
    assert max(asked) == 2  # never of the row that ended at its first token
    assert max(widths[1:]) == 2  # the root and one node, for the finished row too


def test_drafters_that_break_their_contract_cannot_break_the_text() -> None:
    model = shared_model("llama", seed=1)
    for token_ids in ([5, -7, 5], [5] * 200, [5, 10**6]):
        drafter = BatchDrafter([[]] * 3, np.random.default_rng(0), 0.0)
        drafter.draft = lambda *args, ids=token_ids: chain(ids)  # type: ignore[method-assign]
        _, out = same_as_generate(
            model, THREE, drafter=drafter, config=lade.Config(max_draft_tokens=2)
        )
        assert out.stats.draft_tokens_per_step <= 2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("trusted")
def test_rows_of_very_different_lengths_run_without_padding(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = tiny_model("llama", seed=seed)
    ids = torch.zeros((4, 300), dtype=torch.int64)
    for row, length in enumerate((300, 7, 12, 180)):
        text = np.tile(rng.integers(2, VOCAB_SIZE, 6), 50)[:length]
        ids[row, 300 - length :] = torch.from_numpy(text)
    shapes: list[list[int]] = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: shapes.append([*args[0].shape])
    )
    lade.probe(model, num_rows=4)  # which runs the model, too
    same_as_generate(model, ids, by=partial(_after, shapes.clear), **TOKENS)
    assert shapes[0] == ([1, 499] if MARKS_CACHES else [4, 300])
    assert shapes[1][0] == shapes[2][0] == 1  # later, rows that are left may be of about one length


@pytest.mark.usefixtures("trusted")
def test_samples_of_one_prompt_share_its_prefill() -> None:
    model = tiny_model("llama", seed=1)
    prompt = random_prompt(np.random.default_rng(3)).repeat(1, 3)
    shapes: list[list[int]] = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: shapes.append([*args[0].shape])
    )
    lade.probe(model, num_rows=5)  # which runs the model, too
    by = partial(_after, shapes.clear)
    same_as_generate(model, prompt, by=by, do_sample=True, num_return_sequences=5, **TOKENS)
    assert shapes[0] == [1, prompt.shape[1]]
