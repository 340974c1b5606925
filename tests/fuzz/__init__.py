"""Random calls of `generate`, once plain and once through lade, compared in all they return.

The model is of a few families that vary in their sizes, or of any causal LM architecture of
transformers. `python -m tests.fuzz` draws the cases; `parts.py` has what they are made of,
`cases.py` draws one, `compare.py` runs one both ways, `shrink.py` makes a failing one small,
`run.py` is the command.
"""
