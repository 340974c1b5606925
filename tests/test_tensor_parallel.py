"""A model cut into pieces, one per process: all ranks must run the same forwards.

Each rank has a pool and a clock of its own. Did they draft differently, the ranks would meet in
collectives of different sizes, and fail, hang, or add up what does not belong together. A rank is
this file, run by `python -m torch.distributed.run`; it writes what came out to `FOLDER/RANK.json`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

import lade
from tests.lade.tiny import tiny_model

NUM_RANKS = 2
PROMPTS = {
    "one row": torch.tensor([[5, 6, 7, 5, 6, 7, 5]]),
    "three rows": torch.tensor(
        [[0, 0, 5, 6, 7, 5, 6], [5, 6, 7, 5, 6, 7, 5], [0, 9, 9, 9, 9, 9, 9]]
    ),
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
}
CASES = [f"{rows}, {mode}" for rows in PROMPTS for mode in MODES]

pytestmark = [
    pytest.mark.exhaustive,  # processes that import torch
    pytest.mark.skipif(
        sys.platform != "linux" or not distributed.is_available(),
        reason="transformers cuts a model on CPUs with gloo, on Linux",
    ),
    pytest.mark.xdist_group("tensor parallel"),  # the ranks run once
]


def options_of(prompt: Tensor, mode: str) -> dict[str, Any]:
    options = {"max_new_tokens": 24, "pad_token_id": 0, "eos_token_id": None}
    return {"attention_mask": (prompt != 0).long(), **options, **MODES[mode]}


def plain(model: Any, prompt: Tensor, mode: str) -> Tensor:
    torch.manual_seed(0)
    answer: Tensor = model.generate(prompt, **options_of(prompt, mode))
    return answer


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The outcomes of each rank, by case."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    # transformers 5.15 cuts the output embedding into equal pieces only: an even vocabulary.
    tiny_model("llama", vocab_size=98).save_pretrained(folder / "model")
    launcher = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(NUM_RANKS), "-m", "tests.test_tensor_parallel"),
            str(folder),
        ],
        cwd=Path(__file__).parents[1],
        # No GPU: there may be fewer than ranks.
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that its workers can be ended with it
    )
    try:
        output, _ = launcher.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        output, _ = launcher.communicate()
        pytest.fail(f"the ranks were not done in time\n{output}")
    assert launcher.returncode == 0, output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_do_the_same_and_give_the_answer_of_the_whole_model(
    case: str, ranks: list[dict[str, Any]]
) -> None:
    rows, mode = case.split(", ")
    whole = plain(tiny_model("llama", vocab_size=98), PROMPTS[rows], mode).tolist()
    for pools in ("one text", "own texts", "measured"):
        first, *others = (rank[f"{case}, {pools}"] for rank in ranks)
        assert others == [first]
        assert first["lade"] == first["plain"] == whole
        assert first["has_same_random_state"]
        if pools != "measured":  # there, whether a draft pays is up to the clock
            assert first["num_accepted_tokens"] > 10
    assert ranks[1][f"{rows}, rejection"] == ranks[0][f"{rows}, rejection"]


# --- a rank -----------------------------------------------------------------------------------


def _pool_of(answers: Tensor) -> lade.NGramPool:
    pool = lade.NGramPool()
    for answer in answers.tolist():
        sequence = pool.open_sequence()
        pool.observe(answer, sequence)
        pool.close_sequence(sequence)
    return pool


def _compared(
    model: Any, prompt: Tensor, mode: str, pool: lade.NGramPool, pause_sec: float, **config: Any
) -> dict[str, Any]:
    """Run both with one seed; pause after each of lade's steps."""
    expected, state = plain(model, prompt, mode), torch.get_rng_state()
    torch.manual_seed(0)
    got = lade.generate(
        *(model, prompt),
        pool=pool,
        config=lade.Config(**config),
        on_step=lambda step: time.sleep(pause_sec),
        return_dict_in_generate=True,
        **options_of(prompt, mode),
    )
    return {
        "plain": expected.tolist(),
        "lade": got.sequences.tolist(),
        "has_same_random_state": torch.equal(torch.get_rng_state(), state),
        "num_accepted_tokens": got.stats.num_accepted_tokens,
        "num_steps": got.stats.num_steps,
    }


def _run(folder: Path) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    torch.set_num_threads(1)
    # Ranks that run forwards of different sizes, or one of them fewer, fail after this time.
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, cut = distributed.get_rank(), DistributedConfig(tp_size=distributed.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float64, distributed_config=cut
    )
    found = {}
    for case in CASES:
        rows, mode = case.split(", ")
        prompt = PROMPTS[rows]
        answers = plain(model, prompt, mode)
        # The other ranks would draft something else, or after other times another size of drafts.
        right, own = _pool_of(answers), _pool_of(answers if rank == 0 else answers.flip(-1))
        eight: dict[str, Any] = {"max_draft_tokens": 8}
        found[f"{case}, one text"] = _compared(model, prompt, mode, right, 0, **eight)
        found[f"{case}, own texts"] = _compared(model, prompt, mode, own, 0, **eight)
        found[f"{case}, measured"] = _compared(model, prompt, mode, own, 0.002 * rank)
        if mode == "sampled":
            eight |= {"acceptance": "rejection"}
            found[f"{rows}, rejection"] = _compared(model, prompt, mode, own, 0, **eight)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    _run(Path(sys.argv[1]))
