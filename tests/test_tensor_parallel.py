"""A model cut into pieces, one per process: all ranks must run the same forwards.

Each rank has a pool and a clock of its own. Did they draft differently, the ranks would meet in
collectives of different sizes, and fail, hang, or add up what does not belong together.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lade.tiny import tiny_model
from tests.tensor_parallel_worker import MODES, ONE, THREE, plain

ROOT = Path(__file__).parents[1]
NUM_RANKS = 2

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        sys.platform != "linux" or not torch.distributed.is_available(),
        reason="transformers cuts a model on CPUs with gloo, on Linux",
    ),
    pytest.mark.xdist_group("tensor parallel"),  # the ranks run once
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The outcomes of each rank, by case."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    # transformers 5.15 cuts the output embedding into equal pieces only: an even vocabulary.
    model = tiny_model("llama", vocab_size=98)
    model.save_pretrained(folder / "model")
    _launch(folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def _launch(folder: Path, timeout_sec: float = 300) -> None:
    launcher = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(NUM_RANKS), "-m", "tests.tensor_parallel_worker"),
            str(folder),
        ],
        cwd=ROOT,
        # No GPU: there may be fewer than ranks.
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that its workers can be ended with it
    )
    try:
        output, _ = launcher.communicate(timeout=timeout_sec)
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        output, _ = launcher.communicate()
        pytest.fail(f"the ranks were not done after {timeout_sec} s\n{output}")
    assert launcher.returncode == 0, output


CASES = [
    f"{rows}, {mode}, {pools}"
    for rows in ("one row", "three rows")
    for mode in MODES
    for pools in ("one text", "own texts", "measured")
]


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_give_the_plain_answer(case: str, ranks: list[dict[str, Any]]) -> None:
    for outcome in (rank[case] for rank in ranks):
        assert outcome["lade"] == outcome["plain"]
        assert outcome["has_same_random_state"]
    if not case.endswith("measured"):  # there, whether a draft pays is up to the clock
        assert ranks[0][case]["num_accepted_tokens"] > 10


@pytest.mark.parametrize("case", [*CASES, "one row, rejection", "three rows, rejection"])
def test_all_ranks_do_the_same(case: str, ranks: list[dict[str, Any]]) -> None:
    for outcome in (rank[case] for rank in ranks[1:]):
        assert outcome == ranks[0][case]


@pytest.mark.parametrize("mode", MODES)
def test_a_model_cut_in_two_answers_as_the_whole_one(
    mode: str, ranks: list[dict[str, Any]]
) -> None:
    """Plain `generate` on one process: the pieces do add up."""
    model = tiny_model("llama", vocab_size=98)
    for rows, prompt in (("one row", ONE), ("three rows", THREE)):
        expected = plain(model, prompt, mode).tolist()
        assert ranks[0][f"{rows}, {mode}, own texts"]["lade"] == expected
