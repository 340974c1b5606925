"""Batches: rows that finish early, run ahead, wait for each other, and share one pool."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import lade
from tests.grids import thinned
from tests.lade.both import EIGHT, THREE, same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import CACHE, IS_NEWEST, VOCAB_SIZE, chain, random_prompt, tiny_model

# An output of parts returns its cache, in which finished rows stay.
TOKENS: dict[str, Any] = {"return_dict_in_generate": False}


def _after(begin: Callable[[], object], *args: Any, **options: Any) -> Any:
    """Forget what plain `generate` has noted, and run lade."""
    begin()
    return lade.generate(*args, **options)


@pytest.mark.usefixtures("trusted")
def test_finished_rows_leave_the_forward() -> None:
    model = shared_model("llama", seed=5)
    free = model.generate(THREE, attention_mask=(THREE != 0).long(), max_new_tokens=30)
    # Rows end after 5 and 15 tokens and not at all.
    ends = [int(free[0, 12]), int(free[2, 22])]
    sizes: list[tuple[int, ...]] = []

    def watch(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        sizes.append(tuple(inputs["input_ids"].shape))

    options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": ends, **TOKENS}
    handle = model.register_forward_pre_hook(watch, with_kwargs=True)
    same_as_generate(model, THREE, **options)  # and the model is checked
    by = partial(_after, sizes.clear)
    same_as_generate(model, THREE, config=lade.Config(max_draft_tokens=0), by=by, **options)
    handle.remove()
    if IS_NEWEST:  # else the cache may be the caller's, who gets all of it
        assert sizes[0] == (1, int((THREE != 0).sum()))  # the prompts, without their padding
    rows = [shape[1] for shape in sizes[1:]]
    assert rows[0] == 3
    assert sum(size < 3 for size in rows) >= 5


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


@pytest.mark.usefixtures("trusted")
def test_rows_of_very_different_lengths_run_without_padding() -> None:
    rng = np.random.default_rng(0)
    model = tiny_model("llama")
    ids = torch.zeros((4, 300), dtype=torch.int64)
    for row, length in enumerate((300, 7, 12, 180)):
        text = np.tile(rng.integers(2, VOCAB_SIZE, 6), 50)[:length]
        ids[row, 300 - length :] = torch.from_numpy(text)
    shapes: list[list[int]] = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: shapes.append([*args[0].shape])
    )
    lade.warm_up(model, num_rows=4)  # which runs the model, too
    same_as_generate(model, ids, by=partial(_after, shapes.clear), **TOKENS)
    assert shapes[0] == [1, 499]
    assert shapes[1][0] == shapes[2][0] == 1  # later, rows that are left may be of about one length


@pytest.mark.usefixtures("trusted")
def test_samples_of_one_prompt_share_its_prefill() -> None:
    model = tiny_model("llama", seed=1)
    prompt = random_prompt(np.random.default_rng(3)).repeat(1, 3)
    shapes: list[list[int]] = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: shapes.append([*args[0].shape])
    )
    lade.warm_up(model, num_rows=5)  # which runs the model, too
    by = partial(_after, shapes.clear)
    same_as_generate(model, prompt, by=by, do_sample=True, num_return_sequences=5, **TOKENS)
    assert shapes[0] == [1, prompt.shape[1]]


class Seeing(StoppingCriteria):  # type: ignore[misc]
    """A criterion that notes what it sees, and answers for all rows at once.

    Args:
        kind: "all", as lm-evaluation-harness's: once each row has had some token, none goes on;
            "each": whether the row's own last token is a multiple of 11; "calls": after 9 calls.
        seen: where the columns that it is asked about are noted.
    """

    def __init__(self, kind: str, seen: list[Any]) -> None:
        self._kind, self._seen, self._done = kind, seen, [False] * 3
        self._num_calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        self._seen.append((self._kind, input_ids.tolist()))
        self._num_calls += 1
        last = input_ids[:, -1]
        if self._kind == "calls":
            return self._num_calls > 9
        if self._kind == "each":
            return last % 11 == 0
        for row, token in enumerate(last.tolist()):
            self._done[row] |= token % 7 == row
        return False not in self._done


@pytest.mark.parametrize("eos", [None, [11, 35, 52, 87]], ids=["no end", "ends"])
@pytest.mark.parametrize(
    "kinds", thinned([["all"], ["each"], ["calls"], ["all", "each"]], ["all", "each"]), ids="+".join
)
def test_a_criterion_that_sees_all_rows_is_asked_as_by_generate(
    kinds: list[str], eos: list[int] | None
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": eos, **TOKENS}
    for seed in range(4):
        model, seen = shared_model("llama", seed=seed), list[Any]()

        def fresh(seen: list[Any] = seen) -> dict[str, Any]:
            seen.append("begin")
            return {"stopping_criteria": [Seeing(kind, seen) for kind in kinds]}

        drafter = Foreseeing(model)
        by = partial(lade.generate, drafter=drafter, config=EIGHT)  # no `on_step`
        _, got = same_as_generate(model, THREE, fresh=fresh, by=by, **options)
        second = seen.index("begin", 1)
        assert seen[:second] == seen[second:]
        num_new = got.sequences.shape[1] - THREE.shape[1]
        assert 0 < drafter.num_asked < 3 * num_new or num_new < 9


class Foreseeing(lade.Drafter):
    """Knows how each prompt goes on, but for every ninth token."""

    def __init__(self, model: Any) -> None:
        mask = (THREE != 0).long()
        answers = model.generate(THREE, attention_mask=mask, max_new_tokens=60, eos_token_id=None)
        self._texts = [row[row != 0].tolist() for row in answers]
        self.num_asked = 0

    def draft(self, sequence: int, committed: Any, max_draft_tokens: int) -> lade.Draft:
        self.num_asked += 1
        (text,) = (each for each in self._texts if each[: len(committed)] == [*committed])
        after = text[len(committed) : len(committed) + max_draft_tokens]
        return chain([token if token % 9 else token + 1 for token in after])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("way", ["generate", "wrap", "batcher"])
def test_a_batch_of_no_rows_is_refused_by_name(way: str, family: str) -> None:
    model, ids = tiny_model(family), torch.zeros((0, 4), dtype=torch.long)
    with lade.Batcher(model) as batcher:
        ways: dict[str, Callable[..., Any]] = {
            "generate": partial(lade.generate, model),
            "wrap": lambda *args, **options: lade.wrap(model).generate(*args, **options),
            "batcher": lambda *args, **options: batcher.submit(*args, **options).result(),
        }
        with pytest.raises(
            ValueError, match=r"expected input_ids of one row or more, got \[0, 4\]"
        ):
            ways[way](ids, attention_mask=ids, max_new_tokens=3, do_sample=False)


def test_rows_that_all_have_padding_are_proved_where_a_hook_looks_on() -> None:
    """Their prefill is that of `generate`, whose cache has the padding that each row leaves out."""
    model = tiny_model("llama", dtype=torch.float32, head_dim=16)
    model.register_forward_hook(lambda *_: None)
    for rows in ([[0, 6, 7], [0, 9, 10]], [[0, 0, 7], [0, 9, 10]]):
        options: dict[str, Any] = {"knows": True, "return_dict_in_generate": False}
        _, got = same_as_generate(model, torch.tensor(rows), config=EIGHT, **options)
        assert got.stats.num_accepted_tokens > 0


class Ending(BaseStreamer):  # type: ignore[misc]
    """Knows whether a call has ended."""

    has_ended = False

    def put(self, value: torch.Tensor) -> None: ...

    def end(self) -> None:
        self.has_ended = True


@pytest.mark.parametrize("fails", [False, True])
def test_a_cache_holds_rows_that_ended_at_once_as_by_generate(fails: bool) -> None:
    """A hook looks on, beside which the first tokens run as one batch; or it fails at the end."""
    model, streamers = tiny_model("llama", seed=3), list[Ending]()
    ids = torch.randint(2, VOCAB_SIZE, (3, 7), generator=torch.Generator().manual_seed(0))

    def hook(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if fails and streamers[-1].has_ended and kwargs["input_ids"].shape[1] > 1:
            raise RuntimeError("no memory for several tokens")

    def options() -> dict[str, Any]:
        streamers.append(Ending())
        return {"streamer": streamers[-1]}

    eos = model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)[0, -1].item()
    model.register_forward_pre_hook(hook, with_kwargs=True)
    plain, got = same_as_generate(
        model, ids, eos_token_id=eos, knows=True, config=EIGHT, fresh=options
    )
    assert plain.sequences[0, 8:].eq(0).all()
    for mine, theirs in zip(got[CACHE].layers, plain[CACHE].layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-5, atol=1e-5)
