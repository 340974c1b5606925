"""Train a model with TRL's GRPOTrainer, which samples its rollouts with lade."""

import re

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import lade
from lade.models import load

PROMPTS = ["3 plus 4 is", "The number of days in a week is"]


def reward(completions: list[str], **_: object) -> list[float]:
    return [float(re.search(r"\d", text) is not None) for text in completions]


def main() -> None:
    model, tokenizer, _ = load(dtype="float32")
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir="rollouts",
            per_device_train_batch_size=8,  # which are the samples of a prompt, too
            max_completion_length=24,
            max_steps=4,
            bf16=False,  # in float32, samples are those of `generate`
            report_to=[],
        ),
        train_dataset=Dataset.from_list([{"prompt": each} for each in PROMPTS]),
        processing_class=tokenizer,
    )
    lade.wrap(trainer.model, pool=lade.NGramPool())  # one pool for all rollouts
    trainer.train()


if __name__ == "__main__":
    main()
