"""Draft from the files of a repository: what is written there takes fewer forward passes."""

import tempfile
from pathlib import Path
from typing import Any

import lade
from lade.models import LoadedModel, encode, load

DOCS = Path(__file__).parents[1] / "docs"
QUESTION = "List five planets, one a line, with a fact about each."


def answer(loaded: LoadedModel, pools: list[lade.NGramPool]) -> str:
    inputs: dict[str, Any] = encode(loaded.tokenizer, QUESTION, loaded.model.device)
    inputs |= {"do_sample": False, "max_new_tokens": 96, "return_dict_in_generate": True}
    output = lade.generate(loaded.model, **inputs, pool=pools)
    print(f"-> {output.stats.mean_accepted_tokens:.2f} tokens per forward")
    new = output.sequences[0, inputs["input_ids"].shape[1] :]
    return str(loaded.tokenizer.decode(new, skip_special_tokens=True))


def main() -> None:
    loaded = load()  # the embedded default model; or pass a Hub id or a folder
    with tempfile.TemporaryDirectory() as folder:
        page, file = Path(folder) / "planets.md", Path(folder) / "docs.pool"
        page.write_text(answer(loaded, [lade.NGramPool()]))
        pool = lade.NGramPool()
        for path in [*sorted(DOCS.rglob("*.md")), page]:
            token_ids = loaded.tokenizer.encode(path.read_text(), add_special_tokens=False)
            pool.observe(token_ids, None)
        lade.save_pool(pool, file, tokenizer=loaded.tokenizer)  # as lade pool build does
        docs = lade.load_pool(file, tokenizer=loaded.tokenizer, read_only=True)
        print(answer(loaded, [lade.NGramPool(), docs]))


if __name__ == "__main__":
    main()
