"""Text in half precision that does not depend on what the pool holds."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lade
from tests.grids import thinned
from tests.lade.both import ONE, THREE, same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import BatchDrafter, tiny_model

STABLE = lade.Config(stable_text=True)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}
pytestmark = pytest.mark.usefixtures("single_thread")


class Unchecked(BatchDrafter):
    """Goes on drafting where the text has left the answer that it knows."""

    def draft(self, sequence: int, committed: Any, max_draft_tokens: int) -> Any:
        row = self._rows[sequence]
        row.answer = [*committed, *row.answer[len(committed) :]]
        return super().draft(sequence, committed, max_draft_tokens)


def texts(model: Any, prompt: Tensor, is_stable: bool = True, **options: Any) -> list[list[Any]]:
    """Answer with pools and drafters of all kinds: empty, knowing, wrong, none."""
    mask = prompt != 0
    options = {**GREEDY, "attention_mask": mask.long(), **options}

    def answer(max_draft_tokens: int | None = None, **more: Any) -> Any:
        torch.manual_seed(3)
        # Compiled forwards give one text in any case.
        config = lade.Config(
            stable_text=is_stable, uses_kernels=is_stable, max_draft_tokens=max_draft_tokens
        )
        got = lade.generate(model, prompt, config=config, **{**options, **more})
        return got.tolist()

    pool = lade.NGramPool()
    found = [answer(pool=pool), answer(pool=pool), answer(pool=pool), answer(max_draft_tokens=0)]
    known = [
        [token for token, seen in zip(row, of_row, strict=False) if seen] + row[len(of_row) :]
        for row, of_row in zip(found[0], mask.tolist(), strict=True)
    ]
    for seed, accept in enumerate((0.3, 0.6, 0.95)):
        found.append(answer(drafter=Unchecked(known, np.random.default_rng(seed), accept)))
    return found


@pytest.mark.parametrize(
    "family", thinned(["llama", "qwen3", "gpt2", "mistral", "gemma3_text"], "gemma3_text")
)
def test_whatever_the_pool_holds_the_text_is_the_same(family: str) -> None:
    """Random models have near-ties at every few tokens."""
    model = shared_model(family, dtype=torch.bfloat16)
    for prompt in (ONE, THREE[:1], torch.arange(2, 60)[None]):
        found = texts(model, prompt, eos_token_id=None, max_new_tokens=16)
        assert all(text == found[0] for text in found)


@pytest.mark.exhaustive  # a CPU takes long for float16, and for what is to show nothing else
def test_so_is_sampled_text_and_without_it_the_text_differs() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for prompt in (ONE, THREE[:1]):
            model = shared_model("llama", dtype=dtype)
            found = texts(model, prompt, do_sample=True, temperature=1.2)
            assert all(text == found[0] for text in found)
    different = 0
    for seed in range(4):
        model = shared_model("llama", seed=seed, dtype=torch.bfloat16)
        found = texts(model, ONE, is_stable=False, eos_token_id=None)
        different += any(text != found[0] for text in found)
    assert different > 0


def test_in_float64_it_is_the_text_of_generate() -> None:
    model = shared_model("gemma3_text")
    for prompt in (ONE, THREE[:1]):
        same_as_generate(model, prompt, config=STABLE, max_new_tokens=40)


# --- where it cannot be had -----------------------------------------------------------------

STATES = {"output_hidden_states": True, "return_dict_in_generate": True}


@pytest.mark.parametrize(
    ("family", "options", "call", "reason"),
    [
        ("qwen3_moe", {"head_dim": 8, "num_experts": 4}, {}, "experts"),
        ("bloom", {"attention": "eager", "n_head": 4, "n_layer": 2}, {}, "forward fails"),
        ("llama", {}, {"use_cache": False}, "use_cache=False"),
        ("llama", {}, STATES, "hidden states or attentions are returned"),
    ],
)
def test_what_cannot_be_had_is_refused(
    family: str, options: dict[str, Any], call: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match="beside stable_text=True"):
        lade.Config(stable_text=True, verification="chain")
    model = shared_model(family, dtype=torch.bfloat16, **options)
    with pytest.raises(lade.UnsupportedOptionError, match=rf"stable_text=True.*{reason}"):
        lade.generate(model, ONE, config=STABLE, **{**GREEDY, **call})


@pytest.mark.usefixtures("trusted")
def test_a_model_whose_logits_follow_their_place_in_a_forward_is_refused() -> None:
    """By little enough to be within what half precision may round."""
    model = tiny_model("llama", dtype=torch.bfloat16)

    def bend(module: Any, args: Any, output: Any) -> Any:
        places = torch.arange(output.shape[1], dtype=output.dtype)[None, :, None]
        return output + 0.01 * places * output.abs().max()

    model.lm_head.register_forward_hook(bend)
    with pytest.raises(lade.UnsupportedOptionError, match="the last bits of its logits"):
        lade.generate(model, ONE, config=STABLE, **GREEDY)
    lade.generate(model, ONE, **GREEDY)  # without it, that is good enough
