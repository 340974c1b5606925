"""Ask a model for its likely successors: after single tokens, and in texts of its own.

Everything runs through the model's own `generate`, so any causal LM will do, whatever its cache.
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

_NUM_ROWS = 64  # on a CPU, where more rows hardly cost less per token
_NUM_ROWS_OF_ACCELERATOR = 256

#: Called with one column of the texts: the last token or two of every row, int64
#: [num_rows, 1 or 2], and their likely successors. Returns whether to continue.
Collect = Callable[[NDArray[np.int64], Successors], bool]


@contextmanager
def prompting(model: Model, num_successors: int) -> Iterator["Prompter"]:
    """Yield a prompter; leave the model and the global random state unchanged."""
    if any(module.training for module in model.modules()):
        model = in_evaluation(model)
    # Our own draws do not touch that state, but those of a model's forward may.
    with unchanged_random_state(model):
        yield Prompter(model, num_successors)


class Prompter:
    """A model that is asked for its likeliest next tokens.

    Args:
        model: the target, in evaluation mode.
        num_successors: number of likeliest next tokens to return.
    """

    def __init__(self, model: Model, num_successors: int) -> None:
        self._model = copy.copy(model)  # shares everything but the attribute set here
        self._model.generation_config = GenerationConfig()  # none of the model's own options
        self._device = device_of_inputs(model)
        self._num_successors = num_successors
        config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self.start_token_id = _start_token_of(model.generation_config, config)
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        arguments = inspect.signature(type(model).forward).parameters
        self._takes_cache = "past_key_values" in arguments
        #: Rows of a batch; halved whenever memory runs out.
        self.num_rows = _NUM_ROWS if self._device.type == "cpu" else _NUM_ROWS_OF_ACCELERATOR

    def successors_of(self, prefix_token_id: int, token_ids: NDArray[np.int64]) -> Successors:
        """Return the likely successors of single tokens, each after a prefix of one token.

        Args:
            prefix_token_id: the prefix; without one, each token would be the first of its text,
                and many models continue a first token unlike any other.
            token_ids: int64 [num_tokens].
        """
        prefix = torch.tensor([[prefix_token_id]], device=self._device)
        cache = self._generate(prefix, 1, return_dict_in_generate=True).past_key_values
        collected: list[Successors] = []
        while (start := sum(len(part.token_ids) for part in collected)) < len(token_ids):
            num_rows = min(self.num_rows, len(token_ids) - start)
            part = torch.from_numpy(token_ids[start : start + num_rows]).to(self._device)
            rows = torch.cat([prefix.expand(num_rows, 1), part[:, None]], dim=1)
            try:
                collected.append(self._successors_of_rows(rows, cache))
                continue
            except torch.OutOfMemoryError:
                if num_rows == 1:
                    raise
            self.num_rows = num_rows // 2  # after the handler, which keeps the failed forward alive
        return Successors(*(np.concatenate(parts) for parts in zip(*collected, strict=True)))

    def write(self, num_tokens: int, seed: int, collect: Collect) -> bool:
        """Let the model write a batch of texts at temperature 1, and pass on every column.

        An end-of-text token in the middle counts as any other: what comes after it is what this
        model finds likely there, such as an answer after a question.

        Args:
            num_tokens: maximum number of tokens per text.
            seed: of the draws.
            collect: called for each column of tokens.

        Returns:
            Whether the texts are complete; false if `collect` ended them or memory ran out.
        """
        length = num_tokens if self.max_length is None else min(num_tokens, self.max_length - 1)
        starts = torch.full((self.num_rows, 1), self.start_token_id, device=self._device)
        collector = _Collector(
            self._num_successors, self.vocab_size, collect, torch.Generator().manual_seed(seed)
        )
        try:
            self._generate(
                starts, length, logits_processor=[collector], stopping_criteria=[_Until(collector)]
            )
            return collector.goes_on
        except torch.OutOfMemoryError:
            if self.num_rows == 1:
                raise
        self.num_rows //= 2
        return False

    def _successors_of_rows(self, rows: Tensor, cache: Any) -> Successors:
        """Return the successors of rows of two tokens; `cache` holds the first, for one row."""
        collected: list[Successors] = []

        def collect(_: NDArray[np.int64], successors: Successors) -> bool:
            collected.append(successors)
            return False

        options = {}
        if self._takes_cache and type(cache) is DynamicCache:  # else each row runs both its tokens
            options["past_key_values"] = saved(cache)
            expand(options["past_key_values"], len(rows), self._device)
        collector = _Collector(self._num_successors, self.vocab_size, collect, None)
        self._generate(rows, 1, logits_processor=[collector], **options)
        return collected[0]

    def _generate(self, input_ids: Tensor, num_new: int, **options: Any) -> Any:
        # The class's `generate`: that of the instance may be the one that `lade.wrap` set.
        return type(self._model).generate(
            self._model,
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=num_new,
            do_sample=False,
            **options,
        )


class _Collector(LogitsProcessor):  # type: ignore[misc]
    """A processor that passes on the likely successors, and forces a token drawn from all."""

    def __init__(
        self, num_successors: int, vocab_size: int, collect: Collect, rng: torch.Generator | None
    ) -> None:
        self._num_successors = num_successors
        self._vocab_size = vocab_size  # some models have more logits than that
        self._collect = collect
        self._rng = rng
        self.goes_on = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # NaN counts as unlikely: nothing may be learned from it, and it must not end the run.
        probs = scores[:, : self._vocab_size].softmax(dim=-1).nan_to_num(0.0)
        top = probs.topk(min(self._num_successors, probs.shape[-1]), dim=-1)
        successors = Successors(top.indices.int().cpu().numpy(), top.values.cpu().numpy())
        self.goes_on = self._collect(input_ids[:, -2:].cpu().numpy(), successors)
        if self._rng is None:
            return scores
        return scores.scatter_(1, _drawn(probs, self._rng), torch.inf)  # generate passes a copy


class _Until(StoppingCriteria):  # type: ignore[misc]
    """A stop criterion that ends all rows once the collector has enough."""

    def __init__(self, collector: _Collector) -> None:
        self._collector = collector

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), not self._collector.goes_on, device=input_ids.device)


def _drawn(probs: Tensor, rng: torch.Generator) -> Tensor:
    """Draw a token for each row, int64 [num_rows, 1].

    Looks one uniform number per row up in the cumulative sums; `multinomial` draws one for every
    token of the vocabulary (64 rows of 49 152 on a CPU: 53 ms, as long as a forward; this takes 4).
    """
    sums = probs.cumsum(dim=-1)
    at = torch.rand(len(probs), 1, generator=rng).to(probs.device) * sums[:, -1:]
    return torch.searchsorted(sums, at, right=True).clamp_(max=probs.shape[-1] - 1)


def _start_token_of(*configs: Any) -> int:
    """Return the token that texts begin with: BOS, or else EOS, or else token 0."""
    for name in ("bos_token_id", "eos_token_id"):
        for config in configs:
            found = getattr(config, name, None)
            found = found[0] if isinstance(found, Sequence) and found else found
            if isinstance(found, int) and found >= 0:
                return found
    return 0
