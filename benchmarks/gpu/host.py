"""How long the host keeps the device waiting between two forwards, with a model that costs nothing.

Everything that lade does in a step is done: a pool drafts, steps have fixed shapes, the chosen
tokens come back, pool and budget learn. Only the forward is replaced by a look-up in a table. Next
file: `used.py`.
"""

from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import MaxLengthCriteria, StoppingCriteriaList

from benchmarks.gpu.shapes import SHAPES, make_model
from benchmarks.gpu.stage import Stage
from lade.batch import Batch, Limits, Text
from lade.budget.budget import Budget
from lade.compat import Model
from lade.decoder import Decoder
from lade.drafting.pool_drafter import PoolDrafter
from lade.drafting.speculator import Done, Speculator
from lade.gpu.fixed import FixedTarget, StepSettings
from lade.gpu.workspace import WorkspaceStore
from lade.hf.stopping import StopRule
from lade.outputs import Outputs
from lade.probing.proof import Proof
from lade.sampling.greedy import GreedyChoice
from lade.targets.layout import tree_layout
from ngram_pool import NGramPool

_NUM_NODES = (8, 16, 32, 64)
_VOCAB_SIZE = 2048
_SHARES = (0.55, 0.2, 0.15, 0.1)  # probabilities of the tokens that may follow each token
_NUM_HELD = 60_000  # tokens in the pool
_NUM_PROMPT = 500
_NUM_NEW = 600
_NUM_REPEATS = 5  # the first compiles and is not counted


def measure_host(device: torch.device, stage: Stage) -> None:
    """Time the host between two forwards, by tree size; medians over repeats."""
    config = {**SHAPES["tiny"].config, "vocab_size": _VOCAB_SIZE}
    config["max_position_embeddings"] = 131_072
    model = make_model(replace(SHAPES["tiny"], config=config), device).model
    language = _Language(device)
    for num_nodes in _NUM_NODES:
        if stage.may_begin(f"{num_nodes} nodes"):
            held = language.text(_NUM_HELD, seed=0)
            pool = NGramPool(seed=0)
            pool.observe(held)
            runs = [
                _run(model, language, pool, held[start : start + _NUM_PROMPT], num_nodes)
                for start in range(0, _NUM_REPEATS * _NUM_PROMPT, _NUM_PROMPT)
            ][1:]
            stage.add(
                {
                    "num_nodes": num_nodes,
                    "num_repeats": len(runs),
                    "draft_tokens_per_step": median(run.draft_tokens_per_step for run in runs),
                    "mean_accepted_tokens": median(run.mat for run in runs),
                    "waited_for_sec": median(run.waited_for_sec for run in runs),
                    "deferred_sec": median(run.deferred_sec for run in runs),
                }
            )


class _Language:
    """A table of the next token by token and position; partly predictable."""

    def __init__(self, device: torch.device) -> None:
        rng = np.random.default_rng(0)
        tables = [rng.permutation(_VOCAB_SIZE) for _ in _SHARES]
        self._successors: NDArray[np.int64] = np.stack(tables)
        self._which: NDArray[np.int64] = rng.choice(len(_SHARES), 9973, p=_SHARES)
        self._on_device = torch.from_numpy(self._successors).to(device)
        self._which_on_device = torch.from_numpy(self._which).to(device)

    def text(self, num_tokens: int, seed: int) -> list[int]:
        """Return a random text."""
        rng = np.random.default_rng(seed)
        token_ids = [int(rng.integers(_VOCAB_SIZE))]
        for which in rng.choice(len(_SHARES), num_tokens - 1, p=_SHARES).tolist():
            token_ids.append(int(self._successors[which, token_ids[-1]]))
        return token_ids

    def __call__(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> "_Answer":
        """Look up the next tokens, in place of a model's forward."""
        which = self._which_on_device[(position_ids * 7919 + input_ids) % len(self._which)]
        logits = torch.zeros((*input_ids.shape, _VOCAB_SIZE), device=input_ids.device)
        return _Answer(logits.scatter_(2, self._on_device[which, input_ids][..., None], 5.0))


class _Answer(NamedTuple):
    logits: Tensor


class _Run(NamedTuple):
    draft_tokens_per_step: float
    mat: float
    waited_for_sec: float  # per step, before the next forward is launched
    deferred_sec: float  # per step, while the device runs that forward


class _TimedSpeculator(Speculator):
    """Speculator that times what it does while the next forward is on its way."""

    deferred_sec = 0.0

    def learn(self, done: Done) -> None:
        start = perf_counter()
        super().learn(done)
        self.deferred_sec += perf_counter() - start


@torch.no_grad()
def _run(
    model: Model, language: _Language, pool: NGramPool, prompt: list[int], num_nodes: int
) -> _Run:
    """Decode as lade does, with a table in place of the model's forward."""
    input_ids = torch.tensor([prompt], device=model.device)
    target = FixedTarget(
        *(model, input_ids, {"use_cache": True}, tree_layout(model), _NUM_NEW),
        settings=StepSettings(WorkspaceStore(), call=language),
    )
    text, outputs = Text(input_ids, None), Outputs([])
    max_length = len(prompt) + _NUM_NEW
    stop = StopRule(StoppingCriteriaList([MaxLengthCriteria(max_length)]))
    stop.watch(text, outputs)
    drafter = PoolDrafter(pool)
    batch = Batch(text, [[*prompt]], Limits(max_length=max_length, stop=stop))
    speculator = _TimedSpeculator.alone(batch, drafter, Budget(fixed=num_nodes - 1), target)
    choice = GreedyChoice(drafter.num_successors)
    proof = Proof(model, target, text, None)
    decoder = Decoder(
        batch, target, speculator, choice, lambda steps: None, outputs, proof, overlaps=True
    )
    stats = decoder.run()
    waited_for = stats.draft_sec + stats.verify_sec + stats.commit_sec
    return _Run(
        stats.draft_tokens_per_step,
        stats.mean_accepted_tokens,
        waited_for / stats.num_steps,
        speculator.deferred_sec / stats.num_steps,
    )
