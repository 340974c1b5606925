"""Many calls that are interrupted, or made at once by several threads: `python -m tests.stress`.

`uses.py` has what is called, `whole.py` what must be as before, `interrupts.py` and `threads.py`
the ways to disturb it. A short run of each is part of the tests: `tests/lade/test_interrupts.py`.
"""
