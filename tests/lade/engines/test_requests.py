"""Requests: told by their texts alone."""

from typing import Any

import numpy as np

from lade.engines.requests import Prefixes, Requests


class Rows:
    """Texts as an engine shows them."""

    def __init__(self, num_slots: int = 8) -> None:
        self.requests = Requests(num_slots, 10_000)

    def find(self, *texts: list[int] | None, num_new: int = 1) -> Any:
        """Return the slots of the rows; None is a row to pass over."""
        width = max(len(text or [0]) for text in texts) + 3
        ids = np.full((len(texts), width), 77, np.int32)
        lengths = np.zeros(len(texts), np.int64)
        known = np.zeros(len(texts), np.int64)
        for row, text in enumerate(texts):
            if text is not None:
                ids[row, : len(text)], lengths[row] = text, len(text)
                known[row] = len(text) - num_new
        return self.requests.find(ids, lengths, known)


def test_equal_texts_are_as_many_requests() -> None:
    rows = Rows()
    of_a, of_b = rows.find([1, 2, 3], [1, 2, 3]).slots.tolist()
    assert of_a != of_b
    found = rows.find([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6])
    assert found.slots.tolist()[:2] == [of_a, of_b]
    assert found.new == [2]


def test_the_text_not_seen_for_longest_is_dropped() -> None:
    rows = Rows(num_slots=3)
    a, b, c, d = ([i, i] for i in range(1, 5))
    of_a, of_b, of_c = (rows.find(text).slots.item() for text in (a, b, c))
    assert rows.find([*a, 1]).slots.tolist() == [of_a]
    found = rows.find(d)
    assert (found.dropped, found.slots.tolist()) == ([of_b], [of_b])
    assert rows.find([*c, 1], [*a, 1, 1]).slots.tolist() == [of_c, of_a]
    assert rows.find([*b, 1]).new == [0]


def test_every_token_tells_texts_apart() -> None:
    text = np.random.default_rng(0).integers(0, 9, 9000).tolist()
    rows = Rows()
    (slot,) = rows.find(text).slots.tolist()
    for end in (9001, 9050, 9300):  # what is kept goes on from step to step
        longer = [*text, *range(end - len(text))]
        assert rows.find(longer, num_new=len(longer) - len(text)).slots.tolist() == [slot]
        text = longer
    for place in [0, 4095, 4096, 8000, len(text) - 8, len(text) - 1]:
        other = [*text, 1]
        other[place] += 1
        assert rows.find(None, other).new == [1]
        assert rows.find([*text, 1]).slots.tolist() == [slot]
        rows = Rows()
        (slot,) = rows.find(text).slots.tolist()


def test_a_prefix_is_known_as_far_as_it_was_observed_and_is_not_forgotten() -> None:
    text = np.arange(1000, dtype=np.int32)
    prefixes = Prefixes(max_age=2000)
    assert prefixes.num_held(text, 0) == 0
    prefixes.add(text, 0, 150, 0)
    assert [prefixes.num_held(text[:end], 150) for end in (63, 64, 127, 128, 1000)] == [
        *(0, 64, 64, 128, 128),
    ]
    prefixes.add(text, 150, 300, 150)
    assert prefixes.num_held(text, 300) == 256
    other = text.copy()
    other[70] += 1
    assert prefixes.num_held(other, 300) == 64
    assert prefixes.num_held(text[1:], 300) == 0
    assert prefixes.num_held(text, 2001) == 0  # its first block may be forgotten
    for i in range(100):
        prefixes.add(text + 1000 * i, 0, 1000, 300 + 1000 * i)
    assert len(prefixes._ages) <= 3 * 15  # of 64 tokens that are not forgotten
    assert prefixes.num_held(text + 99_000, 100_300) == 960
