"""Gated delta nets in the place of attention, in jobs and in the cache."""

from typing import Any

import pytest
import torch

from tests.lade.forward.conftest import Ran
from tests.lade.forward.families import FORMATS, model_of
from tests.lade.forward.test_bits import Texts
from tests.lade.forward.test_convolutions import goes_on
from tests.lade.forward.test_job import TEXT, Apart, are_close, compared, with_drafts

__all__ = ["compared"]  # a fixture

FAMILIES = ["qwen3_next", "qwen3_5_text"]  # columns key head by key head, and kind by kind
SIZES: list[dict[str, Any]] = [
    {},
    {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 2},
    {"linear_num_key_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 40},
]


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("options", SIZES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_recurrences_of_any_size(
    family: str, options: dict[str, Any], compared: list[Apart]
) -> None:
    for dtype in FORMATS:
        model = model_of(family, dtype, **options)
        with_drafts(model, TEXT)
        # In float32 torch's own forwards are off by 1e-4: states add up errors.
        near = [e._replace(is_close=e.is_close or float(e.told) < 5e-4) for e in compared]
        assert are_close(near if dtype is torch.float32 else compared, model), compared
        assert {TEXT.shape[1], 1} < {each.num_tokens for each in compared}
        compared.clear()


@pytest.mark.parametrize("options", SIZES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_have_the_same_bits(family: str, options: dict[str, Any], ran: list[Ran]) -> None:
    for dtype in FORMATS:
        assert Texts(model_of(family, dtype, **options)).differences(0) == []
    assert 3 in {each.num_parts for each in ran}


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 33, 300])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_any_length(family: str, num_tokens: int, ran: list[Ran]) -> None:
    """Short ones run by a job, others by torch; caches go on from each other."""
    goes_on(model_of(family, max_position_embeddings=1024), num_tokens)
    assert (num_tokens in {each.num_tokens for each in ran}) == (num_tokens < 64)
