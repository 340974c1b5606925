"""Attention functions and masks for trees; they know nothing of generations or caches."""
