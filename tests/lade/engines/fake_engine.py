"""What a vLLM worker does around a proposer, without vLLM: rows that move, and texts alone."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

Model = Callable[[list[int]], int]


def config(
    max_rows: int = 8,
    max_draft_tokens: int = 4,
    max_model_len: int = 256,
    vocab_size: int = 1000,
    **options: Any,
) -> Any:
    """Return what a proposer reads of a `VllmConfig`."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=max_draft_tokens),
        model_config=SimpleNamespace(
            max_model_len=max_model_len, get_vocab_size=lambda: vocab_size
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=max_rows),
        additional_config={"lade": options},
    )


def cycling(period: int) -> Model:
    """Return a model that repeats a text's token so many places ago."""
    return lambda text: text[-period] if len(text) >= period else len(text)


class Request:
    """A request, in a row or waiting."""

    def __init__(self, prompt: list[int], num_tokens: int, model: Model) -> None:
        self.text, self.num_prompt, self.model = list(prompt), len(prompt), model
        self.length = len(prompt) + num_tokens
        self.num_steps_of_prefill = 1
        self.draft: list[int] = []

    @property
    def answer(self) -> list[int]:
        return self.text[self.num_prompt :]


class FakeEngine:
    """Batches of requests for a proposer, as vLLM keeps them.

    A row's array is reused with what stood there; the last row fills the hole of one that ended; a
    prompt takes some steps in which its row has no sampled token; a request that is preempted
    leaves, and comes back with all its tokens.
    """

    def __init__(self, proposer: Any, vllm_config: Any) -> None:
        self.proposer = proposer
        self.max_draft_tokens = vllm_config.speculative_config.num_speculative_tokens
        max_rows = vllm_config.scheduler_config.max_num_seqs
        width = vllm_config.model_config.max_model_len
        self.token_ids = np.full((max_rows, width), 999_999, np.int32)
        self.num_tokens = np.full(max_rows, 7777, np.int32)
        self.rows: list[Request] = []
        self.num_drafted = self.num_accepted = self.num_steps = 0
        self.drafts: list[list[list[int]]] = []

    def add(self, request: Request, num_steps_of_prefill: int = 1) -> Request:
        request.num_steps_of_prefill, request.draft = num_steps_of_prefill, []
        self.rows.append(request)
        return request

    def take_out(self, request: Request) -> Request:
        """End or preempt a request; the last row takes its place."""
        row = self.rows.index(request)
        last = self.rows.pop()
        if last is not request:
            self.rows[row] = last
        return request

    def swap(self, row: int, other: int) -> None:
        self.rows[row], self.rows[other] = self.rows[other], self.rows[row]

    def step(self) -> list[list[int]]:
        """Verify the drafts, and ask for new ones; ended requests leave before the next step."""
        self.rows = [request for request in self.rows if len(request.text) < request.length]
        sampled = [self._verify(request) for request in self.rows]
        for row, request in enumerate(self.rows):
            self.token_ids[row, : len(request.text)] = request.text
            self.num_tokens[row] = len(request.text)
        drafts: list[list[int]]
        drafts = self.proposer.propose(sampled, self.num_tokens, self.token_ids, slot_mappings={})
        assert len(drafts) == len(self.rows)
        for request, draft, ids in zip(self.rows, drafts, sampled, strict=True):
            assert len(draft) <= self.max_draft_tokens
            assert not draft or len(request.text) + len(draft) < self.token_ids.shape[1]
            assert all(type(token_id) is int for token_id in draft)
            assert ids or not draft
            request.draft = draft
        self.num_steps += 1
        self.drafts.append(drafts)
        return drafts

    def run(self, max_steps: int = 500) -> None:
        """Take steps until all requests have ended."""
        while any(len(request.text) < request.length for request in self.rows):
            self.step()
            assert self.num_steps < max_steps
        self.rows = []

    def _verify(self, request: Request) -> list[int]:
        if request.num_steps_of_prefill > 0:
            request.num_steps_of_prefill -= 1
            if request.num_steps_of_prefill > 0:
                return []
        sampled: list[int] = []
        for drafted in [*request.draft, None]:
            sampled.append(request.model([*request.text, *sampled]))
            if drafted != sampled[-1]:
                break
            self.num_accepted += 1
        self.num_drafted += len(request.draft)
        sampled = sampled[: request.length - len(request.text)]
        request.text += sampled
        return sampled
