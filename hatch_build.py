"""Makes README's relative links absolute for PyPI, which has no files to link to."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)]+)\)")


class ReadmeHook(MetadataHookInterface):  # type: ignore[misc]
    """Fills in the field `readme`, which pyproject.toml leaves to it."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme`."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_links(text, source)}


def with_links(text: str, source: str | None) -> str:
    """Return Markdown with relative links made absolute, or where there is no home, their words.

    Args:
        text: the Markdown.
        source: of `[project.urls]`: the repository's address, as GitHub has it.
    """
    if source is None:
        return _LINK.sub(r"\1", text)
    return _LINK.sub(rf"[\1]({source.rstrip('/')}/blob/main/\2)", text)
