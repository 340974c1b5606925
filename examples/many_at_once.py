"""Answer several people at once, each with options of their own, one of them as it comes."""

from typing import Any

import lade
from lade.models import encode, load

QUESTIONS = ["What is a prime number?", "Name three birds.", "How do I boil an egg?"]


def main() -> None:
    model, tokenizer, _ = load(dtype="float32")
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "max_new_tokens": 48}
    with lade.Batcher(model, max_batch_size=8) as batcher:
        requests = [
            batcher.submit(**encode(tokenizer, question), **options, seed=number)
            for number, question in enumerate(QUESTIONS)
        ]
        for token_id in requests[0]:  # as they come, while the others go on
            print(tokenizer.decode([token_id]), end="", flush=True)
        print()
        for request in requests[1:]:
            print(tokenizer.decode(request.result()[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
