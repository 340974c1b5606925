"""Fingerprints that identify checkpoints, independent of dtype and device."""

import hashlib
import json

import torch
from torch import Tensor

from lade.compat import Model, unwrapped

# Config fields with the same name in all versions of transformers; the shapes cover much else.
_FACTS = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "sliding_window")
_MAX_TENSORS = 1024  # spread over the model; more would take more than a few milliseconds
_VALUES_PER_TENSOR = 16


def fingerprint_of(model: Model) -> str | None:
    """Return 64 hexadecimal digits that two models share if they are the same checkpoint.

    Values are sampled from every parameter and rounded to bfloat16, so float32, bfloat16 and
    float64 give the same digits, on every device; float16 does too, unless weights are beyond its
    range or precision. A quantized model counts as another one. Weights that are not in memory, and
    tensor classes that cannot be read in part, are left out. Returns None if no weight is left.
    """
    model = unwrapped(model)
    config = model.config.get_text_config(decoder=True)
    facts = {name: getattr(config, name, None) for name in _FACTS}
    tensors = _readable_tensors(model)
    if not tensors:
        return None
    shapes = [list(tensor.shape) for tensor in tensors]
    described = {"class": type(model).__name__, "config": facts, "shapes": shapes}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
    rounded: dict[torch.device, list[Tensor]] = {}  # one copy per device instead of per tensor
    for tensor in tensors:
        # An odd step, so that the values of a matrix come from different columns.
        step = tensor.numel() // _VALUES_PER_TENSOR | 1
        values = tensor.reshape(-1)[::step][:_VALUES_PER_TENSOR].contiguous()
        if values.is_floating_point():
            rounded.setdefault(values.device, []).append(values.to(torch.bfloat16))
        else:
            digest.update(values.cpu().numpy().tobytes())
    for pieces in rounded.values():
        digest.update(torch.cat(pieces).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _readable_tensors(model: Model) -> list[Tensor]:
    """Return parameters, and integer buffers, where some quantizations keep the weights."""
    buffers = [
        buffer for buffer in model.buffers() if buffer.dim() > 1 and not buffer.is_floating_point()
    ]
    tensors = [tensor.detach() for tensor in (*model.parameters(), *buffers)]
    readable = [
        tensor
        for tensor in tensors
        if type(tensor.data) is Tensor and tensor.device.type != "meta" and tensor.numel()
    ]
    return readable[:: -(-len(readable) // _MAX_TENSORS) or 1]
