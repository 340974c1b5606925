"""Forwards on a CPU, faster than torch's: whole ones as one compiled job, or layer by layer.

Start with `job.py`.
"""
