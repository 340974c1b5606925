"""Plain `generate` and lade side by side, with drafts that are often right."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import lade
from tests.lade.tiny import ScriptedDrafter

ONE = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
THREE = torch.tensor([[0, 0, 5, 6, 7, 5, 6], [5, 6, 7, 5, 6, 7, 5], [0, 9, 9, 9, 9, 9, 9]])


EIGHT = lade.Config(max_draft_tokens=8)


class Answers(NamedTuple):
    """Answers that are returned without parts, and counts of lade's steps."""

    sequences: torch.Tensor
    stats: lade.DecodeStats


def same_as_generate(
    model: Any,
    input_ids: torch.Tensor | None = None,
    *,
    drafter: Any = None,
    accept: float | None = None,
    config: lade.Config | None = None,
    pool: Any = None,
    knows: bool = False,
    seed: int = 0,
    plainly: str | None = None,
    may_fail: bool = False,
    fresh: Callable[[], dict[str, Any]] = dict,
    by: Callable[..., Any] = lade.generate,
    **options: Any,
) -> tuple[Any, Any]:
    """Run plain `generate` and lade; assert the same tokens, and the same random state after them.

    Args:
        model: what decodes, wrapped or not.
        input_ids: prompts, 0 where they are padded; None beside `inputs_embeds`.
        drafter, config, pool: of lade.
        knows: whether lade has a pool that knows the answer.
        accept: how often the next token of a scripted drafter is right; None for no such drafter.
        seed: of both calls, and of the scripted drafter.
        plainly: the reason in the warning with which lade falls back to plain decoding.
        may_fail: whether lade may stop drafting on the way.
        fresh: makes options of each call anew, such as caches that are filled.
        by: what runs lade.
        options: of both calls; greedy, 24 tokens, with an output of parts unless they say else.

    Returns:
        The outputs of plain `generate` and of lade.
    """
    device = torch.device("cuda" if model.device.type == "cuda" else "cpu")
    given: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    if input_ids is not None:
        given |= {"input_ids": input_ids.to(device)}
        given |= {"attention_mask": (given["input_ids"] != 0).long()}
    given |= {"return_dict_in_generate": True, **options}
    torch.manual_seed(seed)
    of_plain = given | fresh()
    expected = type(model).generate(model, **of_plain)
    state = random_state(device)
    scripted = None
    if accept is not None:
        answers = _unpadded(tokens_of(expected), of_plain)
        drafter = scripted = ScriptedDrafter(answers, np.random.default_rng(seed), accept)
    if knows:
        pool = lade.NGramPool()
        for row in tokens_of(expected).tolist():
            pool.observe(row)
    of_lade = {"drafter": drafter, "config": config, "pool": pool}
    of_lade = {name: value for name, value in of_lade.items() if value is not None}
    torch.manual_seed(seed)
    stats = lade.DecodeStats()
    if by is lade.generate and not given["return_dict_in_generate"]:
        of_lade.setdefault("on_step", stats.count_row_step)
    said = pytest.warns(lade.PlainDecodingWarning, match=plainly)
    with nullcontext() if plainly is None else said:
        got = by(model, **given | of_lade | fresh())
    assert tokens_of(got).tolist() == tokens_of(expected).tolist()
    assert torch.equal(random_state(device), state)
    if scripted is not None:
        is_plain = plainly is not None or (config is not None and config.verification == "plain")
        num_opened = len(scripted.observed)
        assert scripted.closed == num_opened
        assert num_opened == (0 if is_plain or (may_fail and not num_opened) else len(answers))
    if scripted is not None and not may_fail:
        # Rows of a batch may end in padding, which drafters do not receive.
        for observed, answer in zip(scripted.observed, answers, strict=not is_plain):
            assert observed == answer[: len(observed) if len(answers) > 1 else None]
    if torch.is_tensor(got) and torch.is_tensor(expected):
        return Answers(expected, stats), Answers(got, stats)
    return expected, got


def tokens_of(output: Any) -> torch.Tensor:
    """Return the tokens of an output, of parts or not."""
    tokens: torch.Tensor = output if torch.is_tensor(output) else output.sequences
    return tokens


def _unpadded(sequences: torch.Tensor, options: dict[str, Any]) -> list[list[int]]:
    """Return prompts and answers without the padding of the prompts."""
    masks = options["attention_mask"].repeat_interleave(
        options.get("num_return_sequences") or 1, dim=0
    )
    return [
        [*(t for t, m in zip(row, mask, strict=False) if m), *row[len(mask) :]]
        for row, mask in zip(sequences.tolist(), masks.tolist(), strict=True)
    ]


def both(
    model: Any,
    prompt: torch.Tensor,
    *,
    accept: float = 0.7,
    config: lade.Config = EIGHT,
    do_sample: bool = True,
    **options: Any,
) -> tuple[Any, Any]:
    """Sample with drafts that are often right, as `same_as_generate`."""
    return same_as_generate(
        model, prompt, accept=accept, config=config, do_sample=do_sample, **options
    )


def answered(model: Any, prompt: torch.Tensor, **options: Any) -> Any:
    """Return lade's output, of parts or as `Answers`: greedy, if options do not say else."""
    given: dict[str, Any] = {
        "attention_mask": (prompt != 0).long(),
        "do_sample": False,
        "pad_token_id": 0,
    }
    given["return_dict_in_generate"] = True
    stats = lade.DecodeStats()
    given |= {"on_step": stats.count_row_step, **options}
    got = lade.generate(model, prompt, **given)
    return Answers(got, stats) if torch.is_tensor(got) else got


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of the generator that sampling on a device draws from."""
    is_cuda = device.type == "cuda"
    return torch.cuda.get_rng_state(device) if is_cuda else torch.get_rng_state()


class ListStreamer:
    """A streamer that records everything in order."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.events.append(value.tolist())

    def end(self) -> None:
        self.events.append("end")
