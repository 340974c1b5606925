"""The private functions of transformers that lade calls, and no others.

Where a public function does, that one is called. These are tested on the oldest and the newest
supported version. Next file: `rollback.py`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from lade.attention import PACKED_SDPA

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
    """Return the name of the attention implementation of the text part."""
    return _own_name(model.config.get_text_config(decoder=True)._attn_implementation)


def attentions_of(model: Model) -> dict[str, str | None]:
    """Return the attention of all parts, in the form that `set_attn_implementation` takes."""
    config = model.config
    names = {"": _own_name(config._attn_implementation)}
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            names[name] = _own_name(part._attn_implementation)
    return names


def _own_name(attention: str | None) -> str | None:
    """Return the model's own attention, also while another thread verifies trees with ours."""
    return "sdpa" if attention == PACKED_SDPA else attention


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
