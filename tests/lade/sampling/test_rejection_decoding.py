"""Decoding with `Config(acceptance="rejection")`: other tokens, the target's distribution."""

from typing import Any

import torch

import lade
from tests.lade.both import ONE, THREE, answered, both, same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import chain

REJECTION = lade.Config(max_draft_tokens=5, acceptance="rejection")
VOCAB_SIZE = 8


def test_a_seed_repeats_a_call_and_rows_do_not_depend_on_each_other() -> None:
    model = shared_model("llama", seed=1)
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 20, "config": REJECTION}
    options |= {"attention_mask": (THREE != 0).long(), "pad_token_id": 0}
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(lade.generate(model, THREE, **options).tolist())
    assert texts[0] == texts[1] != texts[2]
    options["config"] = lade.Config(max_draft_tokens=0, acceptance="rejection")
    torch.manual_seed(0)
    together = lade.generate(model, THREE, **options).tolist()
    torch.manual_seed(0)
    options["attention_mask"] = options["attention_mask"][:2]
    assert lade.generate(model, THREE[:2], **options).tolist() == together[:2]


def test_greedy_text_is_the_same_with_both_verifiers() -> None:
    model = shared_model("llama", seed=1)
    for prompt in (ONE, THREE):
        same_as_generate(model, prompt, config=REJECTION)


def test_a_drafter_that_cannot_draw_is_verified_as_certain() -> None:
    """`both` would compare texts; here only what the drafter is asked is of interest."""
    model = shared_model("llama", seed=1, vocab_size=VOCAB_SIZE, eos_token_id=None, pad_token_id=0)
    expected, _ = both(model, ONE % VOCAB_SIZE, do_sample=False, attention_mask=ONE * 0 + 1)
    answer = expected.sequences[0].tolist()

    class Sure(lade.Drafter):
        """Has the likeliest answer and nothing else."""

        def draft(self, sequence: int, committed: Any, max_draft_tokens: int) -> Any:
            return chain(answer[len(committed) :][:max_draft_tokens], 0.9)

    out = answered(
        model,
        ONE % VOCAB_SIZE,
        do_sample=True,
        temperature=0.001,
        max_new_tokens=20,
        drafter=Sure(),
        config=REJECTION,
    )
    assert out.sequences[0].tolist() == answer[: out.sequences.shape[1]]
    assert out.stats.mean_accepted_tokens > 4


def test_scores_and_streams_come_with_rejection_too() -> None:
    model = shared_model("llama", seed=1)
    torch.manual_seed(0)
    out = answered(
        model,
        ONE,
        do_sample=True,
        max_new_tokens=10,
        eos_token_id=None,
        config=REJECTION,
        output_scores=True,
    )
    assert len(out.scores) == 10
    for column, scores in enumerate(out.scores):  # no token that top-k had ruled out
        chosen = out.sequences[:, ONE.shape[1] + column]
        assert bool(scores.gather(1, chosen[:, None]).isfinite().all())
