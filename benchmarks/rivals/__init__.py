"""Rivals: published drafting methods, reimplemented on lade's own verification.

Each is written from its paper as a `Drafter`, so the methods of a run differ only in what they
draft. Docstrings say where a rival deviates from its paper, and what they chose where the paper
leaves a choice open.

Reading order: `growing.py`, `prompt_lookup.py`, `recycling.py`, `sam.py`, `goose.py`;
`catalogue.py` names them.
"""
