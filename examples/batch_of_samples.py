"""Answer a batch of prompts, two samples each: the text of one sample is drafted for the others."""

import torch

import lade
from lade.models import load

PROMPTS = ["Name three animals that live in the sea.", "Count from one to ten in words."]


def main() -> None:
    model, tokenizer, _ = load(dtype="float32")
    tokenizer.padding_side = "left"  # as for `generate` with any causal LM
    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": prompt}] for prompt in PROMPTS],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    ).to(model.device)
    torch.manual_seed(0)
    answers = lade.generate(
        model,
        **inputs,
        do_sample=True,
        temperature=0.5,
        num_return_sequences=2,
        max_new_tokens=32,
    )
    for row, answer in enumerate(answers[:, inputs["input_ids"].shape[1] :]):
        print(f"-> {PROMPTS[row // 2]}")
        print(tokenizer.decode(answer, skip_special_tokens=True))


if __name__ == "__main__":
    main()
