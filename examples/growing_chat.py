"""A chat that grows: each turn runs what is new, since lade keeps the keys and values before it."""

import lade
from lade.models import load

QUESTIONS = ["What is the capital of France?", "And that of Italy?", "Which one is older?"]


def main() -> None:
    model, tokenizer, _ = load()
    pool = lade.NGramPool()
    config = lade.Config(reuses_prefix=True)
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(model.device)
        output = lade.generate(
            model,
            **inputs,
            pool=pool,
            config=config,
            do_sample=False,
            max_new_tokens=32,
            return_dict_in_generate=True,
        )
        num_tokens = inputs["input_ids"].shape[1]
        text = tokenizer.decode(output.sequences[0, num_tokens:], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": text})
        num_run = num_tokens - output.stats.num_reused_tokens
        print(f"{text}\n-> ran {num_run} of {num_tokens} tokens of the prompt")


if __name__ == "__main__":
    main()
