"""`lade bench gpu`: what a verify step costs beside what the memory of the device would allow.

Nothing is needed but the device: the models have real shapes and random weights, their text is
known, and drafts are accepted as often as in recorded decoding, so that every step does its true
work. Reading order: `shapes.py`, `acceptance.py`, `drafter.py`, `stage.py`, `bandwidth.py`,
`host.py`, `steps.py`, `speed.py`, `real.py`, `run.py`, `report.py`.
"""
