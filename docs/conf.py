"""How the site is built: Sphinx with Furo and MyST, whose pages read the same on GitHub."""

import re

from sphinx.application import Sphinx

from lade import __version__

project = "lade"
author = "The lade developers"
copyright = author
version = release = __version__

extensions = ["myst_parser"]
exclude_patterns = ["_build", "results", "support", "prompts"]
smartquotes = False  # they would turn options such as --json into prose
html_theme = "furo"
html_title = f"lade {release}"
html_show_sphinx = False
html_show_copyright = False

myst_heading_anchors = 4


def setup(app: Sphinx) -> None:
    """Make the sidebar of the lists in `index.md`, which GitHub shows as they are."""
    app.connect("source-read", _with_sidebar)


def _with_sidebar(app: Sphinx, page: str, source: list[str]) -> None:
    if page != "index":
        return
    for section in source[0].split("\n## ")[1:]:
        caption, _, text = section.partition("\n")
        pages = "\n".join(re.findall(r"^- \[.*?\]\((.*?)\.md\)", text, re.MULTILINE))
        if not pages:
            continue
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"
