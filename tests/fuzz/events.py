"""What happens between calls and during them: a model is changed, a call is nested in another.

Events take a model and return the one to go on with. A case names them in order, each as an
expression; they are applied to a copy of the model that belongs to the case alone.
"""

import math
import pickle
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LogitsProcessor

import lade
from ngram_pool import NGramPool
from tests.fuzz.inside import CACHE, proofs_after, settle, without_compiler
from tests.fuzz.parts import Log, pool_of

# Imported for the expressions of cases.
__all__ = ["proofs_after", "settle"]

GREEDY: dict[str, Any] = {
    "do_sample": False,
    "pad_token_id": 0,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
}


class CannotHappenError(Exception):
    """An event has nothing to act on, or a package that is not there; the case goes on without."""


# --- a call before, which gives lade its verdict ------------------------------------------------


def used(model: Any, rows: Sequence[Sequence[int]]) -> Any:
    """Let lade answer a prompt; the random state stays as it was."""
    ids = torch.tensor(rows)
    options = {"attention_mask": (ids != 0).long(), "max_new_tokens": 5, **GREEDY}
    with torch.random.fork_rng():
        try:
            model.generate(ids, **options)
        except Exception as error:
            raise CannotHappenError(f"used: {type(error).__name__}") from error
        lade.generate(model, ids, pool=pool_of(rows), **options)
    return model


def wrapped(model: Any, rows: Sequence[Sequence[int]], goes_on_with_copy: bool) -> Any:
    """Wrap, answer, and unwrap a model, or a copy that was made of it while it was wrapped."""
    lade.wrap(model, shares_text=True)
    used(model, rows)
    if goes_on_with_copy:
        model = deepcopy(model)
        used(model, rows)
    return lade.unwrap(model)


# --- changes of the model -----------------------------------------------------------------------


def _inner(model: Any) -> Any:
    """Return the transformers model in what PEFT or `torch.compile` made of it."""
    model = without_compiler(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _leaf(model: Any, number: int) -> tuple[str, Any]:
    """Return one of the matrices that states pass through, with its name."""
    leaves = [
        (name, module)
        for name, module in _inner(model).named_modules()
        if not module._modules
        and isinstance(getattr(module, "weight", None), Tensor)
        and module.weight.dim() == 2
        and not isinstance(module, nn.Embedding)
    ]
    if not leaves:
        raise CannotHappenError("the model has no matrix of its own")
    return leaves[number % len(leaves)]


def quantized(model: Any) -> Any:
    """Quantise linear layers in place, activations by the greatest of a whole forward."""
    quantize: Any = torch.ao.quantization.quantize_dynamic
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize(_inner(model), {nn.Linear}, torch.qint8, inplace=True)
    return model


def copied(model: Any, verification: str) -> Any:
    """Go on with a copy."""
    if verification == "deepcopy":
        return deepcopy(model)
    try:
        return pickle.loads(pickle.dumps(model))
    except AttributeError as error:  # a hook of transformers, where outputs were asked for
        raise CannotHappenError("the model cannot be pickled") from error


def compiled(model: Any) -> Any:
    """Go on with what `torch.compile` returns; nothing is compiled before a forward of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is imported only now
        return torch.compile(model)


def converted(model: Any, dtype: str) -> Any:
    """Convert all weights."""
    return model.to(getattr(torch, dtype))


def trained(model: Any) -> Any:
    """Switch dropout on, where there is any."""
    return model.train()


def _noise(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)


def swapped(model: Any, seed: int, assign: bool) -> Any:
    """Load other weights, into those that are there or in their place."""
    inner = _inner(model)
    state = {
        name: value + 0.3 * value.std() * _noise(value, seed)
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2
        else value
        for name, value in inner.state_dict().items()
    }
    inner.load_state_dict(state, assign=assign)
    return model


def degenerate(model: Any, kind: str, number: int) -> Any:
    """Fill a matrix, or all of them, with numbers that tell nothing, and keep its own."""
    leaves = {id(each): each for each in (_leaf(model, number + i)[1] for i in range(12))}
    chosen = [*leaves.values()] if number % 3 == 0 else [_leaf(model, number)[1]]
    for leaf in chosen:
        if not leaf.weight.is_floating_point():
            raise CannotHappenError("the weights are blocks of a file")
        with torch.no_grad():
            leaf.kept_by_a_test = leaf.weight.detach().clone()
            if kind == "huge":
                leaf.weight.mul_(1e25)
            elif kind == "one nan":
                leaf.weight[-1, -1] = math.nan
            else:
                leaf.weight.fill_({"zero": 0.0, "equal": 0.125}[kind])
    return model


def regenerated(model: Any) -> Any:
    """Give matrices their own numbers again, in place."""
    for module in model.modules():
        if "kept_by_a_test" in vars(module):
            with torch.no_grad():
                module.weight.copy_(module.kept_by_a_test)
            del module.kept_by_a_test
    return model


def exchanged(model: Any, number: int) -> Any:
    """Put another module in the place of one."""
    name, leaf = _leaf(model, number)
    other = deepcopy(leaf)
    with torch.no_grad():
        other.weight.copy_(leaf.weight.flip(0))  # which may be blocks of a file
    parent, _, child = name.rpartition(".")
    setattr(_inner(model).get_submodule(parent), child, other)
    return model


# Hooks are applied to states [rows, tokens, size] alone: what flattens rows would make each depend
# on which others are there.


def _distorted(states: Tensor) -> Tensor:
    """Rotate states as well: a norm behind them takes a factor away but for rounding."""
    return 1.5 * states.roll(1, -1)


def _on_the_last_position(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    if output.dim() != 3:
        return output
    return torch.cat([output[:, :-1], _distorted(output[:, -1:])], dim=1)


def _on_single_tokens(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return _distorted(output) if output.dim() == 3 and output.shape[1] == 1 else output


_HOOKS: dict[str, Callable[..., Any]] = {
    "last": _on_the_last_position,
    "single": _on_single_tokens,
}


def hooked(model: Any, kind: str, number: int) -> Any:
    """Register a hook that only the newest token sees, or only single tokens see."""
    _leaf(model, number)[1].register_forward_hook(_HOOKS[kind])
    return model


def unhooked(model: Any) -> Any:
    """Remove the hooks of `hooked`."""
    for module in model.modules():
        hooks = module._forward_hooks
        for key in [key for key, hook in hooks.items() if hook in _HOOKS.values()]:
            del hooks[key]
    return model


def adapted(model: Any, kind: str, seed: int) -> Any:
    """Add a random adapter: of PEFT, around the model, or `own`, by transformers in the model."""
    try:
        import peft
    except Exception as error:  # a package of its own may be missing, too
        raise CannotHappenError("peft cannot be imported") from error
    names = sorted({_leaf(model, number)[0].rpartition(".")[2] for number in range(12)})
    names = [name for name in names if "head" not in name and "embed_out" not in name]
    prompt: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    lora: dict[str, Any] = {"r": 2, "target_modules": names, "init_lora_weights": False}
    make: dict[str, Callable[[], Any]] = {
        "lora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", **lora),
        "ia3": lambda: peft.IA3Config(
            task_type="CAUSAL_LM",
            target_modules=names,
            feedforward_modules=[],
            init_ia3_weights=False,
        ),
        "prompt": lambda: peft.PromptTuningConfig(**prompt),
        "prefix": lambda: peft.PrefixTuningConfig(**prompt),
        "own": lambda: peft.LoraConfig(**lora),
    }
    dtype = model.dtype
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        try:
            if kind == "own":
                model.add_adapter(make[kind]())
            else:
                model = peft.get_peft_model(model, make[kind]())
        except Exception as error:  # PEFT does not know the model
            raise CannotHappenError(f"adapted {kind}: {type(error).__name__}") from error
    return model.to(dtype).eval()


def unadapted(model: Any) -> Any:
    """Take the adapter off again."""
    if hasattr(model, "get_base_model"):
        try:
            return model.unload()
        except AttributeError:  # prompts are no layers
            return model.get_base_model()
    if not getattr(model, "_hf_peft_config_loaded", False):
        raise CannotHappenError("there is no adapter")
    model.disable_adapters()
    return model


class _Failing:
    """Raises in forwards of several tokens behind a cache, which plain decoding never runs."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        cached = kwargs.get(CACHE)
        if ids is None or ids.shape[1] == 1 or cached is None or cached.get_seq_length() == 0:
            return
        self.after -= 1
        if self.after < 0:
            raise RuntimeError("no memory for several tokens")


def failing(model: Any, after: int) -> Any:
    """Make forwards that verify drafts fail, after the first few."""
    _inner(model).register_forward_pre_hook(_Failing(after), with_kwargs=True)
    return model


# --- what lade knows of a model -----------------------------------------------------------------


def random_table(seed: int, vocab_size: int) -> Any:
    """Return a table as `lade.prewarm` makes it, of random contents."""
    rng = np.random.default_rng(seed)
    table = NGramPool(seed=0)
    contexts = rng.integers(0, vocab_size, (40, 2))
    contexts[:20, 0] = -1  # behind single tokens
    contexts = np.unique(contexts, axis=0)
    shape = len(contexts), min(4, vocab_size)
    token_ids = np.stack([rng.permutation(vocab_size)[: shape[1]] for _ in contexts])
    probs = np.sort(rng.dirichlet(np.ones(shape[1] + 1), len(contexts))[:, 1:])[:, ::-1]
    table.harvest(contexts, token_ids, np.ascontiguousarray(probs))
    return SimpleNamespace(path=None, pool=table.as_read_only())


# --- calls inside of calls ----------------------------------------------------------------------

_PROMPT = ((1, 1, 1, 1),)  # every vocabulary has it


def _answer(model: Any, kind: str, pool: Any = None) -> list[list[int]]:
    ids = torch.tensor(_PROMPT)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, **GREEDY}
    if kind == "forward":
        with torch.no_grad():
            return without_compiler(model)(ids).logits[:, -1:].argmax(-1).tolist()  # type: ignore[no-any-return]
    if kind == "lade":
        return lade.generate(model, ids, pool=pool, **options).tolist()  # type: ignore[no-any-return]
    return model.generate(ids, **options).tolist()  # type: ignore[no-any-return]


class NestedStep:
    """An `on_step` that calls the model, and asserts that it answers as it does outside."""

    def __init__(self, model: Any, kind: str, pool: Any = None) -> None:
        self.model = model
        self.kind = kind
        self.pool = pool
        self.expected = _answer(model, "forward" if kind == "forward" else "generate")
        self.num_steps = 0

    def __call__(self, step: Any) -> None:
        self.num_steps += 1
        if self.num_steps % 3 == 1:
            got = _answer(self.model, self.kind, self.pool)
            assert got == self.expected, f"nested in on_step: {self.expected} became {got}"


class NestedProcessor(LogitsProcessor):  # type: ignore[misc]
    """Asks the model at every third call, and prefers what it answers."""

    def __init__(self, log: Log, model: Any, kind: str) -> None:
        self.log = log.setdefault("NestedProcessor", [])
        self.model = model
        self.kind = kind

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = None
        if len(self.log) % 3 == 0:
            answer = _answer(self.model, self.kind)
            scores = scores.clone()
            scores[:, answer[0][-1]] += 1.5
        self.log.append(answer)
        return scores
