"""How the site is built: Sphinx with Furo and MyST, whose pages read the same on GitHub."""

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
