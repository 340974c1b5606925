"""Numbers of the pool that its oracle computes with, too."""

from ngram_pool import pool
from ngram_pool.weights import first_weights

__all__ = ["first_num_rows", "first_weights", "learning_rate"]


def first_num_rows() -> int:
    """Return how many rows a pool begins with, which tests make fewer."""
    return pool._FIRST_NUM_ROWS


def learning_rate() -> float:
    """Return by how much a token moves the weights of contexts."""
    return pool._LEARNING_RATE
