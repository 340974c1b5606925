"""Objects for `drafter=`: drafters that are models, and lists of drafters.

`Candidates` is any candidate generator of transformers. Those of `AssistantModel`, another model,
and of `FirstLayers` and `Heads`, the target's own, are in `models.py`; `runner.py` runs a model.
`Merged` is a list of several drafters; `prediction.py` is the argument `prediction` as one.
"""

from lade.drafters.candidates import Candidates
from lade.drafters.merged import CallPool, Merged
from lade.drafters.models import AssistantModel, FirstLayers, Heads

__all__ = ["AssistantModel", "CallPool", "Candidates", "FirstLayers", "Heads", "Merged"]
