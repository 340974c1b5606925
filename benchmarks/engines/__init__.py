"""`python -m benchmarks engines`: methods of speculative decoding in vLLM, beside each other.

Each method has an engine in a process of its own (`process.py`, `worker.py`), which answers the
same tokens at several numbers of concurrent requests. This process imports no vLLM.
Reading order: `methods.py`, `job.py`, `plan.py`, `mending.py`, `worker.py`, `process.py`,
`agreement.py`, `report.py`, `command.py`.
"""
