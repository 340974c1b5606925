"""Which verification method is exact for a model, and whether that still holds.

Rules from the config, a self-check against plain decoding, the profiles that keep its results, what
tells that a model has changed, spot checks of what nobody can tell, and the plan for a call.
Running the methods is left to `lade.targets` and `lade.gpu`.
"""
