"""Continue a chat from the KV cache of earlier turns; the scores tell how sure the model was."""

import lade
from lade.compat import CACHE  # its name: "past_key_values" up to transformers 5.23
from lade.models import load

QUESTIONS = ["What is the capital of France?", "And that of Italy?"]


def main() -> None:
    model, tokenizer, _ = load()
    messages: list[dict[str, str]] = []
    cache = None
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(model.device)
        output = lade.generate(
            model,
            **(inputs | {CACHE: cache}),
            do_sample=False,
            max_new_tokens=32,
            return_dict_in_generate=True,
            output_scores=True,
        )
        cache = output[CACHE]
        logprobs = model.compute_transition_scores(
            output.sequences, output.scores, normalize_logits=True
        )
        answer = output.sequences[0, inputs["input_ids"].shape[1] :]
        text = tokenizer.decode(answer, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": text})
        least = tokenizer.decode(answer[logprobs[0].argmin()])
        print(f"{text}\n-> least sure of {least!r}: {logprobs.min().exp():.2f}")


if __name__ == "__main__":
    main()
