"""`EnginePlan`: which phases every method's engine runs.

Next file: `mending.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engines.agreement import NUM_DRAWN_TOKENS, NUM_DRAWS
from benchmarks.engines.job import EngineJob, Phase
from benchmarks.engines.methods import METHODS

#: The phase that draws answers.
DRAWS = "draws"


@dataclass(frozen=True)
class EnginePlan:
    """A comparison of methods."""

    model: str  # for vLLM: a hub id or a folder
    dtype: str
    prompts: Sequence[Sequence[int]]  # token ids
    concurrency: Sequence[int]  # numbers of requests at once, each measured by itself
    max_new_tokens: int
    num_passes: int = 2  # over all prompts; drafters live from the first to the last
    num_speculative_tokens: int = 8
    questions: Sequence[Sequence[int]] = ()  # token ids; answers to them are drawn
    options: Mapping[str, Any] = field(default_factory=dict)  # of lade's proposer
    table: str | None = None  # path of a prewarmed model's table

    def phases(self) -> list[Phase]:
        """Return the phases of every engine, in order."""
        phases = [
            Phase(phase_name(size, num), size, self.prompts, self.max_new_tokens, 0.0, num == 1)
            for size in self.concurrency
            for num in range(1, self.num_passes + 1)
        ]
        if self.questions:
            asked = [question for question in self.questions for _ in range(NUM_DRAWS)]
            size = max(self.concurrency)
            phases.append(Phase(DRAWS, size, asked, NUM_DRAWN_TOKENS, 1.0, begins_anew=True))
        return phases

    def job(self, method: str) -> EngineJob:
        """Return what a method's engine is to do."""
        longest = max(len(token_ids) for token_ids in (*self.prompts, *self.questions))
        return EngineJob(
            model=self.model,
            dtype=self.dtype,
            # Where a request is nearer to this limit, vLLM drafts nothing for all of them.
            max_model_len=longest + self.max_new_tokens + self.num_speculative_tokens + 1,
            max_num_seqs=max(self.concurrency),
            speculative_config=METHODS[method].config(self.num_speculative_tokens),
            additional_config=METHODS[method].additional_config(self.options, self.table),
            phases=self.phases(),
        )


def phase_name(concurrency: int, num_pass: int) -> str:
    """Return the name of the phase that a pass is."""
    return f"{concurrency} at once, pass {num_pass}"
