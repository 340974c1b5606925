"""Short convolutions, gated delta nets and Mamba 2 in the place of attention: jobs and caches."""

from itertools import product
from typing import Any

import pytest
import torch

import lade
from tests.grids import thinned_rows
from tests.lade.forward.conftest import Ran
from tests.lade.forward.families import FORMATS, MAMBAS, model_of
from tests.lade.forward.test_bits import Texts
from tests.lade.forward.test_job import TEXT, Apart, Prefilled, compared, with_drafts

__all__ = ["compared"]  # a fixture

DELTAS = "qwen3_next", "qwen3_5_text"  # columns key head by key head, and kind by kind
OF_DELTAS: list[dict[str, Any]] = [
    {},
    {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 2},
    {"linear_num_key_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 40},
]
_SIZES: list[tuple[str, dict[str, Any]]] = [
    *(("lfm2", {"conv_L_cache": width, "conv_bias": width != 2}) for width in (1, 2, 5)),
    *product(DELTAS, OF_DELTAS),
    ("granitemoehybrid", {}),  # of Mamba 2, a norm of all heads; of several; of each
    ("granitemoehybrid", {"mamba_n_groups": 2, "mamba_d_state": 24, "num_local_experts": 0}),
    ("bamba", {"mamba_n_groups": 8, "mamba_proj_bias": True, "mamba_d_conv": 2}),
]
SIZES = [(*size, dtype) for size, dtype in product(_SIZES, FORMATS)]
# Sizes of each kind, each in one format.
QUICK = [(*_SIZES[each], FORMATS[each % 3]) for each in (2, 4, 8, 10, 11)]
of_sizes = pytest.mark.parametrize(
    ("family", "options", "dtype"), thinned_rows(SIZES, *QUICK), ids=str
)
LENGTHS = [*product(["lfm2", *DELTAS, *MAMBAS], (1, 2, 3, 33, 700))]


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


@of_sizes
def test_layers_of_any_size(
    family: str, options: dict[str, Any], dtype: torch.dtype, compared: list[Apart]
) -> None:
    with_drafts(model_of(family, dtype, **options), TEXT, max_new_tokens=12)
    # Torch's own forwards are off by 1e-4: states add up errors.
    limit = 0.0 if family == "lfm2" else 5e-4
    assert all(each.is_close or float(each.told) < limit for each in compared), compared
    assert TEXT.shape[1] in {each.num_tokens for each in compared}


@of_sizes
def test_tokens_have_the_same_bits(
    family: str, options: dict[str, Any], dtype: torch.dtype, ran: list[Ran]
) -> None:
    assert Texts(model_of(family, dtype, **options)).differences(0) == []
    assert 3 in {each.num_parts for each in ran}


@pytest.mark.parametrize(
    ("family", "num_tokens"),
    thinned_rows(
        LENGTHS,
        *(("lfm2", 1), ("lfm2", 700), ("qwen3_next", 3), ("qwen3_next", 700)),
        ("granitemoehybrid", 2),
    ),
)
def test_prompts_of_any_length(family: str, num_tokens: int, ran: list[Ran]) -> None:
    """Before the text are zeros; long texts of recurrences run by torch; caches go on from each."""
    model = model_of(family, max_position_embeddings=1024)
    ids = torch.randint(2, 90, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    given |= {"return_dict_in_generate": True, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **given)
    mine = with_drafts(model, ids, return_dict_in_generate=False)
    assert torch.equal(mine, expected.sequences)
    got = lade.generate(model, ids, **given)
    assert torch.equal(got.sequences, expected.sequences)
    held = zip(got.past_key_values.layers, expected.past_key_values.layers, strict=True)
    for own, theirs in held:
        for name in {"conv_states", "recurrent_states"} & vars(theirs).keys():
            mine, other = getattr(own, name)[0], getattr(theirs, name)[0]
            assert mine is other is None or torch.allclose(mine, other, atol=5e-4)
    more = {**given, "past_key_values": got.past_key_values, "max_new_tokens": 9}
    longer = torch.cat([got.sequences, ids], dim=1)
    more["attention_mask"] = torch.ones_like(longer)
    later = lade.generate(model, longer, **more)
    whole = model.generate(longer, **{**more, "past_key_values": None})
    assert torch.equal(later.sequences, whole.sequences)
    is_by_job = num_tokens < 64 or family == "lfm2"
    assert (num_tokens in {each.num_tokens for each in ran}) == is_by_job


def test_forwards_of_torch_leave_the_state_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one token, those of Mamba 2 write to the state that they got, and do not say so."""
    model, root = model_of("granitemoehybrid"), torch.tensor([[11]])
    target, text = Prefilled(model, TEXT), torch.cat([TEXT, root], dim=1)
    monkeypatch.setattr(target, "discard", lambda: None)
    for path in ([], [0], [0]):
        assert torch.allclose(target.run_plainly([]), model(text).logits[:, -1:], atol=1e-3)
        target.commit([path])
        text = torch.cat([text, *[root] * len(path)], dim=1)


def test_a_mamba_with_limited_steps_is_left_to_torch() -> None:
    reason = lade.probe(model_of("bamba", time_step_limit=(0.01, 0.1))).why_by_torch
    assert reason == "model.layers.0: its recurrence limits its time steps"
