"""Which architectures lade decodes exactly: each is tested as a tiny model with random weights.

The tests and their report live here; the rules and the check that users' models go through are in
`lade.probing`.
"""
