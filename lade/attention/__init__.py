"""Attention functions and masks for trees: packed by key head.

They know nothing of generations or caches.
"""
