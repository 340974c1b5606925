"""Forward passes on a CPU by lade's kernels, each as one compiled job, in float32.

Start with `job.py`.
"""
