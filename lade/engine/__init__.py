"""Many calls of one model at once: the engine, whose call draws, forks and the end of the process.

`lade/batcher.py` is the engine's entry for users.
"""
