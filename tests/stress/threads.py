"""Threads that share a model and call at once."""

import sys
import threading
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

import lade
from lade.compat import attention_of
from tests.lade.tiny import BatchDrafter, tiny_model
from tests.support.tiny import tiny_model as tiny_architecture

KINDS = ("gemma2", "flash", "flex", "sdpa")
_SWITCH_SEC = 1e-5  # between threads, for races to be likely
_NUM_NEW = 8
_MOST_TOLD = 20


@dataclass
class Result:
    """What became of the calls."""

    calls: int = 0
    raised: int = 0
    wrong: int = 0
    left: int = 0
    told: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _flash_like(*args: Any, **kwargs: Any) -> Any:
    """Attention that knows no 4D mask, as flash attention: it sees all that comes before."""
    module, query, key, value, _ = args[:5]
    kwargs = {name: kwargs[name] for name in ("dropout", "scaling") if name in kwargs}
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    return AttentionInterface()["sdpa"](module, query, key, value, mask[None, None], **kwargs)


AttentionInterface.register("causal_only", _flash_like)


def _model(kind: str) -> tuple[Any, lade.Config]:
    steady = lade.Config(max_draft_tokens=8)
    if kind == "gemma2":
        model = tiny_architecture("gemma2", seed=0, attention="eager", dtype=torch.float32)
        return model, lade.Config(stable_text=True, max_draft_tokens=7)
    attention = {"flash": "causal_only", "flex": "flex_attention", "sdpa": "sdpa"}[kind]
    model = tiny_model("llama", seed=1, dtype=torch.float32, attention="sdpa")
    model.set_attn_implementation(attention)
    return model, steady


def call_from_threads(kind: str, num_calls: int, num_threads: int) -> Result:
    """Let threads call lade at once, each with prompts and drafts of its own."""
    model, config = _model(kind)
    model.generation_config.eos_token_id = None
    prompts = [torch.tensor([[5 + i, 6, 7, 5 + i, 6, 7, 5 + i]]) for i in range(num_threads)]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": _NUM_NEW, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(prompts[0])
    answers = [model.generate(prompt, **options).tolist() for prompt in prompts]
    attention, threads_before = attention_of(model), threading.active_count()
    lock, result = threading.Lock(), Result()

    def call(place: int, seed: int) -> None:
        drafter = BatchDrafter(answers[place], np.random.default_rng(seed), accept=0.8)
        found = None
        try:
            got = lade.generate(model, prompts[place], drafter=drafter, config=config, **options)
        except Exception as error:
            found, what = "raised", f"{type(error).__name__}: {str(error)[:300]}"
        else:
            if got.tolist() != answers[place]:
                found, what = "wrong", str(got.tolist())
        with lock:
            result.calls += 1
            if found is not None:
                setattr(result, found, getattr(result, found) + 1)
                if len(result.told) < _MOST_TOLD:
                    result.told.append(f"{found}: {what}")

    def work(place: int) -> None:
        for seed in range(place, num_calls, num_threads):
            call(place, seed)

    for seed in range(3 * num_threads):  # the model is checked, and what is compiled is compiled
        call(seed % num_threads, seed)
    result.calls = 0
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SEC)
    try:
        threads = [threading.Thread(target=work, args=(place,)) for place in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    hooks = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    for what, is_as_before in {
        "attention": attention_of(model) == attention,
        "training": not model.training,
        "hooks": all(_is_of_transformers(module) for module in hooks),
        "threads": threading.active_count() == threads_before,
    }.items():
        if not is_as_before:
            result.left += 1
            result.told.append(f"left: {what} differ")
    return result


def _is_of_transformers(module: Any) -> bool:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return all(getattr(hook, "__module__", "").startswith("transformers") for hook in hooks)
