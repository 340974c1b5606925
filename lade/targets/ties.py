"""Ties between keys in sparse attention, which a forward over a tree may break differently.

Sparse attention with an indexer scores every key and lets a query see the `index_topk` best. Scores
end in a ReLU summed over the indexer's heads; with few heads many are zero, and which of two equal
keys is taken depends on where they lie in memory. A tree has its nodes' keys where plain decoding
has none, so a tie for the last place may go to another key, and the text differs from then on. The
outputs of a forward do not show this, so this module looks at the scores while it runs. A forward
with a tie is not used: the rest of the call is decoded token by token.
"""

from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode
from torch.utils.hooks import RemovableHandle

from lade.compat import Model
from lade.view import with_own_hooks

# Largest effect of rounding on a score, relative to the greatest score of its query: scores closer
# than that count as tied. Measured with the same tokens in trees of 9 nodes and one at a time, for
# five architectures of 3 to 5 layers, 16 and 64 heads. Scores are float32 in either case. In
# float64 models only their own rounding differs, by at most 3.2e-6 (1.3e-6 in 99 of 100 queries);
# in float32 models also that of earlier layers, by 8e-6 in four architectures and 2.9e-4 in the
# fifth (3.5e-5 in 99 of 100). Of 7020 float32 queries, five had a gap that rounding might close, of
# at most 7e-5; 1 % have a gap below this tolerance, 0.1 % in float64.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4}

# Scores at or below this are of keys that a query must not see: -inf, or the least number of a
# dtype if masks are additive. Such keys stay masked even if chosen, so their ties do not count.
_MASKED = torch.finfo(torch.float32).min / 2

_TOPK = (torch.topk, torch.Tensor.topk)


class TieError(RuntimeError):
    """A forward over several tokens chose keys by a tie; its logits may not be plain decoding's."""


def num_chosen(model: Model) -> int | None:
    """Return the number of keys each query of a model chooses, or None if it sees all."""
    config = model.config.get_text_config(decoder=True)
    number: int | None = getattr(config, "index_topk", None)
    return number


def applies(model: Model) -> bool:
    """Return whether a model's forwards over several tokens must be watched for ties.

    Not in half precision: ties are everywhere there, and rounding may change any model's text.
    """
    return num_chosen(model) is not None and model.dtype in _TOLERANCES


class Untied:
    """Runs forwards of a model and raises if one may have a tie.

    Args:
        model: a model for which `applies` is true; it is not changed.
    """

    def __init__(self, model: Model) -> None:
        indexers = [module for module in model.modules() if _chooses(module)]
        self._view = with_own_hooks(model, indexers)
        self._watch = TieWatch(self._view)

    def __call__(self, **inputs: Any) -> Any:
        """Run a forward.

        Raises:
            TieError: the forward may have had a tie.
        """
        with self._watch:
            output = self._view(**inputs)
        # A single token's keys lie where plain decoding has them.
        if inputs["input_ids"].shape[1] > 1 and self._watch.found:
            raise TieError("which keys its sparse attention takes was decided by a tie")
        return output


class TieWatch:
    """Watches how keys are chosen in a forward: `with watch: ...`, then `watch.found`.

    It hooks the indexers, and there only `topk`; expert routers, which also choose by `topk`, are
    other modules. It can be reused for one forward after another, and watches only the thread that
    entered it. What it cannot see counts as a tie: a compiled indexer, or one of another kind. A
    recorded forward (a CUDA graph) runs no hooks and cannot be watched.

    Args:
        model: a model for which `applies` is true.
    """

    def __init__(self, model: Model) -> None:
        self._indexers = [module for module in model.modules() if _chooses(module)]
        self._tolerance = _TOLERANCES[model.dtype]
        self._mode = _TopkMode(self._look)
        self._handles: list[RemovableHandle] = []
        self._thread: int | None = None
        self._forget()

    def __enter__(self) -> "TieWatch":
        self._forget()
        self._thread = get_ident()
        for indexer in self._indexers:
            self._handles += [
                indexer.register_forward_pre_hook(self._begin),
                indexer.register_forward_hook(self._end, always_call=True),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        # After an interrupt in an indexer, torch does not call its forward hook.
        while self._mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            _pop_mode()  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._thread = None

    @property
    def tied(self) -> Tensor | None:
        """Queries of the last forward with a tie in any layer, bool [rows, queries], or None.

        None means unknown. A query that sees one with a tie is computed from it: on a draft's path,
        everything after the first node with a tie is as doubtful as that node. Does not wait for
        the device.
        """
        if self._is_blind or not self._num_runs:
            return None
        device = self._ties[0].device
        return torch.stack([ties.to(device) for ties in self._ties]).any(0)

    @property
    def found(self) -> bool:
        """Whether the last forward may have had a tie; waits for the device."""
        tied = self.tied
        return tied is None or bool(tied.any())

    def _forget(self) -> None:
        self._ties: list[Tensor] = []  # bool [rows, queries] of each look
        self._num_runs = 0  # of indexers
        self._num_before = 0  # looks before the last run
        self._is_blind = False  # whether an indexer ran without a look

    def _begin(self, module: nn.Module, args: Any) -> None:
        if get_ident() == self._thread:
            self._num_runs += 1
            self._num_before = len(self._ties)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if get_ident() == self._thread:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_blind |= len(self._ties) == self._num_before

    @torch.no_grad()
    def _look(self, scores: Tensor, chosen: Tensor) -> None:
        """Record the ties of one choice.

        Args:
            scores: [rows, queries, keys].
            chosen: the best of these scores, [rows, queries, k].
        """
        if scores.dim() != 3 or chosen.shape[:-1] != scores.shape[:-1]:
            return
        self._ties.append(ties_at_last_place(scores, chosen, self._tolerance))


def ties_at_last_place(scores: Tensor, chosen: Tensor, tolerance: float) -> Tensor:
    """Return for which queries a key that was not chosen is as good as one that was.

    Args:
        scores: [..., keys]; masked ones are -inf, or about the least number of their dtype.
        chosen: [..., k], the best of these scores.
        tolerance: difference that counts as equal, relative to the greatest absolute score.

    Returns:
        bool [...].
    """
    if chosen.shape[-1] == scores.shape[-1]:
        return torch.zeros(scores.shape[:-1], dtype=torch.bool, device=scores.device)
    least = chosen.amin(-1, keepdim=True)
    size = scores.masked_fill(scores <= _MASKED, 0.0).abs().amax(-1, keepdim=True)
    num_as_good = (scores >= least - tolerance * size).sum(-1)
    # A query that sees fewer keys than it may choose gets all of them.
    return (num_as_good > chosen.shape[-1]) & (least.squeeze(-1) > _MASKED)


class _TopkMode(TorchFunctionMode):
    """Passes every `topk` of a thread to a function; active only inside indexers.

    Around a whole forward it would cost 3 to 5 microseconds for each of 250 calls per layer, half
    the time of a tiny model's forward. Inside indexers, the whole watch costs 0.4 ms per layer, on
    a CPU with one thread.
    """

    def __init__(self, look: Any) -> None:
        super().__init__()
        self._look = look

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self._look(args[0] if args else kwargs["input"], result[0])
        return result


def _chooses(module: nn.Module) -> bool:
    return isinstance(getattr(module, "index_topk", None), int)
