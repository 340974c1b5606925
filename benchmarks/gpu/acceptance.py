"""How many draft tokens successive steps accept, as recorded.

Next file: `drafter.py`.
"""

from random import Random

# How many steps accepted 0, 1, 2, … draft tokens: greedy answers of SmolLM2-135M-Instruct in
# bfloat16 to the six prompts of `lade demo`, at most 192 tokens each, none ending in a loop.
# Drafted by one pool without a table, 31 tokens per step; 279 steps, MAT 3.08.
_RECORDED = (125, 58, 28, 16, 11, 10, 9, 3, 3, 2, 3, 1, 2, 2, 1, 2, 1, *[0] * 8, 1, *[0] * 4, 1)
_STEPS = [count for count, num in enumerate(_RECORDED) for _ in range(num)]

#: Tokens that a step adds on average, the bonus token included.
MAT = 1 + sum(_STEPS) / len(_STEPS)


def counts_for(num_new_tokens: int) -> list[int]:
    """Return the counts of an answer's steps.

    They are evenly spaced quantiles of the recorded ones, in random order, so that few steps have
    about the mean of many.
    """
    num_steps = max(1, round((num_new_tokens - 1) / MAT))  # one token is the prefill's
    counts = [_STEPS[int((step + 0.5) / num_steps * len(_STEPS))] for step in range(num_steps)]
    Random(0).shuffle(counts)
    return counts
