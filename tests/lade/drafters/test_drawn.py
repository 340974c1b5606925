"""Drafts drawn from another model, verified by rejection sampling: the target's distribution."""

from typing import Any

import pytest
import torch
from transformers import TemperatureLogitsWarper

import lade
from lade.drafters import AssistantModel
from lade.drafters.expansion import _Drawn
from tests.chi_square import FALSE_ALARM, p_value
from tests.grids import thinned
from tests.lade.both import ONE, THREE, answered
from tests.lade.sampling.test_rejection_decoding import VOCAB_SIZE, exact_distribution
from tests.lade.shared import shared_model
from tests.lade.tiny import tiny_model

DRAWN = lade.Config(acceptance="rejection", strict_drafter=True)
PROMPT = [1, 2, 3, 1, 2]


def small(seed: int, **options: Any) -> Any:
    return tiny_model(
        "llama", seed, vocab_size=VOCAB_SIZE, eos_token_id=None, pad_token_id=0, **options
    )


def counted(
    model: Any, drafter: Any, num_samples: int, **options: Any
) -> tuple[torch.Tensor, lade.DecodeStats]:
    """Count pairs of first tokens [VOCAB_SIZE, VOCAB_SIZE]."""
    out = answered(
        model,
        torch.tensor([PROMPT]),
        do_sample=True,
        top_k=0,
        num_return_sequences=num_samples,
        max_new_tokens=3,
        drafter=drafter,
        config=DRAWN,
        **options,
    )
    counts = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, dtype=torch.int64)
    for first, second in out.sequences[:, len(PROMPT) : len(PROMPT) + 2].tolist():
        counts[first, second] += 1
    return counts, out.stats


@pytest.mark.exhaustive
@pytest.mark.parametrize("expansion", thinned(["tree", "chain"], "tree"))
def test_text_has_the_distribution_of_the_target(expansion: Any) -> None:
    """Pairs of first tokens of 600 samples, at a temperature that applies to both models."""
    model, assistant = small(3), small(4)
    drafter = AssistantModel(assistant, length=2, expansion=expansion)
    counts, stats = counted(model, drafter, 600, temperature=0.7)
    assert stats.num_accepted_tokens > 0.025 * stats.num_draft_tokens
    expected = exact_distribution(model, PROMPT, 0.7).flatten().tolist()
    assert p_value(counts.flatten().tolist(), expected) > FALSE_ALARM


@pytest.mark.exhaustive
def test_the_test_finds_drafts_that_tell_other_distributions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drawn from the assistant's distribution, and said to be from a flat one."""
    draw = _Drawn._draw

    def flattened(self: Any, parent: int, token_ids: Any, probs: Any, prob: float) -> int:
        node = draw(self, parent, token_ids, probs, prob)
        flat = 1.0 * (probs > 0)
        self._support_probs[-1] = flat / flat.sum()
        return node

    monkeypatch.setattr(_Drawn, "_draw", flattened)
    model = small(3)
    drafter = AssistantModel(small(4), length=2, expansion="chain")
    counts, _ = counted(model, drafter, 600, temperature=0.7)
    expected = exact_distribution(model, PROMPT, 0.7).flatten().tolist()
    assert p_value(counts.flatten().tolist(), expected) < FALSE_ALARM


def test_the_same_model_is_always_right_also_with_processors() -> None:
    """p = q, whatever temperature, top-p and penalties make of both."""
    model = shared_model("llama", seed=1)
    drafter = AssistantModel(model, length=4, expansion="chain")
    options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3}
    for prompt in (ONE, THREE):
        out = answered(
            model,
            prompt,
            do_sample=True,
            max_new_tokens=30,
            eos_token_id=None,
            drafter=drafter,
            config=DRAWN,
            **options,
        )
        # A penalty for padding is not seen by the drafter.
        assert out.stats.acceptance_rate > (0.999 if prompt is ONE else 0.8)


def test_a_seed_repeats_a_call_with_drawn_drafts() -> None:
    model, assistant = shared_model("llama", seed=1), tiny_model("llama", seed=2)
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drafter = AssistantModel(assistant, length=3)
        options: dict[str, Any] = {"attention_mask": (THREE != 0).long(), "pad_token_id": 0}
        options |= {"do_sample": True, "max_new_tokens": 20, "config": DRAWN}
        texts.append(lade.generate(model, THREE, drafter=drafter, **options).tolist())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("verification", ["tree", "chain"])
def test_drawn_drafts_suit_every_verification(verification: Any) -> None:
    """Of a drawn tree no path can be left out, so it is a chain where paths are few."""
    model, drafter = shared_model("llama", seed=1), AssistantModel(tiny_model("llama", 2), length=3)

    class Unknown(TemperatureLogitsWarper):  # type: ignore[misc]
        """Not known to have no state: left out of the drafts, and rows go together."""

    for processors in ([], [Unknown(1.3)]):
        out = answered(
            model,
            ONE,
            do_sample=True,
            max_new_tokens=20,
            eos_token_id=None,
            logits_processor=processors,
            drafter=drafter,
            config=lade.Config(
                acceptance="rejection", strict_drafter=True, verification=verification
            ),
        )
        assert out.sequences.shape[1] == ONE.shape[1] + 20
        assert out.stats.num_draft_tokens > 0


def test_an_assistant_draws_no_more_paths_than_candidates_are_asked_for() -> None:
    config = lade.Config(acceptance="rejection", strict_drafter=True, max_candidates=1)
    joined = lade.drafters.Merged([lade.drafters.CallPool(), AssistantModel(small(4), length=2)])
    out = answered(small(3), ONE, drafter=joined, config=config, do_sample=True, max_new_tokens=16)
    assert out.stats.sources["assistant"].num_draft_tokens > 0
