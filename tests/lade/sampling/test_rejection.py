"""That rejection sampling emits the target's distribution, whatever the draft was drawn from.

Rows of a batch are the samples. Each chi-square test looks at the first three emitted tokens
together, and rejects a right distribution with the probability `FALSE_ALARM`, one in a million.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lade.sampling.rejection import NONE, try_children
from tests import oracle
from tests.chi_square import FALSE_ALARM, chi_square_tail, p_value

VOCAB_SIZE = 5
NUM_ROWS = 20_000
CONTEXT = (0, 1)  # the last two committed tokens of every row; the last is the root


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        yield


class Law:
    """What follows two tokens, [VOCAB_SIZE] * 3; some things never do."""

    def __init__(self, seed: int, temperature: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE)
        logits = torch.randn(shape, generator=generator, dtype=torch.float64)
        logits[torch.rand(shape, generator=generator) < 0.15] = -torch.inf
        self.probs = torch.softmax(logits / temperature, dim=-1)

    def after(self, tokens: Tensor) -> Tensor:
        """Return the distribution [rows, VOCAB_SIZE] after the last two of `tokens` [rows, any]."""
        return self.probs[tokens[:, -2], tokens[:, -1]]

    def joint(self) -> Tensor:
        """Return the probability of every three tokens after CONTEXT, [VOCAB_SIZE**3]."""
        first = self.probs[CONTEXT]
        second = first[:, None] * self.probs[CONTEXT[1]]
        return (second[:, :, None] * self.probs).flatten()

    def continued(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Go on from row i's first `lengths[i]` tokens by plain sampling; [rows, 2 + 3]."""
        tokens = torch.cat([tokens, tokens.new_zeros((len(tokens), 3))], dim=1)
        for position in range(len(CONTEXT), len(CONTEXT) + 3):
            drawn = torch.multinomial(self.after(tokens[:, :position]), 1)[:, 0]
            is_missing = lengths <= position
            tokens[:, position] = torch.where(is_missing, drawn, tokens[:, position])
        return tokens[:, : len(CONTEXT) + 3]


class AcceptedPath(NamedTuple):
    """Outcome of verifying a draft in each row."""

    num_accepted: Tensor  # int64 [rows], number of accepted draft tokens
    nodes: Tensor  # int64 [rows, num_draft], accepted nodes from the root down, then NONE
    token_ids: Tensor  # int64 [rows], token emitted after them, which ends the step


def verify_tree(
    target_probs: Tensor,
    draft_token_ids: Tensor,
    parents: Tensor,
    draft_probs: Tensor,
    generators: list[torch.Generator] | None = None,
    num_nodes: Tensor | None = None,
    support_token_ids: Tensor | None = None,
) -> AcceptedPath:
    """Walk down the draft of each row, as decoding does: from node to accepted child.

    Args:
        target_probs: [rows, 1 + num_draft, VOCAB_SIZE], after the root and after each node.
        draft_token_ids: [rows, num_draft].
        parents: [rows, num_draft], NONE under the root.
        draft_probs: [rows, num_draft, support_size].
        generators: as of `try_children`.
        num_nodes: [rows], number of real nodes; None for all.
        support_token_ids: [rows, num_draft, support_size]; None for the whole vocabulary.
    """
    rows, num_draft = draft_token_ids.shape
    if num_nodes is None:
        num_nodes = torch.full((rows,), num_draft)
    if support_token_ids is None:
        support_token_ids = torch.arange(VOCAB_SIZE).expand(rows, num_draft, -1)
    is_real = torch.arange(num_draft) < num_nodes[:, None]
    nodes = torch.full((rows, num_draft), NONE)
    num_accepted = torch.zeros(rows, dtype=torch.int64)
    token_ids = torch.empty(rows, dtype=torch.int64)
    going = torch.arange(rows)
    node = torch.full((rows,), NONE)
    while len(going):
        is_child = (parents[going] == node[:, None]) & is_real[going]
        num_children = is_child.sum(1)
        width = int(num_children.max()) if num_draft else 0
        children = (~is_child).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
        trial = try_children(
            target_probs[going, node + 1],
            draft_token_ids[going].gather(1, children),
            draft_probs[going[:, None], children],
            support_token_ids[going[:, None], children],
            num_children,
            num_children.tolist(),
            None if generators is None else [generators[row] for row in going.tolist()],
        )
        token_ids[going] = trial.token_ids
        goes_on = trial.accepted != NONE
        going = going[goes_on]
        node = children[goes_on].gather(1, trial.accepted[goes_on, None])[:, 0]
        nodes[going, num_accepted[going]] = node
        num_accepted[going] += 1
    return AcceptedPath(num_accepted, nodes, token_ids)


class DrawnTree(NamedTuple):
    token_ids: Tensor  # int64 [rows, num_draft]
    parents: Tensor  # int64 [rows, num_draft]
    probs: Tensor  # float64 [rows, num_draft, VOCAB_SIZE]
    paths: list[Tensor]  # of each node, int64 [rows, 2 + depth], CONTEXT included


def contexts(num_rows: int = NUM_ROWS) -> Tensor:
    return torch.tensor(CONTEXT).expand(num_rows, -1)


def draw_tree(draft: Law, parents: list[int], replacement: bool) -> DrawnTree:
    paths = [contexts()]  # the root's first
    tokens: list[Tensor] = []
    probs: list[Tensor] = []
    for node, parent in enumerate(parents):
        q = draft.after(paths[parent + 1]).clone()
        for sibling in range(node):
            if parents[sibling] == parent and not replacement:
                q.scatter_(1, tokens[sibling][:, None], 0)
        q /= q.sum(1, keepdim=True)
        tokens.append(torch.multinomial(q, 1)[:, 0])
        probs.append(q)
        paths.append(torch.cat([paths[parent + 1], tokens[-1][:, None]], dim=1))
    return DrawnTree(
        torch.stack(tokens, 1),
        torch.tensor(parents).expand(NUM_ROWS, -1),
        torch.stack(probs, 1),
        paths[1:],
    )


def chosen_tree(token_ids: list[int], parents: list[int]) -> DrawnTree:
    paths = [contexts()]
    for token_id, parent in zip(token_ids, parents, strict=True):
        last = torch.full((NUM_ROWS, 1), token_id)
        paths.append(torch.cat([paths[parent + 1], last], dim=1))
    ids = torch.tensor(token_ids).expand(NUM_ROWS, -1)
    with_certainty = torch.nn.functional.one_hot(ids, VOCAB_SIZE).double()
    return DrawnTree(ids, torch.tensor(parents).expand(NUM_ROWS, -1), with_certainty, paths[1:])


def target_of(target: Law, paths: list[Tensor]) -> Tensor:
    """Run the target over a tree: [rows, 1 + num_draft, VOCAB_SIZE]."""
    return torch.stack([target.after(path) for path in [contexts(), *paths]], dim=1)


def emitted(context: Tensor, draft_token_ids: Tensor, nodes: Tensor, last: Tensor) -> Tensor:
    """Append the accepted tokens and the one after them to `context`, then whatever: [rows, …]."""
    tokens = torch.cat([context, draft_token_ids.gather(1, nodes.clamp_min(0)), last[:, None]], 1)
    end = context.shape[1] + (nodes != NONE).sum(1, keepdim=True)
    return tokens.scatter(1, end, last[:, None])


def p_value_of(tokens: Tensor, target: Law) -> float:
    """Hold three tokens of every row [rows, 2 + 3] against the target."""
    a, b, c = tokens[:, len(CONTEXT) :].unbind(1)
    cells = (a * VOCAB_SIZE + b) * VOCAB_SIZE + c
    counts = torch.bincount(cells, minlength=VOCAB_SIZE**3)
    return p_value(counts.tolist(), target.joint().tolist())


def p_value_after(target: Law, tree: DrawnTree, dtype: torch.dtype = torch.float64) -> float:
    """Verify a tree in every row, go on by plain sampling and test the first three tokens."""
    probs = target_of(target, tree.paths).to(dtype)
    path = verify_tree(probs, tree.token_ids, tree.parents, tree.probs)
    tokens = emitted(contexts(), tree.token_ids, path.nodes, path.token_ids)
    return p_value_of(target.continued(tokens, len(CONTEXT) + 1 + path.num_accepted), target)


# --- distribution ---------------------------------------------------------------------------

TREES = {"chain": [-1, 0, 1], "siblings": [-1, -1, -1], "tree": [-1, -1, 0, 0, 1, 2, -1]}
TEMPERATURES = (0.3, 1.0, 1.5)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
def test_drawn_drafts_leave_the_distribution(
    parents: list[int], replacement: bool, temperature: float
) -> None:
    tree = draw_tree(Law(seed=2), parents, replacement)
    assert p_value_after(Law(seed=1, temperature=temperature), tree) > FALSE_ALARM


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(
    ("token_ids", "parents"),
    [([2, 3, 4], [-1, 0, 1]), ([4, 2, 0], [-1, -1, -1]), ([2, 3, 3, 4, 2], [-1, -1, 0, 0, 1])],
    ids=TREES,
)
def test_chosen_drafts_leave_the_distribution(
    token_ids: list[int], parents: list[int], temperature: float
) -> None:
    target = Law(seed=1, temperature=temperature)
    assert p_value_after(target, chosen_tree(token_ids, parents)) > FALSE_ALARM


@pytest.mark.parametrize("distribution", ["as it was", "of the first sibling"])
def test_a_wrongly_stated_draft_distribution_is_noticed(distribution: str) -> None:
    tree = draw_tree(Law(seed=2), TREES["siblings"], replacement=False)
    if distribution == "of the first sibling":
        tree = tree._replace(probs=tree.probs[:, :1].expand(-1, 3, -1))
    is_right = p_value_after(Law(seed=1), tree) > FALSE_ALARM
    assert is_right == (distribution == "as it was")


def test_the_chi_square_tail_is_the_incomplete_gamma_function() -> None:
    for degrees in (1, 2, 3, 4, 30, 99, 124):
        for distance in (0.5, 3.0, 40.0, 190.0):
            half = torch.tensor([degrees / 2, distance / 2], dtype=torch.float64)
            expected = torch.special.gammaincc(half[0], half[1]).item()
            assert chi_square_tail(distance, degrees) == pytest.approx(expected, rel=1e-6)


# --- a biased scheme of published code, which the same test must reject ---------------------------


def fresh_root(target: Law, draft_token_ids: list[int]) -> tuple[Tensor, Tensor]:
    """Accept while the draws agree with the draft; throw the draw away that does not."""
    tokens, is_alike = contexts(), torch.ones(NUM_ROWS, dtype=torch.bool)
    lengths = torch.full((NUM_ROWS,), len(CONTEXT))
    for token_id in draft_token_ids:
        drawn = torch.multinomial(target.after(tokens), 1)
        is_alike &= drawn[:, 0] == token_id
        lengths += is_alike
        tokens = torch.cat([tokens, torch.full_like(drawn, token_id)], dim=1)
    return tokens, lengths  # from where plain sampling draws afresh


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_biased_scheme_is_noticed(temperature: float) -> None:
    target = Law(seed=1, temperature=temperature)
    first = int(target.probs[CONTEXT].argmax())
    draft = [first, int(target.probs[CONTEXT[1], first].argmax())]
    assert p_value_of(target.continued(*fresh_root(target, draft)), target) < 1e-30
    assert p_value_after(target, chosen_tree(draft, [-1, 0])) > FALSE_ALARM


# --- properties of single rows ---------------------------------------------------------------


class Rows(NamedTuple):
    target_probs: Tensor
    draft_token_ids: Tensor
    parents: Tensor
    draft_probs: Tensor
    num_nodes: Tensor


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    """Random trees over a small vocabulary, with probabilities of 0 here and there."""
    rows, num_draft = draw(st.integers(1, 4)), draw(st.integers(0, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))

    def distributions(count: int) -> Tensor:
        logits = 2 * torch.randn((rows, count, VOCAB_SIZE), generator=generator, dtype=dtype)
        logits[..., 1:].masked_fill_(
            torch.rand(logits[..., 1:].shape, generator=generator) < 0.3, -torch.inf
        )
        return torch.softmax(logits, dim=-1)

    draft_probs = distributions(num_draft)
    token_ids = torch.zeros((rows, num_draft), dtype=torch.int64)
    if num_draft:
        flat = draft_probs.reshape(-1, VOCAB_SIZE)
        token_ids = torch.multinomial(flat, 1, generator=generator).view(rows, num_draft)
    parents = [[draw(st.integers(-1, node - 1)) for node in range(num_draft)] for _ in range(rows)]
    num_nodes = [draw(st.integers(0, num_draft)) for _ in range(rows)]
    return Rows(
        distributions(1 + num_draft),
        token_ids,
        torch.tensor(parents, dtype=torch.int64).view(rows, num_draft),
        draft_probs,
        torch.tensor(num_nodes),
    )


def generators(num_rows: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(num_rows)]


def of_batch(batch: Rows, is_drawn: bool) -> Tensor:
    """Return the distributions of its drafts: those they were drawn from, or certainty."""
    certain = torch.nn.functional.one_hot(batch.draft_token_ids, VOCAB_SIZE)
    return batch.draft_probs if is_drawn else certain.to(batch.draft_probs.dtype)


@given(batch=batches(), is_drawn=st.booleans())
def test_what_is_accepted_is_a_path_of_possible_tokens(batch: Rows, is_drawn: bool) -> None:
    target_probs, token_ids, parents, _, num_nodes = batch
    probs = of_batch(batch, is_drawn)
    path = verify_tree(target_probs, token_ids, parents, probs, generators(len(parents)), num_nodes)
    for row, nodes in enumerate(path.nodes.tolist()):
        num_accepted = int(path.num_accepted[row])
        assert nodes[num_accepted:] == [NONE] * (len(nodes) - num_accepted)
        node = NONE
        for child in nodes[:num_accepted]:
            assert parents[row, child] == node
            assert child < num_nodes[row]
            assert target_probs[row, node + 1, token_ids[row, child]] > 0
            node = child
        last = path.token_ids[row]
        assert target_probs[row, node + 1, last] > 0
        if not is_drawn:  # or it would have been accepted
            siblings = (parents[row] == node) & (torch.arange(len(nodes)) < num_nodes[row])
            assert last not in token_ids[row, siblings]


@given(batch=batches(), is_drawn=st.booleans())
def test_a_row_is_the_same_alone_and_whatever_stands_in_padding(
    batch: Rows, is_drawn: bool
) -> None:
    target_probs, token_ids, parents, _, num_nodes = batch
    probs = of_batch(batch, is_drawn)
    used = generators(len(parents))
    together = verify_tree(target_probs, token_ids, parents, probs, used, num_nodes)
    for row, generator in enumerate(generators(len(parents))):
        n = int(num_nodes[row])
        one = slice(row, row + 1)
        alone = verify_tree(
            target_probs[one, : n + 1],
            token_ids[one, :n],
            parents[one, :n],
            probs[one, :n],
            [generator],
        )
        assert alone.nodes[0].tolist() == together.nodes[row, :n].tolist()
        assert alone.token_ids[0] == together.token_ids[row]
        assert torch.equal(generator.get_state(), used[row].get_state())

    is_padding = torch.arange(token_ids.shape[1]) >= num_nodes[:, None]
    target_probs[:, 1:][is_padding] = torch.nan
    probs[is_padding] = torch.nan
    token_ids[is_padding], parents[is_padding] = -5, 99
    again = verify_tree(
        target_probs, token_ids, parents, probs, generators(len(parents)), num_nodes
    )
    for got, expected in zip(again, together, strict=True):
        assert torch.equal(got, expected)


@given(batch=batches())
def test_a_level_is_what_the_papers_write(batch: Rows) -> None:
    target_probs, token_ids, _, draft_probs, num_children = batch
    rows, counts = len(token_ids), num_children.tolist()
    support = torch.arange(VOCAB_SIZE).expand_as(draft_probs)
    trial = try_children(
        *(target_probs[:, 0], token_ids, draft_probs, support),
        *(num_children, counts, generators(rows)),
    )
    for row, generator in enumerate(generators(len(token_ids))):
        n = int(num_children[row])
        uniforms = torch.rand(1 + n, generator=generator, dtype=target_probs.dtype)
        expected = oracle.try_children(
            target_probs[row, 0].tolist(),
            token_ids[row, :n].tolist(),
            draft_probs[row, :n].tolist(),
            uniforms.tolist(),
        )
        assert (int(trial.accepted[row]), int(trial.token_ids[row])) == expected


@given(batch=batches())
def test_a_support_stands_for_the_whole_vocabulary(batch: Rows) -> None:
    target_probs, token_ids, parents, draft_probs, num_nodes = batch
    rows = len(parents)
    dense = verify_tree(target_probs, token_ids, parents, draft_probs, generators(rows), num_nodes)
    probs, support = draft_probs.sort(dim=-1)
    support = support.masked_fill(probs == 0, 0)
    sparse = verify_tree(
        target_probs, token_ids, parents, probs, generators(rows), num_nodes, support
    )
    for got, expected in zip(sparse, dense, strict=True):
        assert torch.equal(got, expected)


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
