"""Measuring: methods against plain `generate` on real prompts, their memory, and the pool alone.

Reading order: `settings.py`, `baselines.py`, `methods.py`, `run.py`, `report.py`; for memory then
`peak.py` and `memory.py`. `prompts.py`, `batches.py` and `environment.py` serve them; `pool.py`
stands alone.
The core of lade imports nothing from here.
"""
