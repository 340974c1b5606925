"""`BenchSettings`: the decoding settings of a run."""

from dataclasses import dataclass
from typing import Any

from lade.errors import UserError
from lade.models.settings import Settings


@dataclass(frozen=True)
class BenchSettings(Settings):
    """Decoding settings of a run, the same for every method.

    The n-th batch of every pass is answered with seed + n, by each method.

    Raises:
        UserError: a value is out of range, or would have no effect.
    """

    batch_size: int = 1  # prompts per call
    num_return_sequences: int = 1  # samples per prompt
    passes: int = 1  # over all prompts

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_size", "num_return_sequences"):
            if getattr(self, name) < 1:
                raise UserError(f"expected {name} of 1 or more, got {getattr(self, name)}")
        if self.temperature == 0 and self.num_return_sequences > 1:
            raise UserError(
                f"expected a temperature above 0 with {self.num_return_sequences} sequences of "
                "each prompt, as greedy ones are all the same; got temperature 0"
            )

    @property
    def num_rows(self) -> int:
        """Number of sequences that a call decodes."""
        return self.batch_size * self.num_return_sequences

    def options(self, pad_token_id: int | None = None) -> dict[str, Any]:
        """Return options for `generate`."""
        options = super().options()
        if pad_token_id is not None:
            options["pad_token_id"] = pad_token_id
        if self.temperature > 0:
            options["num_return_sequences"] = self.num_return_sequences
        return options

    def describe(self) -> str:
        """Describe in words what differs from greedy decoding of one sequence."""
        parts = [super().describe()]
        if self.batch_size > 1:
            parts.append(f"batches of {self.batch_size}")
        if self.num_return_sequences > 1:
            parts.append(f"{self.num_return_sequences} sequences a prompt")
        return ", ".join(parts)
