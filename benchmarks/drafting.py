"""How drafts are sized and verified, where a measurement fixes it: options of `run`."""

from dataclasses import dataclass
from typing import Annotated, Any

from lade.cli.options import LearningOptions, of_drafting
from lade.config import VERIFICATIONS, Config
from lade.errors import UserError


@dataclass(frozen=True)
class MeasuredOptions(LearningOptions):
    """As `LearningOptions`, with a number of draft tokens and a way of verifying."""

    max_draft_tokens: Annotated[
        int | None,
        of_drafting(
            min=0,
            help="Verify up to N draft tokens in every step. Without it, the measured time of "
            "steps decides.",
        ),
    ] = None
    verification: Annotated[
        str | None,
        of_drafting(
            metavar="NAME",
            help="Verify drafts by this method; without it, by the best that is exact. One that "
            "is not exact is refused.",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verification not in (*VERIFICATIONS, None):
            names = ", ".join(VERIFICATIONS)
            raise UserError(f"expected --verification of {names}, got {self.verification!r}")

    @property
    def config(self) -> Config:
        """The configuration that they make."""
        options: dict[str, Any] = {"verification": self.verification}
        return Config(max_draft_tokens=self.max_draft_tokens, **options)
