"""Which architectures and weight formats lade decodes exactly: tiny models with random weights.

The tests and their report live here; the rules and the check that users' models go through are in
`lade.probing`.
"""
