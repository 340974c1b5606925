"""A model cut in two between two of its decoder layers, found by structure.

Nothing is known here of any class. A forward shows which list of modules a model runs one after
the other; in a view of the model, some of these modules then hand on what they get. So whatever a
model does before its layers and after them, it does in the view, too, and no config, mask or cache
has to be changed. A cut is only used once the two halves, one after the other, were seen to give
the logits of the whole.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lade.attempts import Attempt
from lade.closeness import distance, limit_of
from lade.compat import Model, device_of_inputs, mesh_of
from lade.errors import UnsupportedModelError
from lade.probing.profile import Profile, Profiles
from lade.probing.selfcheck import check_tokens, unchanged_random_state
from lade.targets.base import Forward
from lade.targets.early import Exit
from lade.view import counterpart, viewed, with_own_hooks

_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)

#: What a layer that is passed gets: takes hidden states and returns those to hand on.
_Pass = Callable[[Tensor], Tensor]


class Layers:
    """The decoder layers of a model, and the ways to cut it between them.

    Args:
        name: qualified name of the list of layers in the model.
        num_values: for each layer, how many values it returns if it returns a tuple, else None.
    """

    def __init__(self, name: str, num_values: list[int | None]) -> None:
        self.name = name
        self._num_values = num_values

    def __len__(self) -> int:
        return len(self._num_values)

    def passing(self, model: Model, passes: dict[int, _Pass]) -> Model:
        """Return a view in which some layers only pass hidden states on.

        Args:
            model: the model, or a view of it.
            passes: by index, what each of these layers does instead.
        """
        layers = [*model.get_submodule(self.name)]
        changes = {
            id(layers[index]): {
                "forward": _forward_of(change, self._num_values[index]),
                **{name: OrderedDict() for name in _HOOKS},
            }
            for index, change in passes.items()
        }
        return viewed(model, lambda module: changes.get(id(module)))

    def exit_view(self, model: Model, num_layers: int) -> Model:
        """Return a view that runs only the first layers, with a profile of its own."""
        view = self.passing(model, dict.fromkeys(range(num_layers, len(self)), _same))
        view.__dict__["_lade_profiles"] = Profiles()
        return view


class Cut:
    """A model in two halves (`lade.targets.early.Halves`), for one thread.

    Args:
        num_layers: those of the first half, at least one and not all.
    """

    def __init__(self, model: Model, layers: Layers, num_layers: int) -> None:
        self._hidden: Tensor | None = None

        def note(hidden: Tensor) -> Tensor:
            self._hidden = hidden
            return hidden

        def recall(_: Tensor) -> Tensor:
            assert self._hidden is not None
            return self._hidden

        last = len(layers)
        after = dict.fromkeys(range(num_layers, last), _same)
        before = dict.fromkeys(range(num_layers), _same)
        self._first = layers.passing(model, {**after, num_layers: note})
        self._rest = layers.passing(model, {**before, num_layers - 1: recall})

    def first(self, inputs: dict[str, Any]) -> Exit:
        """Run the layers before the cut, and what follows the last layer of all."""
        logits = self._first(**inputs).logits
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        return Exit(logits, hidden)

    def rest(self, inputs: dict[str, Any], hidden: Tensor) -> Forward:
        """Run the layers after the cut, on what the first ones handed on."""
        self._hidden = hidden
        try:
            output: Forward = self._rest(**inputs)
        finally:
            self._hidden = None
        return output


@torch.no_grad()
def layers_of(model: Model, profile: Profile) -> Layers:
    """Return the decoder layers of a model: the list of modules that a forward runs in order.

    Raises:
        UnsupportedModelError: there is no such list, with the reason.
    """
    if mesh_of(model) is not None:
        raise UnsupportedModelError(refusal(model, "several processes run it together"))
    lists = {
        name: [*module]
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1
    }
    inside = [
        f"{name}.{index}." for name, of_list in lists.items() for index in range(len(of_list))
    ]
    lists = {name: of_list for name, of_list in lists.items() if not name.startswith(tuple(inside))}
    calls: list[tuple[int, int | None]] = []

    def note(module: nn.Module, _: Any, output: Any) -> None:
        calls.append((ids[id(module)], len(output) if isinstance(output, (tuple, list)) else None))

    modules = [module for of_list in lists.values() for module in of_list]
    view = with_own_hooks(model, modules)
    ids: dict[int, int] = {}
    handles = []
    for module in {id(module): module for module in modules}.values():
        mine = counterpart(view, model, module)
        ids[id(mine)] = id(module)
        handles.append(mine.register_forward_hook(note))
    with Attempt() as attempt, unchanged_random_state(model, profile):
        view(**_dozen(view))
    if attempt.failure is not None:
        raise UnsupportedModelError(refusal(model, attempt.failure))
    order = [which for which, _ in calls]

    def is_run_in_order(modules: list[nn.Module]) -> bool:
        expected = [*map(id, modules)]
        is_each_other = len({*expected}) == len(expected)
        return is_each_other and [which for which in order if which in expected] == expected

    found = [name for name, modules in lists.items() if is_run_in_order(modules)]
    if not found:
        raise UnsupportedModelError(
            refusal(model, "it has no list of layers that a forward runs once each, in order")
        )
    name = max(found, key=lambda each: len(lists[each]))
    num_values = dict(calls)
    return Layers(name, [num_values[id(layer)] for layer in lists[name]])


@torch.no_grad()
def why_not_cut(model: Model, profile: Profile, layers: Layers, num_layers: int) -> str | None:
    """Return why the halves of a model are not the whole, or None; without a cache.

    Raises:
        UnsupportedModelError: a half fails now, which says nothing of later calls.
    """
    with Attempt() as attempt, unchanged_random_state(model, profile):
        whole = model(**_dozen(model)).logits
        cut = Cut(model, layers, num_layers)
        exit_ = cut.first(_dozen(model))
        rest = cut.rest(_dozen(model), exit_.hidden).logits
    if attempt.failure is not None:
        reason = f"its layers from {num_layers} on do not run by themselves ({attempt.failure})"
        raise UnsupportedModelError(refusal(model, reason))
    if exit_.logits.shape != whole.shape:
        return f"its first {num_layers} layers give logits {list(exit_.logits.shape)}"
    apart = distance(rest, whole)
    if not apart <= limit_of(model):
        return (
            f"its first {num_layers} layers, and then the others, differ from all of them by "
            f"{apart:.2g} of the standard deviation of its logits"
        )
    return None


def refusal(model: Model, reason: str) -> str:
    """Return the message of a refusal."""
    return f"{type(model).__name__} cannot draft by its first layers: {reason}"


def _same(hidden: Tensor) -> Tensor:
    return hidden


def _forward_of(change: _Pass, num_values: int | None) -> Callable[..., Any]:
    """Return the forward of a layer that passes hidden states on, and returns as many values."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = change(args[0] if args else kwargs["hidden_states"])
        return hidden if num_values is None else (hidden, *[None] * (num_values - 1))

    return forward


def inputs_for(model: Model, input_ids: Tensor) -> dict[str, Any]:
    """Return the inputs of a forward over whole texts, without a cache."""
    inputs: dict[str, Any] = {"input_ids": input_ids}
    parameters = inspect.signature(model.forward).parameters
    if "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        inputs["use_cache"] = False
    return inputs


def _dozen(model: Model) -> dict[str, Any]:
    input_ids = torch.tensor([check_tokens(model)[:12]], device=device_of_inputs(model))
    return inputs_for(model, input_ids)
