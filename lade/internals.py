"""The private functions of transformers that lade calls, and no others.

Where a public function does, that one is called. These are tested on the oldest and the newest
supported version. Next file: `rollback.py`.
"""

from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

Model = Any  # a transformers PreTrainedModel with generate; transformers is untyped here


def prefill(
    model: Model, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Any:
    """Run prompts as `generate` does.

    It knows how a prompt whose beginning is cached is sliced, feeds embeddings and images, and cuts
    long prompts into chunks.
    """
    return model._prefill(input_ids, config, dict(model_kwargs))


def decode_plainly(
    model: Model,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
) -> Any:
    """Do what `generate` does where it is given no custom function: one token a forward."""
    return model._sample(
        input_ids,
        logits_processor=processors,
        stopping_criteria=criteria,
        generation_config=config,
        streamer=streamer,
        **model_kwargs,
    )


class _Switched(NamedTuple):
    """A model's own attention while calls, of several threads it may be, use another one."""

    of_text: str | None
    of_parts: dict[str, str | None]
    num_calls: int


_switching = Lock()


def attention_of(model: Model) -> str | None:
    """Return the name of the text part's own attention implementation."""
    switched: _Switched | None = getattr(model, "_lade_switched", None)
    if switched is not None:
        return switched.of_text
    name: str | None = model.config.get_text_config(decoder=True)._attn_implementation
    return name


def switch_attention(model: Model, attention: str) -> None:
    """Let a model use another attention implementation, until it is switched back as often."""
    with _switching:
        switched: _Switched | None = getattr(model, "_lade_switched", None)
        if switched is None:
            switched = _Switched(attention_of(model), _attentions_of(model), 0)
            model.set_attn_implementation(attention)
        model._lade_switched = switched._replace(num_calls=switched.num_calls + 1)


def switch_attention_back(model: Model) -> None:
    """Give a model its own attention back, once nobody uses another one any more."""
    with _switching:
        switched: _Switched = model._lade_switched
        if switched.num_calls > 1:
            model._lade_switched = switched._replace(num_calls=switched.num_calls - 1)
        else:
            model.set_attn_implementation(switched.of_parts)
            del model._lade_switched


def _attentions_of(model: Model) -> dict[str, str | None]:
    """Return the attention of all parts, in the form that `set_attn_implementation` takes."""
    config = model.config
    names = {"": config._attn_implementation}
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            names[name] = part._attn_implementation
    return names


def runs_experts_eagerly(model: Model) -> bool:
    """Tell whether a model loops over the experts that tokens are routed to, on the host.

    That is where transformers has other implementations of its experts, and this one is in use.
    """
    can_choose = getattr(model, "_can_set_experts_implementation", None)
    if can_choose is None or not can_choose():
        return False
    return "eager" in model.get_experts_implementation().values()


def has_adapters(model: Model) -> bool:
    """Tell whether a model has adapters of PEFT, its own or those around it."""
    return getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config")


def has_hook(module: nn.Module) -> bool:
    """Tell whether something is called with each forward of a module, by torch or by accelerate.

    transformers leaves hooks of its own behind, which gather outputs when they are asked for; lade
    looks at the ends of prompts. Neither has to be called for a step.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ignored = ("transformers.utils.", "lade.")
    is_hooked = any(not getattr(hook, "__module__", "").startswith(ignored) for hook in hooks)
    return is_hooked or hasattr(module, "_hf_hook")


def without_compiler(model: Model) -> Model:
    """Return the model inside of what `torch.compile` returned; `generate` runs that one too."""
    return getattr(model, "_orig_mod", model)


def device_of_inputs(model: Model) -> torch.device:
    """Return where token ids go; what accelerate has put elsewhere is brought in by its hooks."""
    if model.device.type != "meta":
        device: torch.device = model.device
        return device
    for module in model.modules():
        hooked = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if hooked is not None:
            return torch.device(hooked)
    return torch.device("cpu")


def mesh_of(model: Model) -> Any:
    """Return the device mesh of a tensor-parallel model, None of any other."""
    is_parallel = (getattr(model, "_tp_size", None) or 1) > 1
    return getattr(model, "_device_mesh", None) if is_parallel else None
