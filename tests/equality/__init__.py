"""That lade returns what `generate` returns: one table of models, ways to call, and options.

`table.py` names the values of each factor and makes a case of one of each, `pairs.py` chooses few
cases in which any two values meet. A case is one of `tests/fuzz`, which runs and compares it in all
that a call returns and leaves behind. `python -m tests.equality --seed S` walks a table of other
cases.
"""
