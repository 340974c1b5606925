"""Forward passes on a CPU by lade's kernels: whole, as one compiled job, or layer by layer.

Start with `job.py`.
"""
