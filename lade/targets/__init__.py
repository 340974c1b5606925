"""A model during one generation: it verifies trees or paths, and keeps or drops keys and values.

The KV cache, and rolling back the caches of transformers, live here too. The verification method is
chosen in `lade.probing`.
"""
