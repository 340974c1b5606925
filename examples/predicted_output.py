"""Edit a file with what it is now as the prediction: lines that stay as they are come at once."""

import lade
from lade.models import encode, load

FILE = '''\
def area(width, height):
    """Return the area of a rectangle."""
    return width * height


def perimeter(width, height):
    """Return the perimeter of a rectangle."""
    return 2 * (width + height)
'''
REQUEST = f"Repeat this code without changes, and nothing else:\n\n{FILE}"


def main() -> None:
    model, tokenizer, _ = load()
    inputs = encode(tokenizer, REQUEST, model.device)
    for prediction in (None, FILE):
        output = lade.generate(
            model,
            **inputs,
            prediction=prediction,
            tokenizer=tokenizer,  # of the prediction
            max_new_tokens=100,
            do_sample=False,
            return_dict_in_generate=True,
        )
        print(f"{output.stats.num_tokens} tokens in {output.stats.num_steps} steps")
    answer = output.sequences[0, inputs["input_ids"].shape[1] :]
    print(tokenizer.decode(answer, skip_special_tokens=True))


if __name__ == "__main__":
    main()
