"""`lade.prewarm`: a model's likely successors, found ahead of time and kept on disk.

Drafting from tables is left to `lade.drafting`.
"""
