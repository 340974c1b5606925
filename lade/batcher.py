"""`Batcher`: many calls of one model at once in an engine, each with its own options."""

import secrets
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from lade.compat import Model, device_of_inputs, dtype_of, unwrapped
from lade.compat.attempts import Attempt
from lade.config import Config
from lade.drafting.drafter import Drafter
from lade.engine.engine import Engine, EngineFuture
from lade.hf.api import check_ids, generate
from lade.hf.assistance import first_of
from lade.hf.pools import Pools
from lade.probing.profile import computing
from lade.stats import Step
from lade.targets.joint import JointForwards
from ngram_pool.arrays import positive

_Result = TypeVar("_Result")
_SHARE_OF_MEMORY = 0.5
_INTERRUPTED_SEC = 2.0  # to wait for calls to end before their next step
_USUAL_LENGTH = 20  # new tokens where no option says how many, as in transformers


class Request(EngineFuture):
    """A submitted call: a `Future` that also yields tokens one by one.

    Its result is the result of `lade.generate`. Iterating yields the emitted tokens of its first
    row, ints, as they come; each token once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tokens: SimpleQueue[int | None] = SimpleQueue()
        self._is_cancelled = False
        self.add_done_callback(lambda request: request._tokens.put(None))  # the end

    def cancelled(self) -> bool:
        """Return whether `cancel` has ended the call, before it began or while it ran."""
        has_ended = super().cancelled()
        return has_ended or (self.done() and isinstance(self.exception(), CancelledError))

    def cancel(self) -> bool:
        """End the call before its next step; return False if it had already ended."""
        self._is_cancelled = True
        return super().cancel() or not self.done()

    def __iter__(self) -> Iterator[int]:
        """Yield tokens until the call ends.

        Raises:
            BaseException: what the call raised.
        """
        while (token_id := self._next()) is not None:
            yield token_id
        self._tokens.put(None)  # for another iteration
        self.result()

    def _next(self) -> int | None:
        with suppress(Empty):
            return self._tokens.get_nowait()
        with self.waiting():
            return self._tokens.get()

    def _check(self) -> None:
        if self._is_cancelled:
            raise CancelledError


class Batcher:
    """Runs calls of `lade.generate` on one model at the same time, as a batch that they join.

    An example::

        with lade.Batcher(model, max_batch_size=8) as batcher:
            requests = [batcher.submit(**inputs, max_new_tokens=100) for inputs in prompts]
            texts = [request.result() for request in requests]

    Each call has its own options, pool and random numbers, and the text that it would have alone.
    All methods may be called from any thread. If a model's forward passes cannot run together, its
    calls are answered one after the other; `why_not_joint` says why. Your code in a call, such as
    `on_step` or processors, runs in the batcher's thread; an error in it ends only that call. The
    thread ends with the process, and running calls then end before their next step. A forked child
    has none of the calls, and its batcher takes new ones.

    Args:
        model: a transformers causal LM. No other code may run it meanwhile.
        max_batch_size: maximum number of calls that run at once; other calls wait in order.
        max_batch_tokens: maximum tokens of all running calls, prompts and longest answers. Other
            calls wait. A call that fits may overtake one that does not; a longer call runs alone.
            None for as many tokens as half of the free memory holds in the KV cache.
        pool, drafter, config: defaults for calls without these arguments, as for `lade.generate`.
        stall_sec: how long a prefill chunk may keep the other calls waiting, in seconds, on a CPU.

    Raises:
        TypeError: a limit is no integer.
        ValueError: a limit is less than 1.

    Source: iteration-level scheduling, Orca (OSDI 2022).
    """

    def __init__(
        self,
        model: Model,
        *,
        max_batch_size: int = 16,
        max_batch_tokens: int | None = None,
        pool: Pools | None = None,
        drafter: Drafter | None = None,
        config: Config | None = None,
        stall_sec: float = 0.5,
    ) -> None:
        positive("max_batch_size", max_batch_size)
        self._model = model
        self._given = {"pool": pool, "drafter": drafter, "config": config}
        if max_batch_tokens is None:
            max_batch_tokens = _tokens_that_fit(model)
        else:
            positive("max_batch_tokens", max_batch_tokens)
        device = device_of_inputs(unwrapped(model))
        self._forwards = JointForwards()
        self.engine = Engine(self._forwards, device, max_batch_size, max_batch_tokens, stall_sec)
        self._is_closed = False

    @property
    def is_joint(self) -> bool:
        """Whether a call has been submitted whose forward passes can run together with others."""
        return self.engine.is_joint and self.why_not_joint is None

    @property
    def why_not_joint(self) -> str | None:
        """Why forward passes of the model do not run together; None as long as they do."""
        return self._forwards.why_not

    def submit(
        self, input_ids: Tensor | None = None, *, seed: int | None = None, **options: Any
    ) -> Request:
        """Begin a call as soon as it fits.

        Args:
            input_ids: int64 [num_rows, num_tokens].
            seed: for sampling: the call has the tokens of `generate` after
                `torch.manual_seed(seed)`, as long as only batchers draw from torch's default
                generator. None for a random seed.
            options: everything else that `lade.generate` takes.

        Raises:
            LadeError: the process ends, or was forked during a forward pass.
            RuntimeError: the batcher is closed.
            TypeError: `input_ids` is no tensor.
        """
        request = Request()
        call = {**self._given, **options}
        if input_ids is not None:
            check_ids(input_ids)
            call["input_ids"] = input_ids
        mode = _mode_of_thread(device_of_inputs(unwrapped(self._model)).type)
        if self._is_closed:
            raise RuntimeError("expected an open batcher, got a closed one")
        self.engine.submit(
            partial(self._answer, request, seed, call, mode),
            _most_tokens(self._model, call),
            future=request,
        )
        return request

    def run(self, call: Callable[[], _Result], num_tokens: int = 0) -> _Result:
        """Run a function that generates as one of the batcher's calls, and wait for it.

        The function continues the caller's random state, as in `generate`, as long as no other
        thread draws or seeds. Of several functions at once, this holds for the first; the others
        draw from random seeds, unless they seed themselves.

        Args:
            call: the function, called in the batcher's thread. Other calls wait for all its work
                but lade's forward passes, so it must not wait for another request.
            num_tokens: maximum tokens of prompt and answer.
        """
        return self.engine.run(call, num_tokens)

    def close(self) -> None:
        """Refuse further calls, and wait for the submitted ones; in a callback, do not wait."""
        self._is_closed = True
        self.engine.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None or issubclass(kind, Exception):
            self.close()
        else:  # an interrupt waits for no answers, and only briefly for user code
            self._is_closed = True
            self.engine.end()
            self.engine.wait(_INTERRUPTED_SEC)

    def _answer(
        self, request: Request, seed: int | None, call: dict[str, Any], mode: "_Mode"
    ) -> Any:
        on_step = call.pop("on_step", None)

        def note(step: Step) -> None:
            request._check()
            for token_id in step.token_ids if step.row == 0 else ():
                request._tokens.put(token_id)
            if on_step is not None:
                on_step(step)

        request._check()
        torch.manual_seed(secrets.randbits(63) if seed is None else seed)
        with mode():
            return generate(self._model, on_step=note, **call)


_Mode = Callable[[], AbstractContextManager[object]]


def _mode_of_thread(kind: str) -> _Mode:
    """Return a context that sets this thread's modes of torch in another thread."""
    is_inference, is_autocast = torch.is_inference_mode_enabled(), torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind)

    @contextmanager
    def mode() -> Iterator[None]:
        with torch.inference_mode(is_inference), torch.autocast(kind, dtype, is_autocast):
            yield

    return mode


def _most_tokens(model: Model, call: dict[str, Any]) -> int:
    """Return the maximum number of tokens of a call, its prompt included."""
    prompt = call.get("input_ids", call.get("inputs", call.get("inputs_embeds")))
    num_prompts, num_prompt = (1, 1) if prompt is None else (*prompt.shape, 1, 1)[:2]
    sources = call, call.get("generation_config"), model.generation_config
    num_samples = first_of("num_return_sequences", sources) or 1
    num_new, longest = (first_of(name, sources) for name in ("max_new_tokens", "max_length"))
    if num_new is None:
        num_new = _USUAL_LENGTH if longest is None else max(0, longest - num_prompt)
    num_tokens: int = num_prompts * num_samples * (num_prompt + num_new)
    return num_tokens


def _tokens_that_fit(model: Model) -> int | None:
    """Return how many tokens a share of free memory holds in the KV cache; None if unknown."""
    config = model.config.get_text_config(decoder=True)
    num_numbers = 0  # of a token
    with Attempt():  # a config may lack them, and may raise anything where layers differ
        for layer in config.per_layer_config:
            num_heads = layer.num_attention_heads
            head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // num_heads
            num_key_heads = getattr(layer, "num_key_value_heads", None) or num_heads
            num_numbers += 2 * num_key_heads * head_dim
    if num_numbers == 0:
        return None
    num_bytes = num_numbers * dtype_of(computing(unwrapped(model))).itemsize
    free = _free_bytes(device_of_inputs(unwrapped(model)))
    return None if free is None else max(1, int(_SHARE_OF_MEMORY * free / num_bytes))


def _free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device in bytes; None if it is unknown."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    available = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    if not available or device.type != "cpu":
        return None
    return min(int(available[0]) * 1024, _left_in_container())


def _left_in_container() -> int:
    """Return the bytes left to the control group of this process, as in a container."""
    group = Path("/sys/fs/cgroup")
    try:
        most, taken = (
            (group / f"memory.{name}").read_text().strip() for name in ("max", "current")
        )
    except OSError:
        return sys.maxsize
    return sys.maxsize if most == "max" else max(0, int(most) - int(taken))
