"""Peak memory of processes."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks import memory
from benchmarks.memory import Peak, Work, measure_in_process
from lade.bench.settings import BenchSettings
from lade.errors import LadeError
from tests.lade.tiny import byte_tokenizer, tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    """What a process is asked to do, with a saved tiny model."""
    path = tmp_path_factory.mktemp("tiny")
    byte_tokenizer().save_pretrained(path)
    tiny_model("llama", dtype=torch.float32, vocab_size=256).save_pretrained(path)
    settings = BenchSettings(8, temperature=0.5, batch_size=2)
    texts = ["abcabc", "x", "hello"]
    return Work("plain", str(path), "cpu", "float32", 1, texts, settings)


def test_the_summary_takes_medians_and_holds_them_against_plain() -> None:
    pairs = {"plain": [(1000, 100), (1200, 200), (900, 10)], "lade": [(1500, 500)] * 3}
    peaks = [Peak(name, *pair, 3000, False, 100, 1) for name in pairs for pair in pairs[name]]
    summary = memory.summarise(peaks, "lade")
    assert summary["peak_bytes"] == 1500
    assert summary["peak_ratio"] == 1.5  # of 1500 and 1000
    assert memory.summarise(peaks, "plain")["growth_bytes"] == 100
    assert memory.summarise(peaks[3:], "lade")["peak_ratio"] is None


@pytest.mark.exhaustive
def test_a_process_that_measures_plain_holds_nothing_of_lade(work: Work) -> None:
    program = (
        "import runpy, sys\nrunpy.run_module('benchmarks.memory', run_name='__main__')\n"
        "print([n for n in ('numba', 'llvmlite', 'ngram_pool') if n in sys.modules])"
    )
    given = json.dumps(asdict(work))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=given, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    told, imported = done.stdout.splitlines()[-2:]
    peak = Peak(**json.loads(told))
    assert 10**8 < peak.peak_bytes <= peak.life_peak_bytes
    assert 0 <= peak.growth_bytes < peak.peak_bytes
    assert 3 <= peak.num_tokens <= 24
    assert peak.threads == 1
    assert imported == "[]"


@pytest.mark.exhaustive
def test_a_process_that_fails_says_why(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LadeError, match=r"measuring plain failed: .*no such folder"):
        measure_in_process(replace(work, model="/does/not/exist"))
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(LadeError, match="measuring plain failed: it ended with status 1"):
        measure_in_process(work)
