"""What an engine is to do, and what it answers, in plain values that are sent as JSON.

Next file: `plan.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Phase:
    """Requests that clients send, each its next one as soon as its last is answered."""

    name: str
    concurrency: int  # number of clients
    prompts: Sequence[Sequence[int]]  # token ids
    max_new_tokens: int
    temperature: float = 0.0
    begins_anew: bool = False  # whether drafter and cache know nothing of earlier phases


@dataclass(frozen=True)
class EngineJob:
    """An engine, and the phases it runs in turn."""

    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    speculative_config: Mapping[str, Any] | None
    additional_config: Mapping[str, Any]
    phases: Sequence[Phase]

    def as_message(self) -> dict[str, Any]:
        """Return this ready for JSON."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> "EngineJob":
        """Return the job of `as_message`."""
        phases = [Phase(**phase) for phase in message["phases"]]
        return cls(**{**message, "phases": phases})


class RequestAnswer(NamedTuple):
    """One answered request."""

    token_ids: list[int]
    num_steps: int  # of the engine that gave it a token or more; the first runs the prompt
    first_token_sec: float  # from asking to the first token
    sec: float  # to the last one


class Counters(NamedTuple):
    """What the engine and its drafter counted in a phase."""

    num_drafts: int = 0  # requests and steps with a draft token or more
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_proposals: int = 0  # calls of the drafter, each for all requests of a step
    draft_sec: float = 0.0  # in these calls
    num_failures: int = 0  # of them, of lade's proposer, which drafts nothing then


class PhaseResult(NamedTuple):
    """What an engine did in a phase."""

    name: str
    concurrency: int
    sec: float
    answers: list[RequestAnswer]  # in the order of the prompts
    counters: Counters

    def as_message(self) -> dict[str, Any]:
        """Return this ready for JSON."""
        answers = [answer._asdict() for answer in self.answers]
        return {**self._asdict(), "answers": answers, "counters": self.counters._asdict()}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> "PhaseResult":
        """Return the result of `as_message`."""
        answers = [RequestAnswer(**answer) for answer in message["answers"]]
        counters = Counters(**message["counters"])
        return cls(**{**message, "answers": answers, "counters": counters})
