"""`lade.prewarm`: a model's own likely successors, asked for ahead of time and kept on disk.

Making, storing and finding tables lives here; drafting from them is left to `lade.drafting` and
`ngram_pool`.
"""
