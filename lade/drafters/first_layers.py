"""The target's own first layers as a drafter.

They are a view of the model with its own KV cache and a shorter list of layers. The view does
everything else that the model does before and after its layers, so no config, mask or cache has to
be changed.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from lade.compat import Model, mesh_of
from lade.compat.attempts import Attempt
from lade.compat.view import with_first_layers
from lade.config import check_integer
from lade.drafters.assistant import ModelDrafter
from lade.drafters.runner import plan_for
from lade.drafting.drafter import DraftingCall
from lade.errors import UnsupportedModelError, UnsupportedOptionError
from lade.probing.factory import VerificationPlan
from lade.probing.profile import Profiles, profile_of
from lade.probing.rules import refuse_encoder_decoder


class FirstLayers(ModelDrafter):
    """The target's own first layers, followed by its last norm and head, as a drafter.

    No second model is needed; the memory is that of a second KV cache, as the first layers run the
    prompt once more. The model is not changed.

    Args:
        num_layers: number of layers; try a third of them first.
        length: as for `AssistantModel`.
        name: name of this source in `DecodeStats.sources`.
        options: as for `AssistantModel`, in place of those of the model's generation config.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        length: int | None = None,
        name: str = "first_layers",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_integer("num_layers", num_layers, 1)
        super().__init__(name, length, options)
        self.num_layers = num_layers

    def _model_for(self, call: DraftingCall) -> tuple[Model, VerificationPlan]:
        """Return a view that runs only the first layers, and how, kept with the model's profile."""
        model, num_layers = call.model, self.num_layers
        refuse_encoder_decoder(model)
        layers = _layers_of(model)
        if num_layers >= len(layers):
            raise UnsupportedOptionError(
                f"expected num_layers from 1 to {len(layers) - 1} for {type(model).__name__}, got "
                f"{num_layers}"
            )

        def view(cuts_cache: bool) -> tuple[Model, VerificationPlan]:
            found = with_first_layers(model, layers, num_layers, cuts_cache=cuts_cache)
            found.__dict__["_lade_profiles"] = Profiles()
            return found, plan_for(found)

        def find() -> tuple[Model, VerificationPlan]:
            with Attempt():
                return view(cuts_cache=True)
            return view(cuts_cache=False)

        return profile_of(model).once(("first layers", num_layers), find)


def _layers_of(model: Model) -> nn.ModuleList:
    """Return a model's layers: the longest list of modules that is in no other list.

    Raises:
        UnsupportedModelError: there is none, with the reason.
    """
    lists = [each for each in model.get_decoder().modules() if isinstance(each, nn.ModuleList)]
    inner = {id(module) for of_list in lists for each in of_list for module in each.modules()}
    outer = [each for each in lists if id(each) not in inner and len(each) > 1]
    if outer and mesh_of(model) is None:
        return max(outer, key=len)
    reason = "several processes run it together" if outer else "it has no list of layers"
    raise UnsupportedModelError(
        f"{type(model).__name__} cannot draft by its first layers: {reason}"
    )
