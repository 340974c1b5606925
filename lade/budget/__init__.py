"""How many draft tokens to verify, by measured step costs and calibrated draft probabilities.

Nothing here sees a tensor or a model.
"""
