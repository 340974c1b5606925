"""Pools that draft inside of serving engines: what an engine's worker runs, without transformers.

One file for each engine; options and the recognition of requests are shared.
"""
