"""`Circumstances`: what decides how a call is decoded, besides its options."""

import warnings
from contextlib import suppress
from functools import cached_property

import torch
from transformers import StaticCache

from lade.compat import has_adapters_by_row, has_custom_generate, may_be_users, start_compiler
from lade.config import Execution
from lade.engine.engine import EngineCall, current_call, is_in_event_loop
from lade.errors import UnsupportedModelError
from lade.hf.call import Call
from lade.hf.stopping import StopRule
from lade.probing.plan import why_not_run
from lade.probing.profile import profile_of
from lade.probing.user_code import has_user_inputs, is_users, user_code_around
from lade.sampling.processors import Processors
from lade.targets.inputs import is_text_alone
from lade.targets.rollback import cache_in

_NO_TIME = "max_time leaves no time to compile kernels and check the model; call lade.warm_up first"


class Circumstances:
    """What decides how a call is decoded: its model's profile, the user's code, cache and time.

    Args:
        call: the call.
        stop: its stop conditions.

    Attributes:
        user_code: where the user's code runs in forward passes; None for nowhere.
        around: such code around the call, and not in its model.
        execution: of trees, as asked for.
    """

    def __init__(self, call: Call, stop: StopRule) -> None:
        self.call, self._stop = call, stop
        self._cache = cache_in(call.model_kwargs)
        self.execution: Execution = call.config.execution or (
            "static" if self._is_compiled_by_generate else "eager"
        )
        if self.execution == "static":
            start_compiler()
        self.profile = profile_of(call.model)
        self.around = user_code_around()
        self.user_code = self.profile.user_code or self.around

    @property
    def _is_compiled_by_generate(self) -> bool:
        is_on_gpu = self.call.input_ids.device.type == "cuda"
        is_static = type(self._cache) is StaticCache
        return is_static and is_on_gpu and not self.call.options.disable_compile

    @property
    def is_users_cache(self) -> bool:
        """Whether the caller may have passed the cache, and may continue from it."""
        has_one = self.call.may_bring_cache and self._cache is not None
        return has_one and may_be_users(self._cache)

    def engine_call(self) -> EngineCall | None:
        """Return the engine's call that this one is, unless it runs alone.

        It does if it depends on its thread or its model's state: user code in forward passes must
        see only this call's; autocast and asyncio loops belong to the thread; and a custom
        `generate` may set attributes of the model until its end.
        """
        call = self.call
        is_apart = (
            self.user_code is not None
            or is_in_event_loop()
            or torch.is_autocast_enabled(call.input_ids.device.type)
            or has_custom_generate(call.model)
            or has_user_inputs(call.model)
        )
        return None if is_apart else current_call()

    def warn_once(self, text: str, category: type[Warning]) -> None:
        """Warn, once for the model."""
        if text not in self.profile.warned:
            self.profile.warned.add(text)
            warnings.warn(text, category, stacklevel=4)

    @cached_property
    def why_plain(self) -> str | None:
        """Why the call must use standard decoding, whatever its model can do; else None."""
        if (reason := why_not_run(self.profile)) is not None:
            return reason
        if not self.has_time:
            return _NO_TIME
        if has_adapters_by_row(self.call.model):
            return "PEFT has an adapter for each row of the call, but none for draft tokens"
        if self.call.returns_states:
            return "hidden states or attentions are returned"
        watching = (*self.call.processors, *self.call.criteria)
        if self.is_users_cache and any(map(is_users, watching)):
            return "your own code may look at the cache, which holds draft tokens during a step"
        return None if self.call.num_rows == 1 else self._why_plain_of_batch

    @property
    def _why_plain_of_batch(self) -> str | None:
        """Why a batch must use standard decoding, whatever its model can do; else None."""
        call, config = self.call, self.call.config
        pad_token = call.options._pad_token_tensor
        reasons = (
            (
                self.user_code is not None and self._forgets,
                f"your own code ({self.user_code}) sees them, and its windows leave nothing to "
                "prove drafts by",
            ),
            (not Processors(call.processors, 1).takes_rows, "a logits processor sees all rows"),
            (
                self._stop.sees_rows and self._shows_rows_ahead,
                "a stop criterion sees all rows, and some rows would be ahead of others",
            ),
            (pad_token is not None and int(pad_token) < 0, "the pad token id is negative"),
            (bool(call.wanted_scores), "scores are returned, also of rows that have ended"),
            (self.is_users_cache, "a cache was passed"),
            (not is_text_alone(call.model_kwargs), "the prompts contain images or embeddings"),
            (config.verification not in (None, "tree", "plain"), "its rows are verified as trees"),
        )
        found = next((reason for is_so, reason in reasons if is_so), None)
        return found and f"batches: {found}"

    @property
    def _shows_rows_ahead(self) -> bool:
        """Whether the caller can see more of rows that run ahead than their tokens in the end."""
        call = self.call
        watches = call.streamer is not None or call.arguments.on_step is not None
        is_more = watches or call.returns_dict or bool(call.options.do_sample)
        return is_more or self.user_code is not None

    @property
    def _forgets(self) -> bool:
        """Whether layers of the model keep a part of the text alone."""
        with suppress(UnsupportedModelError):  # then there are no trees
            kinds = self.profile.layout_of(self.call.model).kinds
            return any(each.kind != "full" for each in kinds)
        return False

    @property
    def has_time(self) -> bool:
        """Whether there is time for one-time work, or the config requires it."""
        is_known = self.profile.is_warm or not self.call.is_timed
        return is_known or self.call.config.verification is not None
