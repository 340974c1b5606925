"""Sample by rejection: the distribution of plain sampling, with other tokens for the same seed."""

import torch

import lade
from lade.models import encode, load

PROMPT = "List the months of the year and the seasons they belong to."


def main() -> None:
    model, tokenizer, _ = load()
    inputs = encode(tokenizer, PROMPT, model.device)
    for acceptance in ("exact", "rejection"):
        pool = lade.NGramPool()
        for seed in range(2):  # the first answer fills the pool
            torch.manual_seed(seed)
            output = lade.generate(
                model,
                **inputs,
                pool=pool,
                config=lade.Config(acceptance=acceptance),
                do_sample=True,
                temperature=0.8,
                max_new_tokens=32,
                return_dict_in_generate=True,
            )
        answer = output.sequences[0, inputs["input_ids"].shape[1] :]
        print(tokenizer.decode(answer, skip_special_tokens=True))
        print(f"-> {acceptance}: {output.stats.mean_accepted_tokens:.2f} tokens per forward\n")


if __name__ == "__main__":
    main()
