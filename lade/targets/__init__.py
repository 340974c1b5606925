"""A model during one generation: trees or paths verified, keys and values kept or dropped.

Which of them a model gets is decided in `lade.probing`; fixed shapes are in `lade.gpu`.
"""
