"""Stop at a string, or by a rule of your own: both are checked after every single token."""

from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import lade
from lade.models import encode, load


class EnoughLines(StoppingCriteria):  # type: ignore[misc]
    """Criterion that stops a row once its answer has a number of lines."""

    def __init__(self, tokenizer: Any, prompt_length: int, num_lines: int) -> None:
        self.tokenizer, self.start, self.num_lines = tokenizer, prompt_length, num_lines

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        texts = self.tokenizer.batch_decode(input_ids[:, self.start :])
        enough = [text.count("\n") >= self.num_lines for text in texts]
        return torch.tensor(enough, device=input_ids.device)


def main() -> None:
    model, tokenizer, _ = load(dtype="float32")
    inputs = encode(tokenizer, "Name ten animals, one a line.", model.device)
    length = inputs["input_ids"].shape[1]
    by_rule = StoppingCriteriaList([EnoughLines(tokenizer, length, 3)])
    for stop in (
        {"stop_strings": ["Monkeys"], "tokenizer": tokenizer},
        {"stopping_criteria": by_rule},
    ):
        output = lade.generate(model, **inputs, **stop, do_sample=False, max_new_tokens=80)
        print(repr(tokenizer.decode(output[0, length:])))


if __name__ == "__main__":
    main()
