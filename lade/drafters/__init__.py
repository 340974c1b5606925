"""Objects for `drafter=`: drafters that are models, and lists of drafters.

`Candidates` is any candidate generator of transformers. `AssistantModel`, another causal LM, and
`FirstLayers`, the target's own first layers, are such generators (`models.py`), whose model lade
runs (`runner.py`). `Merged` is a list of several drafters; `prediction.py` is the argument
`prediction` as one.
"""

from lade.drafters.candidates import Candidates
from lade.drafters.merged import CallPool, Merged
from lade.drafters.models import AssistantModel, FirstLayers

__all__ = ["AssistantModel", "CallPool", "Candidates", "FirstLayers", "Merged"]
