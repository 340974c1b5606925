"""What transformers calls in place of `model.generate`; the implementation is in lade."""

from typing import Any

try:  # Unguarded, transformers would advise `pip install lade`, which is another package.
    import lade
except ImportError as error:
    raise ImportError("this decoding method needs: pip install lade-decoding") from error


def generate(
    inputs: Any = None,
    generation_config: Any = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    *,
    model: Any,
    **kwargs: Any,
) -> Any:
    """Generate as `model.generate` does, in fewer forward passes.

    transformers passes `model` by name, so the others can be passed by position where this function
    is the `generate` of a model whose folder contains it.

    Args:
        inputs: this and the next three are the parameters of `model.generate`, in its order.
        generation_config: as for `model.generate`.
        logits_processor: as for `model.generate`.
        stopping_criteria: as for `model.generate`.
        model: the model that writes.
        kwargs: the rest of `model.generate`; `pool`, `config` and `on_step` of `lade.generate`.
    """
    return lade.generate(
        model,
        inputs=inputs,
        generation_config=generation_config,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        **kwargs,
    )
