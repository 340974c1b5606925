"""The target's own token after each node: greedy, seed for seed, or by rejection sampling.

Logits processors are applied here; walking down a tree along these tokens is of `lade.decoder`.
"""
