"""Generate faster with any Hugging Face causal LM: no draft model, no training, the same text.

An online n-gram pool drafts how the text may continue; the model verifies the draft in one forward
pass. There are three ways to use it:

    lade.generate(model, **inputs)                          # like model.generate
    model.generate(**inputs, custom_generate=lade.decode)   # as a decoding function of transformers
    lade.wrap(model)                                        # model.generate from now on

`lade.models.load` loads a model and its tokenizer, also an embedded one, which needs no hub. To
read the code, start with `decoder.py`.
"""

import ast
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

# Imported at first use, so that `lade --help` does not wait for torch. `__init__.pyi` lists them.
_HOME_OF = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_bytes()).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = sorted(_HOME_OF, key=lambda name: (name.islower(), name))


def _refuse_older_lade() -> None:
    """Raise if the Lookahead Decoding package, which imports as `lade` too, is installed."""
    try:
        version = metadata.version("lade")
    except metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"the distribution 'lade' {version} (Lookahead Decoding) is installed beside "
        "'lade-decoding'; both import as 'lade' and overwrite each other's files. Keep one: "
        "pip uninstall -y lade lade-decoding && pip install lade-decoding"
    )


_refuse_older_lade()


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'lade' has no attribute {name!r}")
    if home == "lade":
        return import_module(f"lade.{name}")
    with import_module("lade.machine.garbage").without_collection():
        found = getattr(import_module(home), name)
    return globals().setdefault(name, found)


def __dir__() -> list[str]:
    return sorted(__all__)
