"""Ways of generating on the user's own prompts, in turn, in one process: `lade bench` and `demo`.

Reading order: `prompts.py`, `methods.py`, `run.py`, `busy.py`, `rivals.py`, `report.py`. The core
of lade imports nothing from here.
"""
