"""Random calls of `generate`, once plain and once through lade, compared in all they return.

`python -m tests.fuzz` draws the cases; `parts.py` has what they are made of, `cases.py` draws one,
`compare.py` runs one both ways, `shrink.py` makes a failing one small, `run.py` is the command.
"""
