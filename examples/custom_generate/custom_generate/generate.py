"""What transformers calls in place of `model.generate`; all of it is in the package lade."""

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
    """Generate as `model.generate` does, with fewer forwards.

    `model` comes by name, as transformers gives it. So the others can come by place, where this
    function is the `generate` of a model whose folder holds it.

    Args:
        inputs: this and the next three are the parameters of `model.generate`, in its order.
        generation_config: see there.
        logits_processor: see there.
        stopping_criteria: see there.
        model: the model that writes.
        kwargs: what else `model.generate` takes; `pool`, `config` and `on_step` of `lade.generate`.
    """
    return lade.generate(
        model,
        inputs=inputs,
        generation_config=generation_config,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        **kwargs,
    )
