"""Pools that draft inside of serving engines, in the engine's workers and without transformers.

One file for each engine; options and the recognition of requests are shared.
"""
