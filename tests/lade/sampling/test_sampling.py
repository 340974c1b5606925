"""What sampling and choosing promise beside equal tokens: what is seen on the way, and errors."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import lade
from tests.lade.both import EIGHT, ONE, answered, same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import tiny_model
from tests.ngram_pool.checking import check_pool


def test_the_first_of_equals_is_chosen() -> None:
    """Each token has a twin, which is as likely."""
    model = tiny_model("llama", seed=1, vocab_size=98)
    with torch.no_grad():
        model.lm_head.weight[1::2] = model.lm_head.weight[::2]
    for config in (None, EIGHT):
        _, got = same_as_generate(model, ONE, knows=True, config=config, eos_token_id=None)
        assert not bool((got.sequences[0, ONE.shape[1] :] % 2).any())


def test_samples_of_one_prompt_are_counted_as_rows() -> None:
    steps: list[lade.Step] = []
    same_as_generate(
        *(shared_model("llama", seed=1), ONE),
        accept=0.7,
        config=EIGHT,
        do_sample=True,
        num_return_sequences=5,
        temperature=0.4,
        by=partial(lade.generate, on_step=steps.append),
    )
    assert {step.row for step in steps} == {*range(5)}


@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
def test_a_distribution_that_is_none_raises_as_in_generate(acceptance: Any) -> None:
    model, pool = shared_model("llama", seed=1), lade.NGramPool()

    def broken(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores * float("nan") if input_ids.shape[1] > 12 else scores

    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 20}
    options["logits_processor"] = [broken]
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        model.generate(ONE, attention_mask=(ONE != 0).long(), **options)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    config = lade.Config(acceptance=acceptance)
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        answered(model, ONE, pool=pool, config=config, **options)
    assert acceptance == "rejection" or torch.equal(torch.get_rng_state(), state)
    check_pool(pool)
