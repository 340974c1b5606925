"""What must be as before, whatever happened to a call."""

import os
import tempfile
import threading
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import AttentionInterface, AttentionMaskInterface

from tests.ngram_pool.checking import check_pool
from tests.stress.uses import Use

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")


def state_of(use: Use) -> dict[str, Any]:
    """Return all that a call must leave as it was, by what it is."""
    model = use.model
    state: dict[str, Any] = {
        "generate": id(vars(model).get("generate")),
        "config": repr(model.config),
        "attention": model.config._attn_implementation,
        "generation config": repr(model.generation_config),
        "weights": [(id(weight), weight._version) for weight in model.parameters()],
        "class": [id(getattr(type(model), name)) for name in ("forward", "generate", "_sample")],
    }
    for name, module in model.named_modules():
        state[f"{name}: training"] = module.training
        state[f"{name}: attributes"] = sorted(vars(module))
        state[f"{name}: forward"] = id(vars(module).get("forward"))
        state[f"{name}: hooks"] = [sorted(getattr(module, hooks)) for hooks in _HOOKS]
    if use.keeps_random_state:
        state["random state"] = hash(torch.get_rng_state().numpy().tobytes())
    return state | _of_process()


def _of_process() -> dict[str, Hashable]:
    """Return what torch, transformers and the system keep for all, or for this thread."""
    files = Path("/proc/self/fd")
    hooks = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    return {
        "global hooks": tuple(map(tuple, hooks)),
        "attention functions": (*AttentionInterface().valid_keys(),),
        "mask functions": (*AttentionMaskInterface().valid_keys(),),
        "dtype": torch.get_default_dtype(),
        "torch threads": torch.get_num_threads(),
        "threads": threading.active_count(),
        "files": len(os.listdir(files)) if files.exists() else 0,
        "temporary files": tuple(sorted(Path(tempfile.gettempdir()).glob("*lade*"))),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "function modes": len(_get_current_function_mode_stack()),  # type: ignore[no-untyped-call]
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
    }


def damage(use: Use, before: dict[str, Any]) -> list[str]:
    """Return what is not as it was, or not sound."""
    now, pool = state_of(use), use.pool
    found = [f"{name} differs" for name in before | now if before.get(name) != now.get(name)]
    if pool is None:
        return found
    drafting = threading.Thread(target=pool.draft, args=([1], 1), daemon=True)
    drafting.start()
    drafting.join(5)
    if drafting.is_alive():
        return [*found, "the lock of the pool is taken"]
    try:
        check_pool(pool)
    except AssertionError as error:
        found.append(f"the pool is not sound: {error!r}")
    return found


def answers(use: Use) -> list[str]:
    """Call once more; return what is wrong with the answer."""
    try:
        got = use.call()
    except BaseException as error:
        return [f"the next call raised {type(error).__name__}: {str(error)[:200]}"]
    return [] if got == use.expected else ["the next answer is wrong"]
