"""Generate through the folder `custom_generate/` beside this file, which may also be on the Hub."""

from pathlib import Path

from transformers import TextStreamer

from lade.models import encode, load

FOLDER = Path(__file__).parent / "custom_generate"


def main() -> None:
    model, tokenizer, _ = load()
    inputs = encode(tokenizer, "Why do cats purr?", model.device)
    model.generate(
        **inputs,
        custom_generate=str(FOLDER),  # or the id of a repository on the Hub
        trust_remote_code=True,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        do_sample=False,
        max_new_tokens=48,
    )


if __name__ == "__main__":
    main()
