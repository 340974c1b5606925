"""`lade.prewarm`: a model's own likely successors, written down ahead of time and kept on disk.

Drafting from tables is left to `lade.drafting`.
"""
