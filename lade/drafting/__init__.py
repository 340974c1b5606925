"""Drafts: the drafters, the pool among them, grammars, and harvesting.

Nothing here runs the model; how many draft tokens are verified is decided in `lade.budget`.
"""
