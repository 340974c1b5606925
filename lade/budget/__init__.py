"""How many draft tokens to verify, by measured step costs and by measured trust in the drafter.

Nothing here sees a tensor or a model.
"""
