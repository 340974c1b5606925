"""Rollouts of reinforcement learning: TRL's `GRPOTrainer`, whose samples are drawn twice each.

Every call of `generate` that the trainer makes is answered by plain `generate` and by lade, in
alternating order, from the same random state. The samples must be the same, and so rewards and
weights are. All calls share one pool, and the model learns from step to step. The first call of
lade, which checks the model, is counted with the others. TRL is an extra of this benchmark.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import torch

import lade
from lade.bench.environment import environment
from lade.cli.bench import describe_model
from lade.cli.loading import console
from lade.cli.results import ResultFiles
from lade.models.loading import LoadedModel

QUESTIONS = (
    "What is 3 plus 4?",
    "How many days has a week?",
    "How many legs has a spider?",
    "What is 10 minus 6?",
    "How many sides has a square?",
)
_FORMAT = " Answer in one sentence, with the number in digits."
_NUM_GENERATIONS = 4  # samples of a question, which are a step


@dataclass
class Rollout:
    """One call of `generate`, by both."""

    plain_sec: float
    lade_sec: float
    plain_cpu_sec: float
    lade_cpu_sec: float
    num_new_tokens: int  # of the longest row
    num_steps: int  # of lade
    mean_accepted_tokens: float
    is_same: bool


@dataclass
class Both:
    """A `generate` that answers by plain `generate` and by lade; returns what lade gives.

    Args:
        model: of the trainer.
        pool: of lade.
    """

    model: Any
    pool: lade.NGramPool
    rollouts: list[Rollout] = field(default_factory=list)

    def __call__(self, **options: Any) -> torch.Tensor:
        """Generate twice, each time from the same random state."""
        if "custom_generate" in options:  # by lade, which asks the model's own `generate`
            return type(self.model).generate(self.model, **options)  # type: ignore[no-any-return]
        state = torch.get_rng_state()
        options["return_dict_in_generate"] = True
        calls: list[Callable[[], Any]] = [
            lambda: type(self.model).generate(self.model, **options),
            lambda: lade.generate(self.model, pool=self.pool, **options),
        ]
        found: dict[int, tuple[Any, float, float, torch.Tensor]] = {}
        for which in (0, 1) if len(self.rollouts) % 2 else (1, 0):
            torch.set_rng_state(state)
            start, start_cpu = perf_counter(), process_time()
            output = calls[which]()
            times = perf_counter() - start, process_time() - start_cpu
            found[which] = (output, *times, torch.get_rng_state())
        plain, by_lade = found[0], found[1]
        tokens: torch.Tensor = by_lade[0].sequences
        stats = by_lade[0].stats
        is_same = torch.equal(plain[0].sequences, tokens) and torch.equal(plain[3], by_lade[3])
        console.print(f"{plain[1]:.1f} {by_lade[1]:.1f} s, {stats}")
        self.rollouts.append(
            Rollout(
                *(plain[1], by_lade[1], plain[2], by_lade[2]),
                *(tokens.shape[1] - options["input_ids"].shape[1], stats.num_steps),
                *(stats.mean_accepted_tokens, is_same),
            )
        )
        return tokens


def reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """Return 1 for a text with the format asked for, a half for one that has a part of it."""
    texts = [each[0]["content"] for each in completions]
    return [(re.search(r"\d", t) is not None) / 2 + (t.count(".") == 1) / 2 for t in texts]


def run(
    loaded: LoadedModel, num_steps: int, temperature: float, max_new_tokens: int, files: ResultFiles
) -> None:
    """Train for some steps; print and write what rollouts took, by epoch."""
    import trl
    from datasets import Dataset

    prompts = [[{"role": "user", "content": each + _FORMAT}] for each in QUESTIONS]
    with TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=loaded.model,
            reward_funcs=reward,
            args=trl.GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=_NUM_GENERATIONS,
                num_generations=_NUM_GENERATIONS,
                max_completion_length=max_new_tokens,
                max_steps=num_steps,
                temperature=temperature,
                learning_rate=1e-5,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                bf16=False,
                seed=0,
            ),
            train_dataset=Dataset.from_list([{"prompt": each} for each in prompts]),
            processing_class=loaded.tokenizer,
        )
        trainer.model.generate = both = Both(trainer.model, lade.NGramPool())
        trainer.train()
    rewards = [each["reward"] for each in trainer.state.log_history if "reward" in each]
    settings = {
        **describe_model(loaded),
        "trl": trl.__version__,
        "steps": num_steps,
        "samples": _NUM_GENERATIONS,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
    }
    size = len(QUESTIONS)
    epochs = [both.rollouts[start : start + size] for start in range(0, num_steps, size)]
    content = {
        "environment": environment(),
        "settings": settings,
        "num_same": sum(each.is_same for each in both.rollouts),
        "rewards": [round(each, 3) for each in rewards],
        "epochs": [summary(each) for each in epochs],
    }
    console.print(content["epochs"])
    files.show(content)


def summary(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return what the rollouts of an epoch took together, in wall and in processor time."""
    total = {
        name: sum(getattr(each, name) for each in rollouts)
        for name in ("plain_sec", "lade_sec", "plain_cpu_sec", "lade_cpu_sec")
    }
    return {
        **{name: round(each, 2) for name, each in total.items()},
        "speedup": round(total["plain_sec"] / total["lade_sec"], 2),
        "cpu_speedup": round(total["plain_cpu_sec"] / total["lade_cpu_sec"], 2),
        "num_new_tokens": sum(each.num_new_tokens for each in rollouts),
        "num_steps": sum(each.num_steps for each in rollouts),
        "mean_accepted_tokens": round(mean(each.mean_accepted_tokens for each in rollouts), 2),
    }
