"""The target's own first layers as a drafter.

They are a view of the model, whose other layers hand on what they get, with a cache of its own. The
layers are found by structure; nothing is known here of any class: a forward shows which list of
modules a model runs one after the other. Whatever a model does before its layers and after them, it
does in the view, too, and no config, mask or cache has to be changed.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lade.attempts import Attempt
from lade.budget.asking import SourceCosts
from lade.compat import Model, device_of_inputs, mesh_of
from lade.drafters.model_drafter import ExpansionName, Growth, LengthName, ModelDrafter
from lade.drafters.runner import ModelRunner, plan_for
from lade.drafting.drafter import Drafter, DraftingCall
from lade.errors import UnsupportedModelError, UnsupportedOptionError
from lade.probing.factory import VerificationPlan
from lade.probing.profile import Profile, Profiles, profile_of
from lade.probing.rules import refuse_encoder_decoder
from lade.probing.selfcheck import check_tokens, unchanged_random_state
from lade.view import counterpart, viewed, with_own_hooks

_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


class FirstLayers(Drafter):
    """The target's own first layers, followed by its last norm and head, as a drafter.

    No second model is needed, and none of its memory but for keys and values: the first layers have
    a cache of their own and run the prompt once more. The decoder layers are found by structure, in
    any causal LM. The model is never changed.

    Args:
        num_layers: how many layers; a third of them is a first try.
        length, expansion, max_draft_tokens, confidence: as for `AssistantModel`.
        name: of this source in `DecodeStats.sources`.

    Raises:
        TypeError, ValueError: an argument is none of those.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        length: LengthName | int = "measured",
        expansion: ExpansionName = "tree",
        max_draft_tokens: int | None = None,
        confidence: float = 0.4,
        name: str = "first_layers",
    ) -> None:
        if isinstance(num_layers, bool) or not isinstance(num_layers, int):
            raise TypeError(f"expected num_layers to be an int, got {num_layers!r}")
        if num_layers < 1:
            raise ValueError(f"expected num_layers of at least 1, got {num_layers}")
        self.num_layers = num_layers
        self.name = name
        self._growth = Growth(length, expansion, max_draft_tokens, confidence)
        self._costs = SourceCosts()

    def for_call(self, call: DraftingCall) -> Drafter:
        """Return a drafter for one call.

        Raises:
            UnsupportedModelError: the target's layers cannot be found, or cannot be run by
                themselves, with the reason.
            UnsupportedOptionError: it has too few layers; also a `ValueError`.
        """
        view, plan = _view_of(call.model, self.num_layers)
        return ModelDrafter(call, partial(ModelRunner, view, plan, call.max_length), self._growth)


def _view_of(model: Model, num_layers: int) -> tuple[Model, VerificationPlan]:
    """Return a view that runs only the first layers, and how to run trees of drafts of it.

    Both are found once and kept with the model's profile.
    """
    refuse_encoder_decoder(model)
    profile = profile_of(model)
    known = profile.of_drafters.setdefault("first_layers", {})
    if "layers" not in known:
        known["layers"] = _Layers.of(model, profile)
    layers: _Layers = known["layers"]
    if num_layers >= len(layers):
        raise UnsupportedOptionError(
            f"expected num_layers from 1 to {len(layers) - 1} for {type(model).__name__}, got "
            f"{num_layers}"
        )
    if num_layers not in known:
        view = layers.first(model, num_layers)
        known[num_layers] = view, plan_for(view)
    found: tuple[Model, VerificationPlan] = known[num_layers]
    return found


class _Layers:
    """The decoder layers of a model.

    Args:
        name: qualified name of the list of layers in the model.
        num_values: for each layer, how many values it returns if it returns a tuple, else None.
    """

    def __init__(self, name: str, num_values: list[int | None]) -> None:
        self._name = name
        self._num_values = num_values

    def __len__(self) -> int:
        return len(self._num_values)

    def first(self, model: Model, num_layers: int) -> Model:
        """Return a view whose other layers hand on what they get, with a profile of its own."""
        layers = [*model.get_submodule(self._name)]
        changes = {
            id(layers[index]): {
                "forward": _handing_on(self._num_values[index]),
                **{name: OrderedDict() for name in _HOOKS},
            }
            for index in range(num_layers, len(layers))
        }
        view = viewed(model, lambda module: changes.get(id(module)))
        view.__dict__["_lade_profiles"] = Profiles()
        return view

    @classmethod
    @torch.no_grad()
    def of(cls, model: Model, profile: Profile) -> "_Layers":
        """Return the layers of a model: the list of modules that a forward runs in order.

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
        inside = tuple(
            f"{name}.{index}." for name, modules in lists.items() for index in range(len(modules))
        )
        lists = {name: modules for name, modules in lists.items() if not name.startswith(inside)}
        ids: dict[int, int] = {}
        calls: list[tuple[int, int | None]] = []

        def note(module: nn.Module, _: Any, output: Any) -> None:
            is_several = isinstance(output, tuple | list)
            calls.append((ids[id(module)], len(output) if is_several else None))

        modules = [module for of_list in lists.values() for module in of_list]
        view = with_own_hooks(model, modules)
        for module in {id(module): module for module in modules}.values():
            mine = counterpart(view, model, module)
            ids[id(mine)] = id(module)
            mine.register_forward_hook(note)
        with Attempt() as attempt, unchanged_random_state(model, profile):
            view(**_dozen(view))
        if attempt.failure is not None:
            raise _refusal(model, attempt.failure)
        order = [which for which, _ in calls]

        def is_run_in_order(modules: list[nn.Module]) -> bool:
            expected = [*map(id, modules)]
            is_each_other = len({*expected}) == len(expected)
            return is_each_other and [which for which in order if which in expected] == expected

        found = [name for name, modules in lists.items() if is_run_in_order(modules)]
        if not found:
            reason = "it has no list of layers that a forward runs once each, in order"
            raise _refusal(model, reason)
        name = max(found, key=lambda each: len(lists[each]))
        num_values = dict(calls)
        return cls(name, [num_values[id(layer)] for layer in lists[name]])


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


def _dozen(model: Model) -> dict[str, Any]:
    """Return the inputs of a forward over a dozen tokens, without a cache."""
    input_ids = torch.tensor([check_tokens(model)[:12]], device=device_of_inputs(model))
    inputs: dict[str, Any] = {"input_ids": input_ids}
    parameters = inspect.signature(model.forward).parameters
    if "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        inputs["use_cache"] = False
    return inputs
