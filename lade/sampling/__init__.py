"""The target's own token behind each node: greedy, seed for seed, or by rejection sampling.

Walking down a tree along these tokens is `lade.verify`.
"""
