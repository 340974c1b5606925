"""Makes README's relative links absolute for PyPI, which has no files to link to."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]+)\]\((?![a-z]+:|#)([^)]+)\)")


class ReadmeHook(MetadataHookInterface):  # type: ignore[misc]
    """Fills in the field `readme`, which pyproject.toml leaves to it."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme`."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_links(text, source)}


def with_links(text: str, source: str | None) -> str:
    """Return Markdown with relative links and images made absolute.

    Args:
        text: the Markdown.
        source: of `[project.urls]`: the repository's address, as GitHub has it; None for no links
            and no images.
    """

    def make(match: re.Match[str]) -> str:
        mark, words, path = match.groups()
        if source is None:
            return "" if mark else words
        # Images: GitHub's `blob` is a page about a file, `raw` the file itself.
        return f"{mark}[{words}]({source.rstrip('/')}/{'raw' if mark else 'blob'}/main/{path})"

    return _LINK.sub(make, text)
