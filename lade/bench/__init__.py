"""Measuring: methods against plain `generate` on real prompts, and the pool alone.

Reading order: `methods.py`, `run.py`, `report.py`; `prompts.py`, `environment.py` and `pool.py`
serve them. The core of lade imports nothing from here.
"""
