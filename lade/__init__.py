"""Generate faster with any Hugging Face causal LM: no draft model, no training, the same text.

An online n-gram pool drafts how the text may continue; the model verifies the draft in one forward
pass. There are three ways to use it:

    lade.generate(model, **inputs)                          # like model.generate
    model.generate(**inputs, custom_generate=lade.decode)   # as a decoding function of transformers
    lade.wrap(model)                                        # model.generate from now on

`lade.models.load` loads a model and its tokenizer, also an embedded one, which needs no hub. To
read the code, start with `decoder.py`.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from lade._version import __version__ as __version__

if TYPE_CHECKING:
    from lade import drafters as drafters
    from lade import models as models
    from lade.batcher import Batcher as Batcher
    from lade.config import Config as Config
    from lade.config import Lookahead as Lookahead
    from lade.drafting.drafter import Drafter as Drafter
    from lade.drafting.drafter import ForcedTokens as ForcedTokens
    from lade.errors import DrafterWarning as DrafterWarning
    from lade.errors import EagerExecutionWarning as EagerExecutionWarning
    from lade.errors import KernelWarning as KernelWarning
    from lade.errors import LadeError as LadeError
    from lade.errors import PlainDecodingWarning as PlainDecodingWarning
    from lade.errors import UnsupportedModelError as UnsupportedModelError
    from lade.errors import UnsupportedOptionError as UnsupportedOptionError
    from lade.errors import VerificationWarning as VerificationWarning
    from lade.hf.api import decode as decode
    from lade.hf.api import generate as generate
    from lade.hf.api import unwrap as unwrap
    from lade.hf.api import wrap as wrap
    from lade.hf.generation import GenerateOutput as GenerateOutput
    from lade.pools import load_pool as load_pool
    from lade.pools import save_pool as save_pool
    from lade.prewarming.run import Prewarmed as Prewarmed
    from lade.prewarming.run import prewarm as prewarm
    from lade.prewarming.warming import warm_up as warm_up
    from lade.probing.plan import Probe as Probe
    from lade.probing.plan import probe as probe
    from lade.probing.profile import release as release
    from lade.stats import DecodeStats as DecodeStats
    from lade.stats import Step as Step
    from ngram_pool import Draft as Draft
    from ngram_pool import NGramPool as NGramPool

# Imported at first use, so that `lade --help` does not wait for torch.
_HOMES = {
    "lade.batcher": ("Batcher",),
    "lade.config": ("Config", "Lookahead"),
    "lade.drafting.drafter": ("Drafter", "ForcedTokens"),
    "lade.errors": (
        *("DrafterWarning", "EagerExecutionWarning", "KernelWarning", "LadeError"),
        *("PlainDecodingWarning", "UnsupportedModelError", "UnsupportedOptionError"),
        "VerificationWarning",
    ),
    "lade.hf.api": ("decode", "generate", "unwrap", "wrap"),
    "lade.hf.generation": ("GenerateOutput",),
    "lade.pools": ("load_pool", "save_pool"),
    "lade.prewarming.run": ("Prewarmed", "prewarm"),
    "lade.prewarming.warming": ("warm_up",),
    "lade.probing.profile": ("release",),
    "lade.probing.plan": ("Probe", "probe"),
    "lade.stats": ("DecodeStats", "Step"),
    "ngram_pool": ("Draft", "NGramPool"),
}

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(
    [*_HOME_OF, "__version__", "drafters", "models"], key=lambda name: (name.islower(), name)
)


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


if not TYPE_CHECKING:  # type checkers know the names above, and that there are no others

    def __getattr__(name: str) -> Any:
        if name in ("drafters", "models"):
            return import_module(f"lade.{name}")
        if name not in _HOME_OF:
            raise AttributeError(f"module 'lade' has no attribute {name!r}")
        with import_module("lade.garbage").without_collection():
            home = import_module(_HOME_OF[name])
        return globals().setdefault(name, getattr(home, name))


def __dir__() -> list[str]:
    return sorted(__all__)
