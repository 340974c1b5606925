"""The Jacobi window: what it runs, what it finds, and that the text never knows of it."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import lade
from lade.budget.budget import Budget, Probs
from lade.compat import CACHE
from lade.drafting.drafts import draft_of
from lade.drafting.lookahead import Window
from lade.drafting.pool_drafter import PoolDrafter
from lade.gpu.policy import DevicePolicy
from lade.hf.generation import Generation
from lade.targets.layout import tree_layout
from lade.targets.trees import TreeTarget
from lade.tree import ROOT, Tree
from ngram_pool import Draft
from tests.grids import thinned
from tests.lade.both import THREE, same_as_generate
from tests.lade.recorder import Overlapping
from tests.lade.tiny import VOCAB_SIZE, ScriptedDrafter, random_prompt, tiny_model
from tests.ngram_pool.checking import check_pool

FAMILIES = ["llama", "gpt2", "mistral", "gemma3_text", "llama4_text", "deepseek_v3"]
SIZES = [(1, 3), (5, 4), (7, 5), (2, 6)]


class LearningDrafter(ScriptedDrafter):
    """A drafter that is often right, and keeps what the window came to."""

    learns_ngrams = True

    def __init__(self, answer: Sequence[int], rng: np.random.Generator, accept: float) -> None:
        super().__init__(answer, rng, accept)
        self.num_committed: list[int] = []  # at each step
        self.ngrams: list[list[list[int]]] = []  # of each step

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        self.num_committed.append(len(committed))
        return super().draft(sequence, committed, max_draft_tokens)

    def observe_ngrams(self, sequence: int, ngrams: NDArray[np.int32]) -> None:
        assert sequence == 7
        assert ngrams.dtype == np.int32
        self.ngrams.append(ngrams.tolist())


class CountingPool(lade.NGramPool):
    """Counts its open sequences."""

    num_open = 0

    def open_sequence(self, *args: Any, **kwargs: Any) -> int:
        self.num_open += 1
        return super().open_sequence(*args, **kwargs)

    def close_sequence(self, sequence: int) -> None:
        self.num_open -= 1
        super().close_sequence(sequence)


@contextmanager
def forwards_of(model: Any) -> Iterator[list[dict[str, Any]]]:
    """Gather the arguments of all forwards that lade runs on trees, those of its check left out."""
    seen: list[dict[str, Any]] = []

    def watch(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        if type(inputs.get(CACHE)).__name__ == "TreeCache":
            seen.append(inputs)

    handle = model.register_forward_pre_hook(watch, with_kwargs=True)
    for num_rows in (1, 2):
        lade.probe(model, num_rows=num_rows)
    seen.clear()
    try:
        yield seen
    finally:
        handle.remove()


def widths_of(forwards: Sequence[dict[str, Any]]) -> list[int]:
    """Tokens of each row in every step, the prefill left out."""
    return [inputs["input_ids"].shape[1] for inputs in forwards[1:]]


def masked(prompt: torch.Tensor) -> dict[str, Any]:
    return {"input_ids": prompt, "attention_mask": (prompt != 0).long()}


# --- the window itself ----------------------------------------------------------------------


def test_a_window_of_five_columns_and_four_grams_is_that_of_the_paper() -> None:
    """Places behind the root, and who sees whom, are those of figure 2 there."""
    window = Window(lade.Lookahead(5, 4), [3], VOCAB_SIZE, seed=0)
    assert window.cells().depths == [1, 2, 3, 4, 5, 6]  # wider at first, to end as wide as this
    assert window.newest == [0, 1, 2, 3, 4, 5]
    assert window.advance(80, [11, 12, 13, 14, 15, 16]).shape == (0, 4)
    assert window.cells().token_ids == [3, 3, 3, 3, 3, 11, 12, 13, 14, 15, 16]
    assert window.newest == [6, 7, 8, 9, 10]  # not 5: what is behind it is the next root
    assert window.advance(81, [22, 23, 24, 25, 26]).shape == (0, 4)
    cells = window.cells()
    assert cells.token_ids == [*[3, 3, 3, 3], *[12, 13, 14, 15, 16], *[22, 23, 24, 25, 26]]
    assert cells.depths == [*[1, 2, 3, 4], *[1, 2, 3, 4, 5], *[2, 3, 4, 5, 6]]
    assert window.newest == [9, 10, 11, 12, 13]
    # The last cell sees the root (which is not here), the first iteration and its own column.
    assert cells.ancestors[13].astype(int).tolist() == [
        *[1, 1, 1, 1],
        *[0, 0, 0, 0, 1],
        *[0, 0, 0, 0, 1],
    ]
    assert cells.ancestors[9].astype(int).tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert cells.ancestors[2].astype(int).tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert window.advance(82, [33, 34, 35, 36, 37]).tolist() == [
        [82, 12, 22, 33],  # the first column begins with the root
        [3, 13, 23, 34],
        [3, 14, 24, 35],
        [3, 15, 25, 36],
        [3, 16, 26, 37],
    ]
    assert window.cells().token_ids == [
        *[13, 14, 15, 16],
        *[22, 23, 24, 25, 26],
        *[33, 34, 35, 36, 37],
    ]


@pytest.mark.parametrize("size", SIZES)
def test_a_window_stays_as_large_as_it_is_and_as_deep(size: tuple[int, int]) -> None:
    lookahead = lade.Lookahead(*size)
    window = Window(lookahead, [5, 6], VOCAB_SIZE, seed=0)
    for step in range(3 * lookahead.ngram_size):
        cells = window.cells()
        assert len(cells.token_ids) == window.num_cells == len(cells.depths)
        assert max(cells.depths) == window.depth == sum(size) - 3
        ngrams = window.advance(step, [step] * len(window.newest))
        is_full = step >= lookahead.ngram_size - 2
        assert ngrams.shape == (lookahead.window_size if is_full else 0, lookahead.ngram_size)
        if is_full:
            assert window.num_cells == lookahead.num_cells == (size[1] - 1) * size[0] - 1


def test_first_tokens_are_of_the_prompt_or_the_vocabulary_and_repeat() -> None:
    lookahead = lade.Lookahead(90, 3)

    def first(context: list[int], seed: int) -> list[int]:
        return Window(lookahead, context, 9, seed).cells().token_ids

    assert {*first([5, 7, 12], 0)} == {5, 7}  # 12 is no token of this model's
    assert {*first([], 0)} == set(range(9))
    assert first([5, 7], 1) == first([5, 7], 1) != first([5, 7], 2)


def path_of(cells: Any, node: int) -> list[int]:
    """SideNodes from the root to one, both included; -1 is the root."""
    seen = np.flatnonzero(cells.ancestors[node]).tolist()
    return [-1, *sorted(seen, key=lambda cell: cells.depths[cell])]


CELLS = [(family, attention) for family in FAMILIES for attention in ("sdpa", "eager")]
QUICK = (("llama", "eager"), ("gemma3_text", "sdpa"))


@pytest.mark.parametrize("case", thinned(CELLS, *QUICK), ids="-".join)
@torch.no_grad()
def test_a_cell_has_the_logits_of_its_own_path(case: tuple[str, str]) -> None:
    """Whatever is drafted beside it; and so has a node of the draft, with a window behind it."""
    family, attention = case
    model = tiny_model(family, seed=2, attention=attention)
    prompts = [[5, 9, 11, 5, 9], [7, 7, 3, 2, 8]]
    drafts = [draft_of([4, 5, 6], [-1, 0, -1], 0.5).first(size) for size in (3, 1)]
    target = TreeTarget(model, torch.tensor(prompts), {"use_cache": True}, tree_layout(model), 60)
    target.prefill()
    windows = [Window(lade.Lookahead(5, 4), prompt, VOCAB_SIZE, 1) for prompt in prompts]
    committed = [list(prompt) for prompt in prompts]
    for root in range(8, 13):
        trees = [Tree.build(root, draft) for draft in drafts]
        cells = [window.cells() for window in windows]
        whole = [tree.beside(of) for tree, of in zip(trees, cells, strict=True)]
        logits = target.forward(target.inputs(whole)).logits
        for row, (tree, of) in enumerate(zip(trees, cells, strict=True)):
            for cell in range(len(of.token_ids)):
                path = path_of(of, cell)
                assert [of.depths[i] for i in path[1:]] == [*range(1, len(path))]
                ids = [*committed[row], root, *(of.token_ids[i] for i in path[1:])]
                alone = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
                got = logits[row, len(tree) + cell]
                torch.testing.assert_close(got, alone, rtol=1e-5, atol=1e-5)
            ids = [*committed[row], root, tree.token_ids[1]]
            alone = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits[row, 1], alone, rtol=1e-5, atol=1e-5)
            nodes = [len(tree) + cell for cell in windows[row].newest]
            windows[row].advance(root, logits[row, nodes].argmax(dim=-1).tolist())
            committed[row] += [root, tree.token_ids[1]]
        target.commit([[ROOT, 1]] * 2)


# --- what the drafter is told ---------------------------------------------------------------


@torch.no_grad()
def slow_ngrams(
    model: Any, answer: list[int], num_committed: list[int], first: list[int], size: tuple[int, int]
) -> list[list[list[int]]]:
    """Jacobi iteration in plain Python: a forward of its own for every cell, cells by place."""
    window_size, ngram_size = size
    iterations = [dict(enumerate(first, start=1))]  # place behind the root -> token
    found = []
    for num in num_committed:
        if num + window_size + ngram_size - 3 > len(answer) - 1:
            break  # the window would reach beyond the text
        text = answer[:num]
        j, following = len(iterations) - 1, {}
        for place in iterations[-1] if j else [0, *iterations[0]]:
            column = place - j
            path = [iterations[0][p] for p in range(1, column + 1)]
            path += [iterations[i][column + i] for i in range(1, j + 1)]
            logits = model(torch.tensor([text + path]), use_cache=False).logits
            following[place + 1] = int(logits[0, -1].argmax())
        iterations.append(following)
        of_step = []
        if len(iterations) == ngram_size:
            iterations[0][0] = text[-1]
            of_step = [
                [iterations[i][column + i] for i in range(ngram_size)]
                for column in range(window_size)
            ]
            del iterations[0]
        iterations = [
            {place - 1: token for place, token in iteration.items() if place - 1 >= max(i, 1)}
            for i, iteration in enumerate(iterations)
        ]
        found.append(of_step)
    return found


@pytest.mark.parametrize(
    "family", thinned(["llama", "mistral", "gemma3_text", "deepseek_v3"], "gemma3_text")
)
@pytest.mark.parametrize("size", thinned(SIZES, (7, 5)))
def test_ngrams_are_those_of_a_slow_jacobi_iteration(family: str, size: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    model = tiny_model(family, seed=3)
    for accept in (0.0, 0.8):
        prompt = random_prompt(rng)
        answer = model.generate(**masked(prompt), do_sample=False, max_new_tokens=24)[0].tolist()
        drafter = LearningDrafter(answer, rng, accept)
        config = lade.Config(max_draft_tokens=6, lookahead=lade.Lookahead(*size))
        got = lade.generate(
            model,
            **masked(prompt),
            do_sample=False,
            max_new_tokens=len(answer) - prompt.shape[1],
            drafter=drafter,
            config=config,
        )
        assert got[0].tolist() == answer
        first = Window(lade.Lookahead(*size), prompt[0].tolist(), VOCAB_SIZE, 0).cells().token_ids
        expected = slow_ngrams(model, answer, drafter.num_committed, first, size)
        assert drafter.ngrams == expected
        if len(expected) > size[1]:
            assert len(expected[-1]) == size[0]


def test_a_pool_learns_each_ngram_apart() -> None:
    pool = CountingPool()
    drafter = PoolDrafter(pool)
    assert drafter.learns_ngrams
    sequence = drafter.open([1, 2, 3])
    drafter.observe_ngrams(sequence, np.array([[5, 6, 7], [7, 8, 9]], np.int32))
    drafter.observe(sequence, [4])
    check_pool(pool)
    assert drafter.draft(sequence, [5, 6], 4).token_ids.tolist()[0] == 7
    assert drafter.draft(sequence, [6, 7], 4).token_ids.tolist() == [8, 9]  # not the second's 7
    assert drafter.draft(sequence, [9], 4).token_ids.tolist() == []
    assert drafter.draft(sequence, [2, 3], 4).token_ids.tolist() == [4]
    drafter.close(sequence)
    assert pool.num_open == 0


@pytest.mark.exhaustive
def test_a_pool_with_a_window_accepts_more_of_what_no_text_has_had() -> None:
    """On text without repetition, where only the target can tell what comes."""
    stats = {}
    for lookahead in (None, lade.Lookahead(7, 5)):
        total = lade.DecodeStats()
        for seed in range(4):
            model = tiny_model("llama", seed=seed)
            config = lade.Config(max_draft_tokens=8, lookahead=lookahead)
            total.add(
                lade.generate(
                    model,
                    **masked(torch.tensor([[*range(2, 30)]])),
                    config=config,
                    do_sample=False,
                    eos_token_id=None,
                    max_new_tokens=40,
                    return_dict_in_generate=True,
                ).stats
            )
        stats[lookahead] = total
    without, with_window = stats.values()
    assert with_window.mean_accepted_tokens > without.mean_accepted_tokens
    assert without.num_lookahead_tokens == 0
    assert with_window.draft_tokens_per_step <= 8  # cells are no draft tokens


# --- the text -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", thinned(FAMILIES, "gemma3_text"))
def test_text_with_a_window_is_that_of_generate(family: str) -> None:
    """Greedy and sampled, over random prompts, sizes and budgets; the random state too."""
    rng = np.random.default_rng(0)
    pool = CountingPool(capacity_tokens=2000)  # small: it forgets on the way
    total = lade.DecodeStats()
    for number in range(16):
        if number % 8 == 0:
            model = tiny_model(family, seed=number)
        prompt = random_prompt(rng)
        options: dict[str, Any] = {
            "max_new_tokens": int(rng.integers(1, 40)),
            "do_sample": number % 2 == 1,
            "temperature": 0.4,
        }
        config = lade.Config(
            max_draft_tokens=[None, 0, 3, 8][number % 4],
            lookahead=lade.Lookahead(*SIZES[int(rng.integers(len(SIZES)))]),
        )
        _, got = same_as_generate(model, prompt, pool=pool, config=config, seed=number, **options)
        total.add(got.stats)
    check_pool(pool)
    assert pool.num_open == 0
    # The comparison means nothing unless windows ran, and drafts were accepted and rejected.
    assert total.num_lookahead_tokens > 600
    assert total.num_accepted_tokens > 20
    assert total.acceptance_rate < 0.98


@pytest.mark.parametrize("is_accelerator", thinned([False, True], False))
@pytest.mark.parametrize("family", thinned(["llama", "gemma3_text", "deepseek_v3"], "llama"))
def test_batches_with_windows_are_those_of_generate(
    family: str, is_accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded rows that end early, run ahead and wait; with and without all outputs."""
    monkeypatch.setattr(Generation, "policy", Overlapping() if is_accelerator else DevicePolicy())
    monkeypatch.setattr("lade.sampling.exact._MAX_NOISE_BYTES", 1)
    monkeypatch.setattr("lade.sampling.exact._MIN_LEAD", 3)
    total = lade.DecodeStats()
    for seed in range(6):
        model = tiny_model(family, seed=seed)
        options: dict[str, Any] = {
            "max_new_tokens": 30,
            "eos_token_id": [None, [*range(0, 97, 6)]][seed % 2],
            "do_sample": seed % 3 > 0,
            "temperature": 0.5,
            "num_return_sequences": 1 + (seed % 3 == 2),
            "output_logits": seed % 4 == 0,
            "output_hidden_states": seed % 4 == 0,
        }
        config = lade.Config(max_draft_tokens=5, lookahead=lade.Lookahead(4, 4))
        expected, got = same_as_generate(model, THREE, config=config, seed=seed, **options)
        if seed % 4 == 0:
            for mine, theirs in zip(got.logits, expected.logits, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
            mine, theirs = got.hidden_states[-1][-1], expected.hidden_states[-1][-1]
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        total.add(got.stats)
    assert total.num_lookahead_tokens > 250
    assert total.num_accepted_tokens > 10


def test_runs_repeat_and_leave_every_random_state_alone() -> None:
    model = tiny_model("llama", seed=1)
    config = lade.Config(max_draft_tokens=6, acceptance="rejection", lookahead=lade.Lookahead(5, 4))
    prompt = masked(torch.tensor([[5, 6, 7, 8]]))
    texts = []
    for number in range(2):
        torch.manual_seed(3)
        texts.append(
            lade.generate(model, **prompt, config=config, do_sample=True, max_new_tokens=30)
        )
        states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
        lade.generate(model, **prompt, config=config, do_sample=False, max_new_tokens=30)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert repr(np.random.get_state()) == states[2]
        random.seed(number)
    assert texts[0].tolist() == texts[1].tolist()


@pytest.mark.exhaustive
def test_no_cell_lies_beyond_what_the_text_may_reach() -> None:
    """Learned positions end there: gpt2 has none to give."""
    model = tiny_model("gpt2", seed=1, n_positions=64, max_position_embeddings=64)
    prompt = masked(torch.tensor([[5, 6, 5, 6]]))
    config = lade.Config(max_draft_tokens=4, lookahead=lade.Lookahead(6, 4))

    def text(generate: Any, **options: Any) -> list[int]:
        torch.manual_seed(0)
        ids: list[int] = generate(**prompt, do_sample=True, **options)[0].tolist()
        return ids

    def ours(**options: Any) -> torch.Tensor:
        ids: torch.Tensor = lade.generate(model, config=config, **options)
        return ids

    free = text(model.generate, max_length=64, eos_token_id=None)
    end = next(i for i, token in enumerate(free) if i >= 55 and token not in free[:i])
    for options in (
        {"max_length": 64, "eos_token_id": None},
        {"max_length": 80, "eos_token_id": free[end]},  # it could go on beyond the positions
    ):
        with forwards_of(model) as forwards:
            assert text(ours, **options) == text(model.generate, **options)
        assert max(int(inputs["position_ids"].max()) for inputs in forwards[1:]) <= 62
        widths = widths_of(forwards)
        assert max(widths) >= 18
        if options["eos_token_id"] is None:
            assert max(widths[-2:]) <= 5  # the last steps run no window


def test_rows_that_are_finished_run_no_window() -> None:
    model = tiny_model("llama", seed=5)
    free = model.generate(**masked(THREE), do_sample=False, max_new_tokens=30)
    ends = [int(free[0, 12]), int(free[2, 22])]
    config = lade.Config(max_draft_tokens=0, lookahead=lade.Lookahead(5, 4))
    with forwards_of(model) as forwards:
        got = lade.generate(
            model,
            **masked(THREE),
            config=config,
            do_sample=False,
            max_new_tokens=30,
            eos_token_id=ends,
            pad_token_id=0,
            # Anybody's criterion sees all rows, so finished ones stay in the forward.
            stopping_criteria=[lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)],
            return_dict_in_generate=True,
        )
    expected = 0
    for row in got.sequences[:, 7:].tolist():
        length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        sizes = [6, 11, *[14] * 30]  # of a window, step by step
        with_window = [size for i, size in enumerate(sizes[: length - 1]) if i + 1 + 6 <= 30 - 1]
        expected += sum(with_window)
    assert got.stats.num_lookahead_tokens == expected
    assert {inputs["input_ids"].shape[0] for inputs in forwards[1:]} == {3}


# --- the budget, and other processes -------------------------------------------------------


class KeepingBudget(Budget):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(5)
        self.num_pending: list[int] = []
        self.num_nodes_run: list[float] = []

    def num_nodes(self, probs: Probs, num_pending: int) -> int:
        self.num_pending.append(num_pending)
        return super().num_nodes(probs, num_pending)

    def record(self, num_rows: int, num_nodes: float, *args: Any, **kwargs: Any) -> None:
        self.num_nodes_run.append(num_nodes)


@pytest.mark.usefixtures("trusted")
def test_the_budget_knows_how_large_a_forward_is(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = KeepingBudget()
    model = tiny_model("llama", seed=4)
    config = lade.Config(lookahead=lade.Lookahead(5, 4))
    with forwards_of(model) as forwards:
        monkeypatch.setattr("lade.hf.generation.MeasuredBudget", lambda *_: budget)
        got = lade.generate(
            model,
            **masked(torch.tensor([[5, 6, 7, 5, 6]])),
            config=config,
            do_sample=False,
            eos_token_id=None,
            max_new_tokens=60,
            return_dict_in_generate=True,
        )
    widths = widths_of(forwards)
    assert [num_nodes + 1 for num_nodes in budget.num_nodes_run] == widths
    assert budget.num_pending[:4] == [6, 11, 14, 14]
    assert budget.num_pending[-1] == 0
    stats = got.stats
    assert stats.num_draft_tokens > 0
    assert stats.num_lookahead_tokens == sum(budget.num_pending) > 100
    assert sum(widths) == len(widths) + stats.num_draft_tokens + stats.num_lookahead_tokens


@pytest.mark.usefixtures("trusted")
def test_a_measured_budget_drafts_beside_a_window() -> None:
    """It never sees a forward of one token."""
    model = tiny_model("llama", seed=4)
    with forwards_of(model) as forwards:
        got = lade.generate(
            model,
            **masked(torch.tensor([[5, 6] * 4])),
            config=lade.Config(lookahead=lade.Lookahead(2, 3)),
            do_sample=False,
            eos_token_id=None,
            max_new_tokens=200,
            return_dict_in_generate=True,
        )
    assert got.stats.num_draft_tokens > 0
    assert min(widths_of(forwards)[:20]) >= 3


def test_processes_with_other_pools_run_the_same_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one's drafts are everybody's; windows need no telling."""
    told: list[dict[int, Draft]] = []

    class First:
        def agree(self, drafts: dict[int, Draft]) -> dict[int, Draft]:
            told.append(drafts)
            return drafts

    class Other:
        def agree(self, drafts: dict[int, Draft]) -> dict[int, Draft]:
            return told.pop(0)

    model = tiny_model("llama", seed=4)
    options: dict[str, Any] = {**masked(THREE), "max_new_tokens": 20, "do_sample": False}
    config = lade.Config(max_draft_tokens=4, lookahead=lade.Lookahead(5, 4))
    runs = []
    for ranks in (First(), Other()):
        monkeypatch.setattr("lade.drafting.ranks.Ranks.of", lambda model, ranks=ranks: ranks)
        pool = lade.NGramPool()
        if isinstance(ranks, Other):
            pool.observe([*range(VOCAB_SIZE)])
        with forwards_of(model) as forwards:
            lade.generate(model, **options, pool=pool, config=config)
        runs.append([inputs["input_ids"].tolist() for inputs in forwards])
    assert not told
    assert runs[0] == runs[1]
    assert len(runs[0]) > 5


# --- what is refused ------------------------------------------------------------------------


def test_sizes_that_mean_nothing_are_refused() -> None:
    assert lade.Lookahead() == lade.Lookahead(window_size=7, ngram_size=5)
    with pytest.raises(ValueError, match=r"expected Lookahead\(window_size=…\) of at least 1, g"):
        lade.Lookahead(0, 4)
    with pytest.raises(ValueError, match=r"expected Lookahead\(ngram_size=…\) of at least 3, got"):
        lade.Lookahead(5, 2)
    with pytest.raises(TypeError, match=r"expected Lookahead\(window_size=…\) to be an integer"):
        lade.Lookahead(True, 4)
    with pytest.raises(
        TypeError, match=r"expected Config\(lookahead=…\) to be a Lookahead, got \("
    ):
        lade.Config(lookahead=(5, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize("verification", ["chain", "snapshot", "plain"])
def test_a_window_without_trees_is_refused(verification: Any) -> None:
    model = tiny_model("llama")
    config = lade.Config(verification=verification, lookahead=lade.Lookahead())
    with (
        forwards_of(model) as forwards,
        pytest.raises(
            lade.UnsupportedOptionError,
            match=f"LlamaForCausalLM verifies them by '{verification}' here",
        ),
    ):
        lade.generate(model, **masked(torch.tensor([[5, 6]])), config=config, max_new_tokens=4)
    assert not forwards


def test_a_window_of_a_model_that_no_tree_fits_is_refused_with_the_reason() -> None:
    model = tiny_model(
        "gpt_neo", attention="eager", attention_types=[[["global", "local", "global"], 1]]
    )
    config = lade.Config(lookahead=lade.Lookahead())
    with pytest.raises(
        lade.UnsupportedOptionError, match=r"GPTNeoForCausalLM .* local layers mask"
    ):
        lade.generate(model, **masked(torch.tensor([[5, 6]])), config=config, max_new_tokens=4)


def test_a_window_for_a_drafter_that_learns_no_ngrams_is_refused() -> None:
    drafter = ScriptedDrafter([5, 6], np.random.default_rng(0), 1.0)
    config = lade.Config(lookahead=lade.Lookahead())
    with pytest.raises(lade.UnsupportedOptionError, match="has learns_ngrams = False"):
        lade.generate(
            tiny_model("llama"),
            **masked(torch.tensor([[5, 6]])),
            drafter=drafter,
            config=config,
            max_new_tokens=4,
        )
