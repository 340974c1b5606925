"""`python -m benchmarks gpu`: whole answers on a GPU by `generate` and by lade's executions.

It needs no checkpoint: the models have real shapes and random weights, their text is known, and
drafts are accepted as often as in recorded decoding, so every step does realistic work. Reading
order: `shapes.py`, `drafter.py`, `measure.py`; `prepare.py` is what `make gpu` calls first.
"""
