"""A decoder's whole forward as one compiled job, on the model's own weights.

Start with `job.py`.
"""
