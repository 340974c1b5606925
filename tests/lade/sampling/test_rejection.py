"""That a node emits the target's distribution, whatever its children were drawn from.

Rows of a batch are the samples. Each chi-square test rejects a right distribution with the
probability `FALSE_ALARM`, one in a million. Whole texts are `test_rejection_decoding.py`'s.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lade.sampling.rejection import NONE, Trial, try_children
from tests import oracle
from tests.chi_square import FALSE_ALARM, chi_square_tail, p_value

VOCAB_SIZE = 5
NUM_ROWS = 20_000


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        yield


class Level(NamedTuple):
    """A node's distribution in each row, and the children that were drafted below it."""

    target_probs: Tensor  # [rows, VOCAB_SIZE]
    token_ids: Tensor  # int64 [rows, num_children]
    draft_probs: Tensor  # [rows, num_children, VOCAB_SIZE]
    num_children: Tensor  # int64 [rows]

    def tried(
        self, generators: list[torch.Generator] | None = None, support: Tensor | None = None
    ) -> Trial:
        if support is None:
            support = torch.arange(VOCAB_SIZE).expand_as(self.draft_probs)
        counts = self.num_children.tolist()
        return try_children(
            *(self.target_probs, self.token_ids, self.draft_probs, support),
            *(self.num_children, counts, generators),
        )


# --- distribution ---------------------------------------------------------------------------


def law(seed: int, temperature: float = 1.0) -> Tensor:
    """Return a distribution [VOCAB_SIZE]; some token never comes."""
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)).double()
    logits[seed % VOCAB_SIZE] = -torch.inf
    return torch.softmax(logits / temperature, dim=-1)


def drawn(target: Tensor, draft: Tensor, num_children: int, replacement: bool) -> Level:
    left, token_ids, probs = draft.expand(NUM_ROWS, -1), [], []
    for _ in range(num_children):
        token_ids.append(torch.multinomial(left, 1)[:, 0])
        probs.append(left)
        if not replacement:
            left = left.scatter(1, token_ids[-1][:, None], 0)
            left = left / left.sum(1, keepdim=True)
    return level_of(target, torch.stack(token_ids, 1), torch.stack(probs, 1))


def chosen(target: Tensor, token_ids: list[int]) -> Level:
    ids = torch.tensor(token_ids, dtype=torch.int64).expand(NUM_ROWS, -1)
    return level_of(target, ids, torch.nn.functional.one_hot(ids, VOCAB_SIZE).double())


def level_of(target: Tensor, token_ids: Tensor, probs: Tensor) -> Level:
    num_children = torch.full((NUM_ROWS,), token_ids.shape[1])
    return Level(target.expand(NUM_ROWS, -1), token_ids, probs, num_children)


def p_value_of(level: Level) -> float:
    """Hold what every row emits against the target."""
    counts = torch.bincount(level.tried().token_ids, minlength=VOCAB_SIZE)
    return p_value(counts.tolist(), level.target_probs[0].tolist())


@pytest.mark.parametrize("temperature", [0.3, 1.5])
@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("num_children", [1, 3])
def test_drawn_drafts_leave_the_distribution(
    num_children: int, replacement: bool, temperature: float
) -> None:
    assert p_value_of(drawn(law(1, temperature), law(2), num_children, replacement)) > FALSE_ALARM


@pytest.mark.parametrize("token_ids", [[], [2], [4, 2, 0], [1, 3]])
def test_chosen_drafts_leave_the_distribution(token_ids: list[int]) -> None:
    assert p_value_of(chosen(law(1), token_ids)) > FALSE_ALARM


def test_a_wrongly_stated_draft_distribution_is_noticed() -> None:
    level = drawn(law(1), law(2), 3, replacement=False)
    stated = level._replace(draft_probs=level.draft_probs[:, :1].expand(-1, 3, -1))
    assert p_value_of(stated) < FALSE_ALARM < p_value_of(level)


def test_the_chi_square_tail_is_the_incomplete_gamma_function() -> None:
    for degrees in (1, 2, 3, 4, 30, 99, 124):
        for distance in (0.5, 3.0, 40.0, 190.0):
            half = torch.tensor([degrees / 2, distance / 2], dtype=torch.float64)
            expected = torch.special.gammaincc(half[0], half[1]).item()
            assert chi_square_tail(distance, degrees) == pytest.approx(expected, rel=1e-6)


# --- single rows ------------------------------------------------------------------------------


@st.composite
def levels(draw: st.DrawFn) -> Level:
    """Random children, drawn or chosen, with probabilities of 0 here and there."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(0, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))

    def distributions(count: int) -> Tensor:
        logits = 2 * torch.randn((rows, count, VOCAB_SIZE), generator=generator, dtype=dtype)
        logits[..., 1:].masked_fill_(
            torch.rand(logits[..., 1:].shape, generator=generator) < 0.3, -torch.inf
        )
        return torch.softmax(logits, dim=-1)

    probs, token_ids = distributions(width), torch.zeros((rows, width), dtype=torch.int64)
    if width:
        flat = probs.reshape(-1, VOCAB_SIZE)
        token_ids = torch.multinomial(flat, 1, generator=generator).view(rows, width)
    if draw(st.booleans()):
        probs = torch.nn.functional.one_hot(token_ids, VOCAB_SIZE).to(dtype)
    num_children = torch.tensor([draw(st.integers(0, width)) for _ in range(rows)])
    return Level(distributions(1)[:, 0], token_ids, probs, num_children)


def generators(num_rows: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(num_rows)]


def results_of(trial: Trial) -> list[tuple[int, int]]:
    return [*zip(trial.accepted.tolist(), trial.token_ids.tolist(), strict=True)]


@given(level=levels())
def test_a_level_is_what_the_papers_write(level: Level) -> None:
    rows = len(level.token_ids)
    trial = level.tried(generators(rows))
    for row, generator in enumerate(generators(rows)):
        n = int(level.num_children[row])
        uniforms = torch.rand(1 + n, generator=generator, dtype=level.target_probs.dtype)
        expected = oracle.try_children(
            level.target_probs[row].tolist(),
            level.token_ids[row, :n].tolist(),
            level.draft_probs[row, :n].tolist(),
            uniforms.tolist(),
        )
        assert results_of(trial)[row] == expected


@given(level=levels())
def test_a_row_is_the_same_alone_and_whatever_stands_in_padding(level: Level) -> None:
    rows, width = level.token_ids.shape
    used = generators(rows)
    together = level.tried(used)
    for row, generator in enumerate(generators(rows)):
        one, n = slice(row, row + 1), int(level.num_children[row])
        alone = Level(
            *(level.target_probs[one], level.token_ids[one, :n], level.draft_probs[one, :n]),
            level.num_children[one],
        )
        assert results_of(alone.tried([generator])) == results_of(together)[one]
        assert torch.equal(generator.get_state(), used[row].get_state())
    is_padding = torch.arange(width) >= level.num_children[:, None]
    level.draft_probs[is_padding], level.token_ids[is_padding] = torch.nan, -5
    assert results_of(level.tried(generators(rows))) == results_of(together)


@given(level=levels())
def test_a_support_stands_for_the_whole_vocabulary(level: Level) -> None:
    probs, support = level.draft_probs.sort(dim=-1)
    support = support.masked_fill(probs == 0, 0)
    rows = len(level.token_ids)
    sparse = level._replace(draft_probs=probs).tried(generators(rows), support)
    assert results_of(sparse) == results_of(level.tried(generators(rows)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_drafts_equal_to_the_target_but_for_rounding_leave_a_possible_token(
    dtype: torch.dtype,
) -> None:
    """A draft a little above the target everywhere leaves nothing after a rejection."""
    p = torch.tensor([[0.5, 0.0, 0.5]], dtype=dtype).expand(200_000, -1)
    q = (p * 1.00009)[:, None]
    ids, support = torch.zeros((len(p), 1), dtype=torch.int64), torch.arange(3).expand_as(q)
    one = torch.ones(len(p), dtype=torch.int64)
    trial = try_children(p, ids, q, support, one, one.tolist(), None)
    assert 0 < (trial.accepted == NONE).sum() < 100
    assert (trial.token_ids != 1).all()


def test_an_impossible_token_is_never_drawn_even_with_a_uniform_of_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = torch.tensor([[0.0, 0.5, 0.5, 0.0]])
    ids = torch.tensor([[0, 3]])
    certain, two = torch.ones(1, 2, 1), torch.tensor([2])
    for value, expected in ((0.0, 1), (1 - 2**-24, 2)):
        monkeypatch.setattr(torch, "rand", lambda *_, value=value, **__: torch.full((1, 3), value))
        trial = try_children(p, ids, certain, ids[..., None], two, [2], None)
        assert (int(trial.accepted), int(trial.token_ids)) == (NONE, expected)
