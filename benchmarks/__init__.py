"""What measures us: methods beside rivals, traces, engines, servers, GPUs, the pool alone.

`python -m benchmarks` lists the commands, which are in `__main__.py`; each calls `run` of a module
of its name. All of it stands on `lade.apps.bench`, which is what users have.
"""
