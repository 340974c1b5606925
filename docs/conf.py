"""How the site is built: Sphinx with Furo and MyST, the reference from the code itself."""

import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

import figures  # of this folder

from lade import __version__

_ATTRIBUTES = ("attribute", "property")
_kept: dict[str, list[str]] = {}

project = "lade"
author = "The lade developers"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "results", "support", "prompts"]
smartquotes = False  # they would turn options such as --json into prose
html_theme = "furo"
html_title = f"lade {release}"
html_show_sphinx = False
html_show_copyright = False

myst_heading_anchors = 3

# Docstrings put code in single backticks.
default_role = "code"
autodoc_default_options = {"members": True, "member-order": "bysource", "undoc-members": True}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_use_rtype = False
napoleon_use_ivar = True  # fields stand in the docstring of their class, for help() too
python_use_unqualified_type_names = True

# Every reference to a name of ours must resolve, if it is public.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!lade\.|ngram_pool\.).*"),  # names of others
    ("py:.*", r"(lade|ngram_pool)\.[a-z_.]+\.\w+"),  # annotations name the module they stand in
]


def setup(app: Sphinx) -> None:
    """Draw plots before pages are read."""
    app.connect("builder-inited", _draw)
    app.connect("autodoc-process-docstring", _keep_attributes, priority=100)
    app.connect("autodoc-process-docstring", _restore_attributes, priority=900)


def _draw(app: Sphinx) -> None:
    figures.draw(Path(app.srcdir) / "plots")


# Napoleon takes what stands before the first colon of an attribute's text for its type.
def _keep_attributes(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    if what in _ATTRIBUTES:
        _kept[name] = [*lines]


def _restore_attributes(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    if what in _ATTRIBUTES:
        # What Python says of the fields of a named tuple.
        lines[:] = [line for line in _kept.pop(name) if "Alias for field number" not in line]
