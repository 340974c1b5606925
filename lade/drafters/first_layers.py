"""The target's own first layers as a drafter.

They are a view of the model with its own KV cache, whose other layers return their inputs. Layers
are found without knowing any class: a forward shows which list of modules the model runs in order.
The view does everything else that the model does before and after its layers, so no config, mask or
cache has to be changed.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lade.budget.seconds import Seconds
from lade.compat import Model, mesh_of
from lade.compat.attempts import Attempt
from lade.compat.view import HOOKS, apart, viewed
from lade.config import check_integer
from lade.drafters.model_drafter import ModelDrafter
from lade.drafters.runner import ModelRunner, plan_for
from lade.drafting.drafter import Drafter, DraftingCall
from lade.errors import UnsupportedModelError, UnsupportedOptionError
from lade.probing.factory import VerificationPlan
from lade.probing.profile import Profile, Profiles, profile_of
from lade.probing.rules import refuse_encoder_decoder
from lade.probing.selfcheck import Plain, unchanged_random_state
from lade.probing.state import check_tokens


class FirstLayers(Drafter):
    """The target's own first layers, followed by its last norm and head, as a drafter.

    No second model is needed; the memory is that of a second KV cache, as the first layers run the
    prompt once more. The model is not changed.

    Args:
        num_layers: number of layers; try a third of them first.
        length: as for `AssistantModel`.
        name: name of this source in `DecodeStats.sources`.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value.
    """

    def __init__(
        self, num_layers: int, *, length: int | None = None, name: str = "first_layers"
    ) -> None:
        check_integer("num_layers", num_layers, 1)
        if length is not None:
            check_integer("length", length, 1)
        self.num_layers = num_layers
        self.name = name
        self._length, self._forward_sec = length, Seconds()

    def for_call(self, call: DraftingCall) -> Drafter:
        """Return a drafter for one call.

        Raises:
            UnsupportedModelError: the target's layers cannot be found, or cannot be run by
                themselves, with the reason.
            UnsupportedOptionError: it has too few layers; also a `ValueError`.
        """
        view, plan = _view_of(call.model, self.num_layers)
        open_runner = partial(ModelRunner, view, plan, call.max_length)
        return ModelDrafter(call, open_runner, self._length, self._forward_sec)


def _view_of(model: Model, num_layers: int) -> tuple[Model, VerificationPlan]:
    """Return a view that runs only the first layers, and the plan for its trees.

    Both are found once and kept with the model's profile.
    """
    refuse_encoder_decoder(model)
    profile = profile_of(model)
    name, num_values = profile.once("layers", lambda: _layers_of(model, profile))
    if num_layers >= len(num_values):
        raise UnsupportedOptionError(
            f"expected num_layers from 1 to {len(num_values) - 1} for {type(model).__name__}, got "
            f"{num_layers}"
        )

    def find() -> tuple[Model, VerificationPlan]:
        layers = zip(model.get_submodule(name), num_values, strict=True)
        changes = {
            id(layer): {"forward": _handing_on(num), **{hooks: OrderedDict() for hooks in HOOKS}}
            for layer, num in islice(layers, num_layers, None)
        }
        view = viewed(model, lambda module: changes.get(id(module)))
        view.__dict__["_lade_profiles"] = Profiles()
        return view, plan_for(view)

    return profile.once(("first layers", num_layers), find)


@torch.no_grad()
def _layers_of(model: Model, profile: Profile) -> tuple[str, list[int | None]]:
    """Return the name of a model's list of layers: of modules that a forward runs in order.

    For each layer, it gets how many values the layer returns if it returns a tuple, else None.

    Raises:
        UnsupportedModelError: there is no such list, with the reason.
    """
    if mesh_of(model) is not None:
        raise _refusal(model, "several processes run it together")
    lists = {
        name: [*module]
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1
    }
    inside = tuple(f"{name}." for name in lists)
    lists = {name: modules for name, modules in lists.items() if not name.startswith(inside)}
    calls: list[tuple[int, int | None]] = []

    def note(which: int, _: nn.Module, args: Any, output: Any) -> None:
        calls.append((which, len(output) if isinstance(output, tuple | list) else None))

    view, names = apart(model), {id(module): name for name, module in model.named_modules()}
    for which in {id(module) for of_list in lists.values() for module in of_list}:
        view.get_submodule(names[which]).register_forward_hook(partial(note, which))
    with Attempt() as attempt, unchanged_random_state(model, profile):
        Plain(view, check_tokens(model)[:12], cache="none").generate(num_new=1)
    if attempt.failure is not None:
        raise _refusal(model, attempt.failure)
    found: dict[str, list[int | None]] = {}
    for name, of_list in lists.items():
        ids = [*map(id, of_list)]
        run = [call for call in calls if call[0] in ids]
        if [which for which, _ in run] == ids and len({*ids}) == len(ids):
            found[name] = [num for _, num in run]
    if not found:
        raise _refusal(model, "it has no list of layers that a forward runs once each, in order")
    return max(found.items(), key=lambda each: len(each[1]))


def _refusal(model: Model, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} cannot draft by its first layers: {reason}"
    )


def _handing_on(num_values: int | None) -> Callable[..., Any]:
    """Return the forward of a layer that hands hidden states on, and returns as many values."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        return hidden if num_values is None else (hidden, *[None] * (num_values - 1))

    return forward
