"""The private functions of transformers that lade calls, and no others.

Where a public function does, that one is called. These are tested on the oldest and the newest
supported version.
"""

from typing import Any

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


def attention_of(model: Model) -> str | None:
    """Return the name of the text part's own attention implementation."""
    name: str | None = model.config.get_text_config(decoder=True)._attn_implementation
    return name


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
    """Tell whether something is called with each forward of a module, by torch or by accelerate."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all(map(is_own_hook, hooks)) or hasattr(module, "_hf_hook")


def is_own_hook(hook: Any) -> bool:
    """Tell whether a hook is one that transformers leaves behind to gather outputs.

    It does something only where outputs are asked for.
    """
    return getattr(hook, "__module__", "").startswith("transformers.utils.")


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
