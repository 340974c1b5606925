"""Attention of several calls in one row: each call's numbers are those that it has alone."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lade.attention import joint
from lade.attention.joint import CallKeys, Calls, Held, with_calls, with_held
from lade.attention.packed import packed_rows
from lade.targets.joint import JointCache
from lade.targets.kv_cache import TreeCache
from lade.targets.kv_memory import LayerKind
from tests.lade.attention.test_tree_attention import Layer
from tests.lade.products.lanes import kernels_with

pytestmark = [
    pytest.mark.skipif(joint.kernels() is None, reason="the kernels do not run here"),
    pytest.mark.xdist_group("products"),  # compiled once
]

FORMATS = (torch.float32, torch.bfloat16, torch.float16)
MANY = 40  # tokens of a call that attends alone


class Case:
    """Calls with keys and values of their own, in one layer."""

    def __init__(
        self,
        sizes: Sequence[int],
        num_keys: Sequence[int],
        dtype: torch.dtype,
        *,
        heads: tuple[int, int] = (6, 2),
        dims: tuple[int, int] = (64, 64),
        scale: float = 1.0,
    ) -> None:
        torch.manual_seed(0)
        self.sizes, self.heads, self.dims = sizes, heads, dims
        num_heads, num_key_heads = heads
        size, value_size = dims
        num_tokens = sum(sizes)
        self.query = scale * torch.randn(1, num_tokens, num_heads, size).transpose(1, 2)
        self.query = self.query.to(dtype)
        shapes = [(1, num_key_heads, num + 5) for num in num_keys]
        self.held = [
            (
                torch.randn(*shape, size).to(dtype)[:, :, :num],
                torch.randn(*shape, value_size).to(dtype)[:, :, :num],
            )
            for shape, num in zip(shapes, num_keys, strict=True)
        ]
        self.masks: list[Tensor | None] = []
        for num_own, num in zip(sizes, num_keys, strict=True):
            mask = torch.rand(1, 1, num_own, num) < 0.7
            mask[0, 0, :, num - num_own :] = torch.eye(num_own, dtype=torch.bool)
            self.masks.append(None if num_own == 1 else mask)

    def expected(self) -> Tensor:
        """Return the attention of each call alone, in float64."""
        parts = []
        starts = [0, *torch.tensor(self.sizes).cumsum(0).tolist()]
        num_sharing = self.heads[0] // self.heads[1]
        for nodes, (keys, values), mask in zip(
            pairwise(starts), self.held, self.masks, strict=True
        ):
            attended = scaled_dot_product_attention(
                self.query[:, :, slice(*nodes)].double(),
                keys.double().repeat_interleave(num_sharing, dim=1),
                values.double().repeat_interleave(num_sharing, dim=1),
                attn_mask=mask,
                scale=0.2,
            )
            parts.append(attended.transpose(1, 2))
        return torch.cat(parts, dim=1)

    def attended(self, **options: Any) -> Tensor:
        """Return it for all calls in one row."""
        places = []
        for keys, values in self.held:
            width = keys.element_size()
            steps = [width * states.stride(1) for states in (keys, values)]
            of_keys, of_values = (keys.data_ptr(), steps[0]), (values.data_ptr(), steps[1])
            places.append(CallKeys(*of_keys, *of_values, keys.shape[2]))
        held = Held(lambda: self.held, places)
        new = [torch.zeros(1, self.heads[1], sum(self.sizes), dim) for dim in self.dims]
        keys, values = (with_held(states.to(self.query.dtype), held) for states in new)
        mask = with_calls(torch.ones(1, 1, 1, 1), Calls(self.sizes, self.masks))
        layer = Layer(self.heads[0] // self.heads[1])
        options = {"scaling": 0.2, **options}
        result, weights = packed_rows(layer, self.query, keys, values, mask, **options)
        assert weights is None
        assert result.dtype is self.query.dtype
        return result


def apart(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("heads", "dims"),
    [
        ((6, 2), (64, 64)),
        ((9, 3), (64, 64)),
        ((4, 4), (128, 128)),
        ((8, 1), (80, 80)),
        ((5, 5), (16, 96)),
        ((4, 2), (20, 48)),
        ((6, 2), (33, 16)),
    ],
)
def test_it_is_as_exact_as_torch(
    heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, known_at_once: list[bool]
) -> None:
    sizes = [1, 3, 1, MANY, 9, 16, 1, 2]
    num_keys = [1, 64, 65, 200, 9, 63, 500, 130]
    case = Case(sizes, num_keys, dtype, heads=heads, dims=dims)
    limit = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    assert apart(case.attended(), case.expected()) < limit
    assert known_at_once == [True]


def test_a_token_may_see_nothing_of_many_keys_before_its_own() -> None:
    case = Case([2, 1], [300, 70], torch.float32)
    mask = torch.zeros(1, 1, 2, 300, dtype=torch.bool)
    mask[0, 0, [0, 1], [298, 299]] = True
    case.masks[0] = mask
    result = case.attended()
    assert apart(result, case.expected()) < 1e-6
    values = case.held[0][1][0, :, 298].repeat_interleave(3, dim=0)
    assert torch.equal(result[0, 0], values)


def test_scores_may_be_far_apart() -> None:
    case = Case([1, 5], [300, 90], torch.float32, scale=1e4)
    assert apart(case.attended(), case.expected()) < 1e-5


def test_what_is_no_number_stays_in_its_call() -> None:
    case = Case([2, 1, 3], [30, 40, 50], torch.float32)
    exact = case.expected()
    case.held[1][0][0, 0, 7, 3] = torch.nan
    result = case.attended()
    assert bool(result[0, 2, :3].isnan().all())  # the heads that share these keys
    assert not bool(result[0, [0, 1, 3, 4, 5]].isnan().any())
    assert apart(result[0, 3:], exact[0, 3:]) < 1e-6


@pytest.mark.parametrize(
    ("dtype", "dims", "options"),
    [
        (torch.float64, (64, 64), {}),
        (torch.float32, (16, 12), {}),  # no whole vectors
        (torch.float32, (64, 64), {"dropout": 1e-12}),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_know_is_done_call_by_call(
    dtype: torch.dtype, dims: tuple[int, int], options: dict[str, Any], known_at_once: list[bool]
) -> None:
    case = Case([1, 3, MANY], [20, 30, 60], dtype, dims=dims)
    assert apart(case.attended(**options), case.expected()) < 1e-6
    assert True not in known_at_once


def test_additive_masks_are_for_torch(known_at_once: list[bool]) -> None:
    case = Case([1, 3], [20, 30], torch.float32)
    exact, mask = case.expected(), case.masks[1]
    assert mask is not None
    case.masks[1] = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    assert apart(case.attended(), exact) < 1e-6
    assert known_at_once == [False]


@pytest.mark.parametrize("num_more", [-1, 1])
def test_masks_of_other_keys_are_refused(num_more: int) -> None:
    case = Case([1, 3], [20, 30], torch.float32)
    case.masks[1] = torch.ones(1, 1, 3, 30 + num_more, dtype=torch.bool)
    with pytest.raises(RuntimeError):
        case.attended()


def test_options_that_change_attention_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="softcap"):
        Case([1, 3], [20, 30], torch.float32).attended(softcap=3.0)


# --- what is written --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FORMATS, torch.float64], ids=str)
def test_all_calls_are_written_to_as_each_alone(dtype: torch.dtype) -> None:
    kinds = [LayerKind("full"), LayerKind("windowed", 12), LayerKind("full")]

    def caches() -> list[TreeCache]:
        made = []
        for length in (3, 40, 0, 17):
            made.append(TreeCache(kinds, length, 600))
            torch.manual_seed(length)
            states = torch.randn(2, 1, 2, length, 8).to(dtype)
            for layer in range(len(kinds) if length else 0):
                made[-1].update(*states, layer)
            if length:
                made[-1].keep_all()
        return made

    sizes, alone, together = [1, 4, 300, 2], caches(), caches()
    for step in range(3):  # of which the last has memory that moves
        cache = JointCache(together, sizes)
        for layer in range(len(kinds)):
            # As models make them: keys of turned numbers, values of a view.
            keys = torch.randn(1, 2, sum(sizes), 8).to(dtype)
            values = torch.randn(1, sum(sizes), 2, 8).to(dtype).transpose(1, 2)
            cache.update(keys, values, layer)
            new = (torch.split(states, sizes, dim=2) for states in (keys, values))
            parts = zip(alone, *new, strict=True)
            for own, new_keys, new_values in parts:
                own.update(new_keys, new_values, layer)
        for mine, own, size in zip(together, alone, sizes, strict=True):
            for layer in range(len(kinds)):
                assert torch.equal(mine.layers[layer].keys, own.layers[layer].keys)
                assert torch.equal(mine.layers[layer].values, own.layers[layer].values)
            for each in (mine, own):
                if step == 0 and size == 300:
                    each.keep_all()  # a prompt
                else:
                    each.keep([[*range(size)]])


# --- vectors of the other length --------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_lanes", [8, 16])
def test_vectors_of_either_length_give_the_same(
    num_lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_at_once: list[bool]
) -> None:
    names = ("lade.attention._blocks", "lade.attention._kernels")
    kernels = kernels_with(num_lanes, tmp_path, monkeypatch, *names)
    monkeypatch.setattr(joint, "kernels", lambda: kernels)
    for dtype in FORMATS:
        for heads, dims in (((9, 3), (64, 64)), ((2, 1), (31, 48)), ((4, 4), (128, 112))):
            case = Case([1, 3, 1, MANY, 9], [1, 64, 77, 200, 9], dtype, heads=heads, dims=dims)
            limit = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
            assert apart(case.attended(), case.expected()) < limit
    assert known_at_once == [True] * 9
