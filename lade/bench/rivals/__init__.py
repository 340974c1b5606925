"""Rivals of the arena: published ways of drafting, on lade's own verify core.

Each is written anew from its paper as a `Drafter`, so that all methods of a run differ in what they
draft and in nothing else. None of them is used outside `lade bench`. Where a rival could not be as
published, its docstring says so; where it leaves a choice open, too.

Reading order: `growing.py`, `prompt_lookup.py`, `lookahead.py`, `recycling.py`, `sam.py`,
`goose.py`, `suffix.py`; `catalogue.py` names them.
"""
