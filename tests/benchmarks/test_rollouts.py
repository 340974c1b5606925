"""Rollouts are drawn by plain `generate` and by lade from the same random state."""

import torch

import lade
from benchmarks.rollouts import Both, reward, summary
from tests.lade.tiny import tiny_model


def test_both_draw_the_same_samples_while_weights_change() -> None:
    model = tiny_model(dtype=torch.float32).train()
    model.generate = both = Both(model, lade.NGramPool())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prompts = torch.tensor([[5, 6, 7, 5, 6, 7, 5]]).repeat(3, 1)
    options = {"attention_mask": torch.ones_like(prompts), "do_sample": True, "pad_token_id": 0}
    torch.manual_seed(0)
    texts = []
    for _ in range(3):
        tokens = model.generate(input_ids=prompts, max_new_tokens=12, **options)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        texts.append(tokens.tolist())
    assert [each.is_same for each in both.rollouts] == [True] * 3
    assert texts[0] != texts[1]
    found = summary(both.rollouts)
    assert found["num_new_tokens"] == sum(each.num_new_tokens for each in both.rollouts)
    assert found["num_steps"] > 0 < found["cpu_speedup"]


def test_the_reward_is_of_the_format() -> None:
    texts = ["There are 7.", "It is 7", "Seven. Or so."]
    assert reward([[{"content": each}] for each in texts]) == [1.0, 0.5, 0.0]
