"""A model asked what it finds likely: behind lone tokens, and in texts of its own.

Everything runs through the model's own `generate`, so that any causal LM will do, whatever its
cache.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.cache_utils import DynamicCache

from lade.compat import Model, device_of_inputs
from lade.drafting.successors import Successors
from lade.probing.selfcheck import unchanged_random_state
from lade.targets.rollback import expand, saved
from lade.view import in_evaluation

_NUM_ROWS = 64  # on a CPU, where more are hardly faster by the token
_NUM_ROWS_OF_ACCELERATOR = 256

#: Told of one more token of every row: the last two tokens or fewer, int64 [num_rows, 1 or 2], and
#: what may follow them. Returns whether to go on.
Hear = Callable[[NDArray[np.int64], Successors], bool]


@contextmanager
def speaking(model: Model, num_successors: int) -> Iterator["Prompter"]:
    """Yield a prompter; leave the model, and the global random state, as they were."""
    if any(module.training for module in model.modules()):
        model = in_evaluation(model)
    # Our own draws do not touch it, but those of a model's forward may.
    with unchanged_random_state(model):
        yield Prompter(model, num_successors)


class Prompter:
    """A model that tells its likeliest next tokens.

    Args:
        model: the target, in evaluation mode.
        num_successors: how many to tell.
    """

    def __init__(self, model: Model, num_successors: int) -> None:
        self._model = copy.copy(model)  # shares all but the attribute set here
        self._model.generation_config = GenerationConfig()  # none of the model's own options
        self._device = device_of_inputs(model)
        self._num_successors = num_successors
        config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self.start_token_id = _start_token_of(model.generation_config, config)
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        arguments = inspect.signature(type(model).forward).parameters
        self._takes_cache = "past_key_values" in arguments
        #: At once; halved whenever memory runs out.
        self.num_rows = _NUM_ROWS if self._device.type == "cpu" else _NUM_ROWS_OF_ACCELERATOR

    def successors_of(self, prefix_token_id: int, token_ids: NDArray[np.int64]) -> Successors:
        """Return what follows each of some tokens alone behind a prefix of one token.

        Args:
            prefix_token_id: without one, the only token of a text would be its first, after which
                many models go on like after no other.
            token_ids: int64 [num_tokens].
        """
        prefix = torch.tensor([[prefix_token_id]], device=self._device)
        cache = self._generate(prefix, 1, return_dict_in_generate=True).past_key_values
        heard: list[Successors] = []
        while (start := sum(len(part.token_ids) for part in heard)) < len(token_ids):
            num_rows = min(self.num_rows, len(token_ids) - start)
            part = torch.from_numpy(token_ids[start : start + num_rows]).to(self._device)
            rows = torch.cat([prefix.expand(num_rows, 1), part[:, None]], dim=1)
            try:
                heard.append(self._successors_of_rows(rows, cache))
                continue
            except torch.OutOfMemoryError:
                if num_rows == 1:
                    raise
            self.num_rows = num_rows // 2  # out here, where the failed forward is let go
        return Successors(*(np.concatenate(parts) for parts in zip(*heard, strict=True)))

    def write(self, num_tokens: int, seed: int, hear: Hear) -> bool:
        """Let the model write texts of its own, side by side, at temperature 1; hear every token.

        An end of text in the middle is a token like any other: what comes after it is what this
        model finds likely there, an answer after a question for one.

        Args:
            num_tokens: of each text, at most.
            seed: of the draws.
            hear: called for each column of tokens.

        Returns:
            Whether it came to the end: `hear` may have had enough, or memory may have run out.
        """
        length = num_tokens if self.max_length is None else min(num_tokens, self.max_length - 1)
        starts = torch.full((self.num_rows, 1), self.start_token_id, device=self._device)
        ear = _Ear(self._num_successors, self.vocab_size, hear, torch.Generator().manual_seed(seed))
        try:
            self._generate(starts, length, logits_processor=[ear], stopping_criteria=[_Until(ear)])
            return ear.goes_on
        except torch.OutOfMemoryError:
            if self.num_rows == 1:
                raise
        self.num_rows //= 2
        return False

    def _successors_of_rows(self, rows: Tensor, cache: Any) -> Successors:
        """Return what follows rows of tokens; `cache` holds their first token, for one row."""
        heard: list[Successors] = []

        def hear(_: NDArray[np.int64], successors: Successors) -> bool:
            heard.append(successors)
            return False

        options = {}
        if self._takes_cache and type(cache) is DynamicCache:  # else two tokens a row, not one
            options["past_key_values"] = saved(cache)
            expand(options["past_key_values"], len(rows), self._device)
        ear = _Ear(self._num_successors, self.vocab_size, hear, None)
        self._generate(rows, 1, logits_processor=[ear], **options)
        return heard[0]

    def _generate(self, input_ids: Tensor, num_new: int, **options: Any) -> Any:
        # The class's generate: the instance may carry the one that `wrap` put there.
        return type(self._model).generate(
            self._model,
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=num_new,
            do_sample=False,
            **options,
        )


class _Ear(LogitsProcessor):  # type: ignore[misc]
    """Hears what a model finds likely, and makes it take tokens drawn from all of that."""

    def __init__(
        self, num_successors: int, vocab_size: int, hear: Hear, rng: torch.Generator | None
    ) -> None:
        self._num_successors = num_successors
        self._vocab_size = vocab_size  # some models have logits for more than that
        self._hear = hear
        self._rng = rng
        self.goes_on = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # What is no number is not likely: it may teach nothing, and must not end the run.
        probs = scores[:, : self._vocab_size].softmax(dim=-1).nan_to_num(0.0)
        top = probs.topk(min(self._num_successors, probs.shape[-1]), dim=-1)
        successors = Successors(top.indices.int().cpu().numpy(), top.values.cpu().numpy())
        self.goes_on = self._hear(input_ids[:, -2:].cpu().numpy(), successors)
        if self._rng is None:
            return scores
        return scores.scatter_(1, _drawn(probs, self._rng), torch.inf)  # ours: generate copied it


class _Until(StoppingCriteria):  # type: ignore[misc]
    """Stops all rows when enough was heard."""

    def __init__(self, ear: _Ear) -> None:
        self._ear = ear

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), not self._ear.goes_on, device=input_ids.device)


def _drawn(probs: Tensor, rng: torch.Generator) -> Tensor:
    """Draw a token of each row, int64 [num_rows, 1].

    One uniform number a row, looked up in the sums: `multinomial` draws one for every token of the
    vocabulary (64 rows of 49 152 on a CPU: 53 ms, as long as a forward; this takes 4).
    """
    sums = probs.cumsum(dim=-1)
    at = torch.rand(len(probs), 1, generator=rng).to(probs.device) * sums[:, -1:]
    return torch.searchsorted(sums, at, right=True).clamp_(max=probs.shape[-1] - 1)


def _start_token_of(*configs: Any) -> int:
    """Return what a text begins with: BOS, or else EOS, or else token 0."""
    for name in ("bos_token_id", "eos_token_id"):
        for config in configs:
            found = getattr(config, name, None)
            found = found[0] if isinstance(found, Sequence) and found else found
            if isinstance(found, int) and found >= 0:
                return found
    return 0
