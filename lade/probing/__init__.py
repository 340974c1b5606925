"""Which verification method is exact for a model, and whether that still holds.

Rules from the config, a check against plain decoding, the profiles that keep its results, the proof
that each call gives, and the plan for a call. Running the methods is left to `lade.targets`.
"""
