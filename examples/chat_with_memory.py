"""Answer several questions with one pool, and see how what was said speeds up what comes next."""

import lade
from lade.models import encode, load

QUESTIONS = [
    "List five planets, one a line, with a fact about each.",
    "List five planets, one a line, with a fact about each, and number the lines.",
]


def main() -> None:
    model, tokenizer, _ = load()  # the embedded default model; or a hub id, or a folder
    pool = lade.NGramPool()
    for question in QUESTIONS:
        inputs = encode(tokenizer, question, model.device)
        output = lade.generate(
            model,
            **inputs,
            pool=pool,
            do_sample=False,
            max_new_tokens=96,
            return_dict_in_generate=True,
        )
        answer = output.sequences[0, inputs["input_ids"].shape[1] :]
        print(tokenizer.decode(answer, skip_special_tokens=True))
        print(f"-> {output.stats.mean_accepted_tokens:.2f} tokens per forward\n")


if __name__ == "__main__":
    main()
