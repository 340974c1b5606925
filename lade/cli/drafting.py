"""Models that draft beside the pool: `--assistant` and `--first-layers`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lade.stats import SourceStats

if TYPE_CHECKING:
    from lade.drafting.drafter import Drafter
    from lade.models.loading import LoadedModel


class Drafting(NamedTuple):
    """What is asked for beside the pool."""

    assistant: str | None = None  # a model id, a folder or an embedded model
    first_layers: int | None = None
    trust_remote_code: bool = False

    def check(self, verification: str | None) -> None:
        """Raise before a model is loaded if what is asked for cannot be.

        Raises:
            ValueError: nothing is to be drafted.
        """
        if verification == "plain" and (self.assistant or self.first_layers):
            raise ValueError(
                "expected no --assistant or --first-layers with --verification plain, which drafts "
                "nothing"
            )

    def make(self, loaded: "LoadedModel") -> "Drafter | None":
        """Return what drafts for a model together with its pool; None for the pool alone."""
        from lade.drafters import AssistantModel, CallPool, FirstLayers, Merged

        parts: list[Any] = []
        if self.assistant is not None:
            other = load_beside(loaded, self.assistant, self.trust_remote_code)
            parts.append(
                AssistantModel(other.model, other.tokenizer, target_tokenizer=loaded.tokenizer)
            )
        if self.first_layers is not None:
            parts.append(FirstLayers(self.first_layers))
        return Merged([CallPool(), *parts]) if parts else None


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
