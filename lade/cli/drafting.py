"""Models that draft beside the pool: `--assistant` and `--first-layers`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lade.stats import SourceStats

if TYPE_CHECKING:
    from lade.drafting.drafter import CallDrafter
    from lade.models.loading import LoadedModel

MEASURED = "auto"  # of --first-layers


class Drafting(NamedTuple):
    """What is asked for beside the pool."""

    assistant: str | None = None  # a model id, a folder or an embedded model
    first_layers: str | None = None  # a number, or `MEASURED`
    trust_remote_code: bool = False

    def check(self, verification: str | None) -> None:
        """Raise before a model is loaded if what is asked for cannot be.

        Raises:
            ValueError: it is no number of layers, or nothing is to be drafted.
        """
        num_layers_of(self.first_layers)
        if verification == "plain" and (self.assistant or self.first_layers):
            raise ValueError(
                "expected no --assistant or --first-layers with --verification plain, which drafts "
                "nothing"
            )

    def make(self, loaded: "LoadedModel") -> "CallDrafter | None":
        """Return what drafts for a model together with its pool; None for the pool alone."""
        from lade.drafters import AssistantModel, CallPool, FirstLayers, Merged

        parts: list[Any] = []
        if self.assistant is not None:
            other = load_beside(loaded, self.assistant, self.trust_remote_code)
            parts.append(
                AssistantModel(other.model, other.tokenizer, target_tokenizer=loaded.tokenizer)
            )
        if self.first_layers is not None:
            parts.append(FirstLayers(num_layers_of(self.first_layers)))
        return Merged([CallPool(), *parts]) if parts else None


def num_layers_of(text: str | None) -> int | None:
    """Return the number of --first-layers; None for a measured one.

    Raises:
        ValueError: it is neither.
    """
    if text is None or text == MEASURED:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"expected --first-layers of 1 or more, or {MEASURED}, got {text!r}")
    return int(text)


def load_beside(loaded: "LoadedModel", name: str, trust_remote_code: bool) -> "LoadedModel":
    """Load another model where one is, in the same number format."""
    from lade.cli.loading import load_with_progress

    dtype = str(loaded.model.dtype).removeprefix("torch.")
    return load_with_progress(name, str(loaded.model.device), dtype, None, trust_remote_code)


def sources_text(sources: Mapping[str, SourceStats]) -> str:
    """Describe what each source of drafts did; empty where drafts have one source."""
    parts = [
        f"{name} {each.num_accepted_tokens:,} of {each.num_draft_tokens:,} in {each.sec:.2f} s"
        for name, each in sources.items()
    ]
    return f"accepted of drafted: {', '.join(parts)}" if parts else ""
