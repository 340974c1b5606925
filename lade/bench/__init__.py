"""`lade bench`: ways of generating on the user's own prompts, in turn, in one process.

Reading order: `prompts.py`, `baselines.py`, `methods.py`, `run.py`, `report.py`;
`forwards.py`, `device.py`, `environment.py` and `tables.py` are helpers.
The core of lade imports nothing from here.
"""
