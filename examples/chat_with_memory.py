"""Ask a question twice with one pool: the second answer is drafted from the first."""

import lade
from lade.models import encode, load

QUESTION = "List five planets, one a line, with a fact about each."


def main() -> None:
    model, tokenizer, _ = load()  # the embedded default model; or pass a Hub id or a folder
    pool = lade.NGramPool()
    inputs = encode(tokenizer, QUESTION, model.device)
    for _ in range(2):
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
