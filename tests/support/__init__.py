"""Which architectures and weight formats lade decodes exactly: tiny models with random weights.

`python -m tests.support` checks them all; the rules and the check that users' models go through are
in `lade.probing`.
"""
