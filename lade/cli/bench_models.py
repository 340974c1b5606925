"""The models that draft in `lade bench run`: `--assistant` and `--first-layers`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lade.cli.drafting import load_beside, num_layers_of

if TYPE_CHECKING:
    from lade.bench.baselines import DraftModels
    from lade.models.loading import LoadedModel

_INT8 = ":int8"
_SELF = "self"


def check_models(
    methods: Sequence[str], assistant: str | None, first_layers: str | None
) -> int | None:
    """Return the number of first layers; raise where methods lack a model, or a model a method.

    Raises:
        ValueError: they do, or the number is none.
    """
    from lade.bench.methods import METHODS

    num_layers = num_layers_of(first_layers)
    with_assistant = [name for name in methods if METHODS[name].needs_assistant]
    if with_assistant and assistant is None:
        raise ValueError(f"expected --assistant with {with_assistant[0]} in --methods, got none")
    if assistant is not None and not with_assistant:
        known = [name for name, info in METHODS.items() if info.needs_assistant]
        raise ValueError(f"expected one of {', '.join(known)} in --methods with --assistant")
    exiting = [name for name in methods if METHODS[name].needs_num_layers]
    if exiting and num_layers is None:
        raise ValueError(f"expected --first-layers N with {exiting[0]} in --methods, got no number")
    if first_layers is not None and not any(METHODS[name].uses_num_layers for name in methods):
        known = [name for name, info in METHODS.items() if info.uses_num_layers]
        raise ValueError(f"expected one of {', '.join(known)} in --methods with --first-layers")
    return num_layers


def load_models(
    loaded: "LoadedModel", assistant: str | None, num_layers: int | None, trust_remote_code: bool
) -> "DraftModels":
    """Load what drafts for a model, with its tokenizers where its vocabulary is another."""
    from lade.bench.baselines import DraftModels

    if assistant is None:
        return DraftModels(num_layers=num_layers)
    name = assistant.removesuffix(_INT8)
    other = loaded if name == _SELF else load_beside(loaded, name, trust_remote_code)
    model, tokenizers = other.model, (None, None)
    if other.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        tokenizers = (other.tokenizer, loaded.tokenizer)
    if assistant.endswith(_INT8):
        from lade.bench.quantized import int8_copy

        model = int8_copy(model)
    return DraftModels(model, *tokenizers, num_layers)
