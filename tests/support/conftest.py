"""Fixtures of `tests.lade` that these tests take as well."""

from tests.lade.conftest import single_thread, steady_random_state

__all__ = ["single_thread", "steady_random_state"]
