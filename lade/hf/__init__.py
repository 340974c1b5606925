"""transformers in and out: the doors, a call put together, its options, stop criteria and streams.

No algorithm is here.
"""
