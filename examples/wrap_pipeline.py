"""Make a transformers pipeline decode with lade."""

from transformers import pipeline

import lade
from lade.models import load


def main() -> None:
    model, tokenizer, _ = load()
    lade.wrap(model)
    chat = pipeline("text-generation", model=model, tokenizer=tokenizer)
    messages = [{"role": "user", "content": "Name three uses of a paper clip."}]
    print(chat(messages, do_sample=False, max_new_tokens=64)[0]["generated_text"][-1]["content"])


if __name__ == "__main__":
    main()
