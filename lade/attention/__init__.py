"""Attention functions and masks for trees: packed on a CPU, plain torch, and Triton.

They know nothing of generations or caches.
"""
