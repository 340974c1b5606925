"""`python -m benchmarks gpu`: the cost of a step, compared with the device's memory bandwidth.

It needs no checkpoint: the models have real shapes and random weights, their text is known, and
drafts are accepted as often as in recorded decoding, so every step does realistic work. Each stage
has a process of its own (`process.py`, `work.py`). Reading order: `shapes.py`, `acceptance.py`,
`drafter.py`, `stage.py`, `bandwidth.py`, `host.py`, `used.py`, `steps.py`, `kernels.py`,
`answers.py`, `chat.py`, `job.py`, `work.py`, `process.py`, `run.py`, `report.py`, `command.py`.
"""
