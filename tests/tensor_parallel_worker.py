"""One rank of `test_tensor_parallel.py`: plain `generate` and lade on a model cut in two.

Run by `python -m torch.distributed.run`; writes what came out to `<folder>/<rank>.json`.
"""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import lade
from lade import NGramPool

ONE = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
THREE = torch.tensor([[0, 0, 5, 6, 7, 5, 6], [5, 6, 7, 5, 6, 7, 5], [0, 9, 9, 9, 9, 9, 9]])
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
}


def plain(model: Any, prompt: Tensor, mode: str, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    answer: Tensor = model.generate(prompt, **_options(prompt), **MODES[mode])
    return answer


def _options(prompt: Tensor) -> dict[str, Any]:
    return {
        "attention_mask": (prompt != 0).long(),
        "max_new_tokens": 24,
        "pad_token_id": 0,
        "eos_token_id": None,
    }


def pool_of(answers: Tensor) -> NGramPool:
    """Return a pool that has seen these token ids."""
    pool = NGramPool()
    for answer in answers.tolist():
        sequence = pool.open_sequence()
        pool.observe(answer, sequence)
        pool.close_sequence(sequence)
    return pool


def compare(
    model: Any,
    prompt: Tensor,
    mode: str,
    pool: NGramPool,
    config: lade.Config | None,
    pause_sec: float = 0.0,
) -> dict[str, Any]:
    """Run both with one seed; pause after each of lade's steps."""
    expected = plain(model, prompt, mode)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    got = lade.generate(
        model,
        prompt,
        pool=pool,
        config=config,
        on_step=lambda step: time.sleep(pause_sec),
        return_dict_in_generate=True,
        **_options(prompt),
        **MODES[mode],
    )
    return {
        "plain": expected.tolist(),
        "lade": got.sequences.tolist(),
        "has_same_random_state": torch.equal(torch.get_rng_state(), state),
        "num_accepted_tokens": got.stats.num_accepted_tokens,
        "num_steps": got.stats.num_steps,
    }


def run(folder: Path) -> dict[str, Any]:
    """Return each case's outcome on this rank."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float64, distributed_config=DistributedConfig(tp_size=size)
    )
    eight = lade.Config(max_draft_tokens=8)
    rejection = lade.Config(max_draft_tokens=8, acceptance="rejection")
    outcomes: dict[str, Any] = {}
    for rows, prompt in (("one row", ONE), ("three rows", THREE)):
        for mode in MODES:
            answers = plain(model, prompt, mode)
            right, wrong = pool_of(answers), pool_of(answers.flip(-1))
            own = right if rank == 0 else wrong  # the other ranks would draft something else
            case = f"{rows}, {mode}"
            outcomes |= {
                f"{case}, one text": compare(model, prompt, mode, right, eight),
                f"{case}, own texts": compare(model, prompt, mode, own, eight),
                # Ranks that measure other times, and with them another size of drafts.
                f"{case}, measured": compare(
                    model, prompt, mode, own, None, pause_sec=0.002 * rank
                ),
            }
        own = pool_of(answers if rank == 0 else answers.flip(-1))
        outcomes[f"{rows}, rejection"] = compare(model, prompt, "sampled", own, rejection)
    return outcomes


def main() -> None:
    torch.set_num_threads(1)
    # Ranks that run forwards of different sizes, or one of them fewer, fail after this time.
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    folder = Path(sys.argv[1])
    outcomes = run(folder)
    (folder / f"{distributed.get_rank()}.json").write_text(json.dumps(outcomes))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
