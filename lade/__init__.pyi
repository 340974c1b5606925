"""What `lade` exports: the list that `__init__.py` reads, and that type checkers see."""

from lade import drafters as drafters
from lade import models as models
from lade._version import __version__ as __version__
from lade.batcher import Batcher as Batcher
from lade.config import Config as Config
from lade.drafting.drafter import Drafter as Drafter
from lade.drafting.drafter import ForcedTokens as ForcedTokens
from lade.errors import DrafterWarning as DrafterWarning
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
from lade.hf.pool_files import load_pool as load_pool
from lade.hf.pool_files import save_pool as save_pool
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

__all__: list[str]
