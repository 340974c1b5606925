"""Sample with a seed: the tokens of plain `generate`, in fewer forward passes."""

from typing import Any

import torch

import lade
from lade.models import encode, load

OPTIONS: dict[str, Any] = {"do_sample": True, "top_p": 0.9, "max_new_tokens": 48}


def main() -> None:
    model, tokenizer, _ = load(dtype="float32")
    prompt = "Write a short poem in which every line begins with the words: The sea"
    inputs = encode(tokenizer, prompt, model.device)

    torch.manual_seed(7)
    plain = model.generate(**inputs, **OPTIONS)
    torch.manual_seed(7)
    output = lade.generate(model, **inputs, **OPTIONS, return_dict_in_generate=True)

    answer = output.sequences[0, inputs["input_ids"].shape[1] :]
    print(tokenizer.decode(answer, skip_special_tokens=True))
    print("same tokens:", output.sequences.equal(plain))
    print(f"tokens per forward: {output.stats.mean_accepted_tokens:.2f}")


if __name__ == "__main__":
    main()
