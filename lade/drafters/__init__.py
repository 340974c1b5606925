"""Objects for `drafter=`: drafters that are models, and lists of drafters.

`AssistantModel` is another causal LM, `FirstLayers` the target's own first layers. What both share
is in `model_drafter.py`: which tree a draft is, and how far it goes. `runner.py` runs a model with
a cache of its own. `Merged` is a list of several drafters; `prediction.py` is the argument
`prediction` as one.
"""

from lade.drafters.assistant import AssistantModel
from lade.drafters.first_layers import FirstLayers
from lade.drafters.merged import CallPool, Merged

__all__ = ["AssistantModel", "CallPool", "FirstLayers", "Merged"]
