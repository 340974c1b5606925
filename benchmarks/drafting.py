"""How drafts are sized and verified, where a measurement fixes it: options of `run`."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from lade.cli.options import LearningOptions, of_drafting
from lade.config import Config


class Verification(StrEnum):
    """Verification methods, those of `lade.config.VERIFICATIONS`."""

    tree = "tree"
    chain = "chain"
    snapshot = "snapshot"
    plain = "plain"


@dataclass(frozen=True)
class MeasuredOptions(LearningOptions):
    """As `LearningOptions`, with a number of draft tokens and a way of verifying."""

    first_layers: Annotated[
        int | None, of_drafting(min=1, help="Let the first N layers of the model draft, too.")
    ] = None
    max_draft_tokens: Annotated[
        int | None,
        of_drafting(
            min=0,
            help="Verify up to N draft tokens in every step. Without it, the measured time of "
            "steps decides.",
        ),
    ] = None
    verification: Annotated[
        Verification | None,
        of_drafting(
            metavar="NAME",
            help="Verify drafts by this method; without it, by the best that is exact. One that "
            "is not exact is refused.",
        ),
    ] = None

    @property
    def config(self) -> Config:
        """The configuration that they make."""
        asked: Any = None if self.verification is None else self.verification.value
        return Config(max_draft_tokens=self.max_draft_tokens, verification=asked)
