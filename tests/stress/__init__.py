"""Many calls that are interrupted, or made at once by several threads: `python -m tests.stress`."""
