"""Benchmarks: methods against plain `generate` on real prompts, their memory, and the pool alone.

Reading order: `settings.py`, `baselines.py`, `methods.py`, `run.py`, `tables.py`, `report.py`; for
recorded answers, `traces.py`, `record.py`, `replay.py`, `replay_report.py`, `project.py`; for equal
budgets, `arena.py`; for first weights, `fit.py`; for memory, `peak.py` and `memory.py`.
`quantized.py` copies a model for benchmarks; `prompts.py`, `batches.py`, `environment.py`,
`device.py` and `plots.py` are helpers; `pool.py` and `gpu/` stand alone. The core of lade
imports nothing from here.
"""
