"""What may come next: drafters, the pool as one, grammars, lookahead windows, and what a row gets.

Nothing here runs the model; how much of a draft is verified is decided in `lade.budget`.
"""
