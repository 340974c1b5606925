"""The target's own token after each node: greedy, seed for seed, or by rejection sampling.

Logits processors are applied here; `lade.decoder` walks down a tree along these tokens.
"""
