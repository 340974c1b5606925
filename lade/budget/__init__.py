"""How many draft tokens to verify, by measured step costs and calibrated promises of the drafter.

Nothing here sees a tensor or a model.
"""
