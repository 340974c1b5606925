"""Whether a method says what the engine says without it: token for token, and when it draws.

Next file: `report.py`.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.engines.job import PhaseResult

#: Questions with few likely answers, so that the same few tokens are drawn often.
QUESTIONS = (
    "Answer with one word, yes or no: is the sea salty?",
    "Say one of these three words and nothing else: red, green, blue.",
    "Name one day of the week, and nothing else.",
    "Repeat these words: one two three four. Then add one more number in words.",
)
NUM_DRAWS = 200  # of each question
NUM_DRAWN_TOKENS = 6

# Two equal distributions fail a comparison of four questions once in 25,000 runs.
FALSE_ALARM = 1e-5
_MIN_EXPECTED = 10.0  # of a cell in each of both; the approximation by chi-square needs it


class Drawn(NamedTuple):
    """Answers drawn with a method, compared with those of plain decoding."""

    p_value: float  # the smallest of all questions
    num_cells: int  # answers told apart, of all questions
    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def is_same(self) -> bool:
        """Whether they may come of the same distribution."""
        return self.p_value >= FALSE_ALARM

    @property
    def tells(self) -> bool:
        """Whether there was anything to tell: drafts that were accepted, and such that were not."""
        return 0 < self.num_accepted_tokens < self.num_draft_tokens


def compare_drawn(found: PhaseResult, expected: PhaseResult) -> Drawn:
    """Compare answers to `QUESTIONS`, `NUM_DRAWS` to each in turn."""
    p_values, num_cells = [], 0
    for number in range(0, len(expected.answers), NUM_DRAWS):
        pair = [
            [tuple(answer.token_ids) for answer in result.answers[number : number + NUM_DRAWS]]
            for result in (found, expected)
        ]
        p_value, cells = same_distribution(*pair)
        p_values.append(p_value)
        num_cells += cells
    counters = found.counters
    return Drawn(min(p_values), num_cells, counters.num_draft_tokens, counters.num_accepted_tokens)


def same_distribution(
    ones: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]]
) -> tuple[float, int]:
    """Return the chance that two samples of one distribution differ so much, and the cells.

    Source: the chi-square test of homogeneity. Texts that are rare in both are cells by their
    beginning, as long as that is not rare itself.
    """
    import torch

    cells = _cells(Counter(ones), Counter(others), len(ones) + len(others))
    if len(cells) < 2:
        return 1.0, len(cells)
    share = len(ones) / (len(ones) + len(others))
    distance = sum(
        (one - share * (one + other)) ** 2 / (share * (1 - share) * (one + other))
        for one, other in cells
    )
    half = torch.tensor([(len(cells) - 1) / 2, distance / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1])), len(cells)


def _cells(
    ones: Counter[tuple[int, ...]], others: Counter[tuple[int, ...]], num: int
) -> list[tuple[int, int]]:
    """Return how often each cell was drawn in both samples.

    From the longest texts on, what is too rare is counted with its siblings, as the text without
    its last token.
    """
    small = min(sum(ones.values()), sum(others.values()))
    cells: list[tuple[int, int]] = []
    rest = [ones.copy(), others.copy()]
    for length in range(max(map(len, (*ones, *others))), -1, -1):
        for text in sorted({text for sample in rest for text in sample if len(text) == length}):
            pair = rest[0].pop(text, 0), rest[1].pop(text, 0)
            if sum(pair) * small / num >= _MIN_EXPECTED or length == 0:
                cells.append(pair)
            else:
                for sample, number in zip(rest, pair, strict=True):
                    sample[text[:-1]] += number
    return [pair for pair in cells if sum(pair)]
