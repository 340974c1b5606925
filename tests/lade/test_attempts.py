"""What foreign code raises becomes a reason, but interrupts and a lack of memory do not."""

import pytest
import torch

from lade.attempts import Attempt
from lade.errors import UnsupportedModelError


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, torch.OutOfMemoryError])
def test_what_says_nothing_of_the_code_passes(error: type[BaseException]) -> None:
    with pytest.raises(error), Attempt():
        raise error


def test_what_is_raised_is_kept_in_one_line() -> None:
    with Attempt() as attempt:
        raise ValueError("no\nway")
    assert attempt.failure == "ValueError: no"
    with Attempt() as attempt:
        pass
    assert attempt.failure is None


def test_errors_that_mean_something_else_pass() -> None:
    with pytest.raises(UnsupportedModelError), Attempt(UnsupportedModelError):
        raise UnsupportedModelError
    with Attempt(even_memory=True) as attempt:
        raise torch.OutOfMemoryError("full")
    assert attempt.failure == "OutOfMemoryError: full"
