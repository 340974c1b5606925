"""Small faults, planted one at a time, each of which a contract must catch: `python -m tests.faults`.

`planted.py` lists them, `run.py` plants them and runs the tests.
"""
