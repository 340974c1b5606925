"""A chat whose prompt grows: what each turn costs, and how much is recorded again.

Every turn gets the whole conversation as its prompt, as chat front ends send it. Memory and
recordings are to be kept from turn to turn; that is counted here. Next file: `job.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.answers import counts_of, replaying_lade
from benchmarks.gpu.shapes import KnownModel, Shape, random_prompt
from benchmarks.gpu.stage import Stage
from lade.gpu.policy import DevicePolicy

NUM_TURNS = 10


def measure_chat(
    known: KnownModel,
    shape: Shape,
    counts: Sequence[int],
    num_nodes: int,
    stage: Stage,
    policy: DevicePolicy | None = None,
) -> None:
    """Answer turn after turn, drafts replayed; the budget decides how much is verified."""
    first, later, num_new = shape.chat
    lade = replaying_lade(known, counts, num_nodes, "graphs", policy, verifies_all=False)
    prompt = random_prompt(shape, first, seed=0)
    for turn in range(1, NUM_TURNS + 1):
        if not stage.may_begin(f"turn {turn}"):
            break
        tally = lade.tally
        before = tally.num_recorded, tally.num_replayed, tally.recording_sec
        answer = lade(known.model, _inputs(prompt, known.model.device), _options(num_new))
        assert lade.used is not None
        assert answer.stats is not None
        text = answer.rows[0]
        stage.add(
            {
                "turn": turn,
                "prompt_length": prompt.shape[1],
                "num_tokens": len(text),
                "sec": answer.sec,
                "tokens_per_sec": len(text) / answer.sec,
                "prefill_sec": answer.stats.prefill_sec,
                "num_recorded": tally.num_recorded - before[0],
                "num_replayed": tally.num_replayed - before[1],
                "num_lost": tally.num_recorded - lade.used.num_kept,  # of all so far
                "recording_sec": tally.recording_sec - before[2],
                "is_known_text": text == known.answer(int(prompt[0, -1]), num_new),
                **counts_of([answer.stats]),
                **lade.used._asdict(),
            }
        )
        question = random_prompt(shape, later, seed=turn)
        prompt = torch.cat([prompt, torch.tensor([text]), question], dim=1)


def _inputs(prompt: Tensor, device: torch.device) -> dict[str, Any]:
    prompt = prompt.to(device)
    return {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}


def _options(max_new_tokens: int) -> dict[str, Any]:
    return {"do_sample": False, "max_new_tokens": max_new_tokens}
