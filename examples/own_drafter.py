"""A drafter of one's own, merged with the pool of the call."""

from collections.abc import Sequence

import numpy as np

import lade
from lade.drafters import CallPool, Merged
from lade.models import encode, load


class Phrases(lade.Drafter):  # known ones, as soon as the text ends with their first two tokens
    def __init__(self, phrases: Sequence[Sequence[int]]) -> None:
        self.endings = {tuple(each[:2]): each[2:] for each in phrases}

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> lade.Draft:
        rest = np.array(self.endings.get(tuple(committed[-2:]), [])[:max_draft_tokens], np.int32)
        places = np.arange(len(rest), dtype=np.int32)  # a chain: each node under the one before
        return lade.Draft(rest, places - 1, places + 1, np.cumprod(np.full(len(rest), 0.9)))


def main() -> None:
    model, tokenizer, _ = load()
    inputs = encode(tokenizer, "What is the capital of France?", model.device)
    drafter = Phrases([tokenizer("The capital of France is Paris.")["input_ids"]])
    inputs |= {"drafter": Merged([CallPool(), drafter]), "max_new_tokens": 20}
    output = lade.generate(model, **inputs, return_dict_in_generate=True)
    print(*output.stats.sources.items(), sep="\n")


main()
