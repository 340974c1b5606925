"""Watch a model's forward, on stand-ins for its weights.

What is read of a forward must hold for all weights that the model may ever have. Among weights of
zero, every activation and every order of heads would fit. So a view of the model runs on made-up
numbers, for which two different functions give different results; the model's own weights are not
looked at. Large stand-ins overlap in memory, and the largest products add a few numbers alone: a
watched forward is cheaper than one of the model.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _DisableTorchDispatch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache
from transformers.pytorch_utils import Conv1D

from lade.compat import CACHE, Model, does_nothing, placeholders_of
from lade.compat.attempts import Attempt
from lade.compat.view import HOOKED, apart, with_attention, with_eager_experts, wraps_own_forward
from lade.forward.comparing import UnsupportedForwardError, require
from lade.forward.packed import PackedConv1D, PackedEmbedding, PackedLinear, PackedStack
from lade.forward.trace import Trace, Value, memory_of
from lade.forward.written import Attended, written_in
from lade.machine.generators import are_random_states, put_back, random_states
from lade.targets.masks import FULL, AttentionSpan

_POSITIONS = [0, 1, 2, 1_000_003, 1_000_004]  # of the watched forward
_OTHERS = [0, 1, 900_001, 900_002]  # of another one, of an even number of tokens
_NUM_BEFORE = 7  # tokens that seem to be in a cache
#: Attention implementations: a function of ours, and what a model writes out.
_WATCHED, _WRITTEN = "lade_watched", "lade_written"
#: Transformers' attention, and the function that makes its masks.
SDPA, _MASKS = AttentionInterface()["sdpa"], AttentionMaskInterface()

# From a batch row, a head, a query and a key, as tensors of indices, to whether it is seen.
_Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_MOST_KEYS = 2**20  # of a text, that masks are asked about

# Numbers that are drawn; a prime, so that rows of matrices differ. Larger stand-ins repeat them.
_PERIOD = 262_139
_LARGE = 2**19  # numbers of a weight that is not written out
_OVERLAP = 7, 8  # numbers from one row, and one matrix, of such a weight to the next
_NUM_ADDED = 4  # inputs that each result of such a layer adds
_GAIN = 2.0  # so that activations see more than their linear parts
_MOST_ASKED = 2**12  # numbers of a buffer; a larger one holds a table
#: Linear layers that a plan may have.
PRODUCTS = (nn.Linear, PackedLinear, Conv1D, PackedConv1D)


class _Noted(NamedTuple):
    """What is noted of a forward while it is watched."""

    trace: Trace
    masks: list[tuple[Tensor, _Sees]]  # with the functions that made them
    attended: list[Attended]  # by functions, not those that a model writes out


_noted: ContextVar[_Noted] = ContextVar("noted")


def _note_anew() -> _Noted:
    noted = _Noted(Trace(), [], [])
    _noted.set(noted)
    return noted


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a module's result, or of its arguments."""
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


class Called(NamedTuple):
    """The call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    given: list[Value]  # the tensors among its arguments, as they were when it began
    made: list[Value]  # the tensors that it gave
    seen: slice  # what was seen meanwhile, in the trace


class Watched(NamedTuple):
    """A forward that was watched."""

    view: Model
    calls: dict[nn.Module, list[Called]]
    input_ids: Tensor
    positions: Tensor
    places: Tensor  # of its tokens in the text, as the cache counts them
    attended: list[Attended]
    spans: list[AttentionSpan]  # of each attention
    logits: Tensor
    hooked: set[nn.Module]  # modules of the view that have hooks in the model
    trace: Trace

    def close(self) -> None:
        """Free the memory of stand-ins and results, which cycles would keep: of an 8B, 0.7 GB."""
        self.calls.clear()
        self.attended.clear()
        self.trace.forget()
        _note_anew()  # modules may have run since
        for module in [*self.view.modules()]:
            vars(module).clear()


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend as `sdpa`, and note the inputs."""
    kept = {name: each for name, each in kwargs.items() if name in ("scaling", "is_causal")}
    out, _ = SDPA(module, query, key, value, attention_mask, **kept)
    noted = _noted.get()
    values = map(noted.trace.value, (query, key, value, out))
    noted.attended.append(Attended._make((module, *values, attention_mask, kwargs)))
    return out, None


def _mask(make: Any, *args: Any, mask_function: _Sees, **kwargs: Any) -> Tensor:
    """Return a mask of an implementation, and note the function that tells what a query sees."""
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    made: Tensor = make(*args, mask_function=mask_function, **kwargs)
    _noted.get().masks.append((made, mask_function))
    return made


AttentionInterface.register(_WATCHED, _attend)
AttentionMaskInterface.register(_WATCHED, partial(_mask, _MASKS["sdpa"]))
AttentionMaskInterface.register(_WRITTEN, partial(_mask, _MASKS["eager"]))


def watch(
    model: Model,
    *,
    is_other: bool = False,
    is_later: bool = False,
    attention: str = _WATCHED,
) -> Watched:
    """Run a short text by a view of a model, with stand-ins for its weights.

    Args:
        model: the model.
        is_other: whether to run another text, of another length and at other positions.
        is_later: whether a cache, which shows none, says that some tokens came before.
        attention: what it attends by; what it writes out, if it calls none of transformers'.

    Raises:
        UnsupportedForwardError: the forward fails, or modules do not run their own code.
    """
    training = [each for each in model.modules() if each.training]
    checkpoints = any(getattr(each, "gradient_checkpointing", False) for each in training)
    require(not checkpoints, "it is in training mode, with gradient checkpointing")
    view = apart(with_attention(with_eager_experts(model), attention))
    # Hooks of the whole model and of its layers are called around jobs.
    hooked: set[nn.Module] = set()
    calls: dict[nn.Module, list[Called]] = {}
    kinds: set[tuple[nn.Module, type]] = set()

    begun: list[tuple[list[Value], int]] = []

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        trace = _noted.get().trace
        trace.inside.append(module)
        begun.append(([*map(trace.value, tensors_of((args, kwargs)))], len(trace.seen)))

    def note(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        trace = _noted.get().trace
        trace.inside.pop()
        made = [*map(trace.value, tensors_of(out))]
        given, first = begun.pop()
        seen = slice(first, len(trace.seen))
        calls.setdefault(module, []).append(Called(args, kwargs, out, given, made, seen))
        kinds.add((module, type(module)))

    for module in view.modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if module is not view and not all(map(does_nothing, hooks)):
            hooked.add(module)
        vars(module).update({name: OrderedDict() for name in HOOKED})
        if module is view and wraps_own_forward(view):
            del view.forward  # which is called around jobs, as hooks are
        forward = vars(module).get("forward", module.forward)
        is_usual = getattr(forward, "__func__", None) is type(module).forward
        require(is_usual, "a module has a forward of its own")
        module.register_forward_pre_hook(begin, with_kwargs=True)
        module.register_forward_hook(note, with_kwargs=True)
    _stand_in(view)
    text = model.config.get_text_config(decoder=True)
    taken = {*placeholders_of(model), getattr(text, "pad_token_id", None)}
    ids = [each for each in range(text.vocab_size // 2, text.vocab_size) if each not in taken]
    # Without the mask, positions that are apart would count as texts that do not see each other.
    ids = ids[::-1] if is_other else ids
    num = len(_OTHERS if is_other else _POSITIONS)
    given = torch.tensor([ids[:num]], dtype=torch.int64, device="cpu")
    inputs = {"input_ids": given, "attention_mask": torch.ones_like(given), "use_cache": False}
    places = torch.arange(num, dtype=torch.int64, device="cpu")[None]
    if is_later:
        cache, places = DynamicCache(config=text), places + _NUM_BEFORE
        vars(cache).update(
            update=lambda keys, values, *_, **__: (keys, values),
            get_seq_length=lambda *_, **__: _NUM_BEFORE,
            get_mask_sizes=lambda num_queries, *_: (num_queries, _NUM_BEFORE),
        )
        inputs |= {CACHE: cache, "attention_mask": None}
    # Some models scale queries by position, from thousands of tokens on; others have embeddings of
    # some thousand positions.
    last = getattr(text, "max_position_embeddings", None) or len(_POSITIONS)
    states = random_states(model.device)
    ways = [_OTHERS if is_other else _POSITIONS]
    ways.append([*range(len(ways[0]) - 2), last - 2, last - 1])
    for numbers in ways:
        positions = torch.tensor([numbers], dtype=torch.int64, device="cpu")
        calls.clear()
        begun.clear()
        trace, masks, attended = _note_anew()
        with Attempt() as attempt, trace:
            output = view(**inputs, position_ids=positions)
            break
    require(attempt.failure is None, f"its forward fails: {attempt.failure}")
    if training and not are_random_states(model.device, states):  # such as dropout
        put_back(model.device, states)
        raise UnsupportedForwardError("it is in training mode, and draws random numbers")
    if not attended and attention == _WATCHED:
        return watch(model, is_other=is_other, is_later=is_later, attention=_WRITTEN)
    attended = attended or [*written_in(trace, [mask for mask, _ in masks])]
    for module in view.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    _note_anew()
    # As PEFT parametrizes what adapters add to, while they run.
    is_usual = all(type(module) is kind for module, kind in kinds)
    require(is_usual, "a module has another class while it runs")
    named = {each for each in _numbers_in(model.config.to_dict()) if 1 < each <= _MOST_KEYS}
    spans = _spans_of(attended, masks, sorted(named))
    of_forward = attended, spans, output.logits, hooked, trace
    return Watched(view, calls, given, positions, places, *of_forward)


# --- what a query sees ----------------------------------------------------------------------------


def _spans_of(
    attended: Sequence[Attended], masks: Sequence[tuple[Tensor, _Sees]], numbers: Sequence[int]
) -> list[AttentionSpan]:
    """Return how far back each attention reaches, in texts beyond all numbers of a config.

    The functions that made its masks are asked. A window may be of thousands of tokens, more than
    a forward of a check can have.
    """
    made = {memory_of(mask): sees for mask, sees in masks}
    known: dict[Any, AttentionSpan] = {}
    found = []
    for each in attended:
        sees = None if each.mask is None else made.get(memory_of(each.mask))
        require(each.mask is None or sees is not None, "its masks are made in another way")
        if sees is None:
            found.append(FULL)
            continue
        if sees not in known:
            with _Beyond():
                known[sees] = _span_of(sees, numbers)
        found.append(known[sees])
    return found


class _Beyond(TorchFunctionMode):
    """Takes what tensors of a mask say of the last token for all tokens behind it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[1], tuple):
            held, indices = args
            pairs = zip(indices, held.shape, strict=False)
            known = (x.clamp(max=size - 1) if isinstance(x, Tensor) else x for x, size in pairs)
            args = held, tuple(known)
        return func(*args, **(kwargs or {}))


def _span_of(sees: _Sees, numbers: Sequence[int]) -> AttentionSpan:
    queries = sorted({number + more for number in numbers for more in (-1, 0, 1)})
    firsts = [_first_seen(sees, query) for query in queries]
    window = queries[-1] + 1 - firsts[-1]
    of_spans = {
        FULL: [0 for _ in queries],
        AttentionSpan(window=window): [max(0, query + 1 - window) for query in queries],
    }
    of_spans |= {AttentionSpan(chunk=num): [q // num * num for q in queries] for num in numbers}
    for span, wanted in of_spans.items():
        if wanted == firsts:
            return span
    raise UnsupportedForwardError("its masks hide other tokens than windows and chunks do")


def _first_seen(sees: _Sees, query: int) -> int:
    """Return the first key that a query sees; it must see all from there on up to itself."""
    none, keys = (
        torch.zeros((1, 1, 1, 1), dtype=torch.int64, device="cpu"),
        torch.arange(query + 2, dtype=torch.int64, device="cpu"),
    )
    seen = sees(none, none, none + query, keys[None, None, None])
    seen = seen.expand(1, 1, 1, len(keys)).flatten()
    first = int(seen.byte().argmax())
    is_span = bool(seen[first:-1].all()) and not bool(seen[-1])
    require(is_span, "its masks hide tokens between those that a query sees")
    return first


def _numbers_in(value: Any) -> Iterator[int]:
    if type(value) is int:
        yield value
    parts = value.values() if isinstance(value, dict) else value
    for each in parts if isinstance(value, dict | list | tuple) else ():
        yield from _numbers_in(each)


# --- stand-ins ------------------------------------------------------------------------------------


class _Noise:
    """Made-up numbers, which many stand-ins share."""

    def __init__(self) -> None:
        self._generator = noise = torch.Generator().manual_seed(0)
        self._normal = torch.randn(_PERIOD, dtype=torch.float32, device="cpu", generator=noise)
        # Of norms, biases and single numbers: apart from 0 and 1, of both signs.
        even = torch.rand(_PERIOD, dtype=torch.float32, device="cpu", generator=noise) * 0.75 + 0.25
        self._even = torch.where(self._normal > 0, even, -even)
        self._written: dict[Any, Tensor] = {}
        self._num = 0

    def among(self, num: int, shape: torch.Size) -> Tensor:
        """Return made-up indices below a number."""
        return torch.randint(num, shape, generator=self._generator, dtype=torch.int64, device="cpu")

    def like(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return numbers of a shape: of a matrix, so large that it keeps the size of states."""
        size = shape.numel()
        cols, is_vector = shape[-1] if len(shape) else 1, len(shape) < 2
        strides = [*torch.empty(shape, dtype=torch.float32, device="meta").stride()]
        if size > _LARGE and len(shape) == 2:
            strides = [_OVERLAP[0], 1]
        elif size > _LARGE:
            strides = [*[_OVERLAP[1]] * (len(shape) - 2), cols, 1]
        num = 1 + sum((each - 1) * step for each, step in zip(shape, strides, strict=True))
        self._num += 1
        start = self._num * 8 * 1009 % _PERIOD
        key = 0 if is_vector else cols, dtype
        written = self._written.get(key)
        if written is None or len(written) < start + num:
            of_all = self._even if is_vector else self._normal * (_GAIN * cols**-0.5)
            written = of_all.to(dtype).repeat(1 + (start + num) // _PERIOD)
            self._written[key] = written
        return written.as_strided(shape, strides, start) if size else written[:0].view(shape)


def _stand_in(view: Model) -> None:
    """Replace the weights of a view by stand-ins, those that are tied by one."""
    noise, made = _Noise(), dict[int, nn.Parameter]()

    def instead(weight: Tensor, shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
        if id(weight) not in made:
            made[id(weight)] = nn.Parameter(noise.like(shape, dtype), requires_grad=False)
        return made[id(weight)]

    for module in view.modules():
        parameters, buffers, kind = module._parameters, module._buffers, type(module)
        if kind in (PackedLinear, PackedEmbedding, PackedConv1D):
            weight: Any = parameters["weight"]
            shape = weight.shape if kind is PackedConv1D else torch.Size(size_of(module))
            parameters["weight"] = instead(weight, shape, torch.float32)
        for name, each in parameters.items():
            if type(each) in (Tensor, nn.Parameter) and _is_wide(each):
                parameters[name] = instead(each, each.shape, each.dtype)
        for name, stack in vars(module).items():
            if type(stack) is PackedStack:
                vars(module)[name] = noise.like(stack.shape, torch.float32)
        for name, each in buffers.items():
            if type(each) is Tensor and _is_wide(each) and _is_one_number(each):
                buffers[name] = noise.like(each.flatten().shape, each.dtype).view(each.shape)
        if kind in PRODUCTS and math.prod(size_of(module)) > _LARGE:
            num, num_inputs = size_of(module)
            factors = noise.like(torch.Size((num, _NUM_ADDED)), torch.float32)
            added = noise.among(num_inputs, factors.shape), factors
            vars(module)["forward"] = partial(_multiplied, module, *added)
        elif kind in (nn.Linear, PackedLinear):
            vars(module)["forward"] = partial(_linear, module)


def _multiplied(module: Any, places: Tensor, factors: Tensor, input: Tensor) -> Tensor:
    """Return sums of some inputs, in the place of a large product."""
    with _DisableTorchDispatch():
        made = (input.float()[..., places] * factors).sum(dim=-1)
        return (made if module.bias is None else made + module.bias).to(input.dtype)


def _linear(module: Any, input: Tensor) -> Tensor:
    """Return the product with a stand-in, as one operation: nothing in it is traced."""
    with _DisableTorchDispatch():
        made = functional.linear(input.to(module.weight.dtype), module.weight, module.bias)
        return made.to(input.dtype)


def size_of(linear: Any) -> tuple[int, int]:
    """Return the numbers of columns and inputs of a linear layer, or of rows of an embedding."""
    if isinstance(linear, Conv1D):
        return linear.nf, linear.nx
    if isinstance(linear, nn.Embedding):
        return linear.num_embeddings, linear.embedding_dim
    return linear.out_features, linear.in_features


def _is_wide(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.itemsize > 1 and not tensor.is_meta


def _is_one_number(buffer: Tensor) -> bool:
    """Return whether all numbers are equal: of ones and zeros, nothing may be seen to come."""
    is_small = 0 < buffer.numel() <= _MOST_ASKED
    return is_small and bool((buffer.nan_to_num() == buffer.nan_to_num().flatten()[0]).all())
