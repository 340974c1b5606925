"""What lade really used in a call: verification, attention, execution, and steps recorded.

A call may ask for graphs and get less; a benchmark that does not notice measures something else.
Next file: `steps.py`.
"""

from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lade.attention.tree import TREE_ATTENTION, runs_in_triton
from lade.bench.baselines import Answer, answer_of
from lade.bench.device import wait_for
from lade.compat import Model, attention_of
from lade.config import Config, Execution
from lade.drafting.drafter import Drafter
from lade.gpu.fixed import FixedTarget
from lade.gpu.graphs import Recorder
from lade.gpu.policy import DevicePolicy
from lade.hf.arguments import Arguments
from lade.hf.call import Call
from lade.hf.generation import Generation
from lade.probing.factory import VerificationPlan
from lade.targets.base import Target

NO_GRAPHS = "this device has no CUDA graphs"


class Tally(DevicePolicy):
    """A policy that counts what is recorded and replayed.

    Attributes:
        num_recorded: recordings made, kept or not.
        num_replayed: steps replayed, the first replay of a recording included, which checks it.
        recording_sec: time of making recordings.
        recording_bytes: what they took on the device.
    """

    def __init__(self, policy: DevicePolicy | None = None) -> None:
        self._policy = policy or DevicePolicy()
        self.num_recorded = 0
        self.num_replayed = 0
        self.recording_sec = 0.0
        self.recording_bytes = 0

    def overlaps(self, device: torch.device) -> bool:
        """Return what the policy returns."""
        return self._policy.overlaps(device)

    def execution(self, device: torch.device) -> Execution:
        """Return what the policy returns."""
        return self._policy.execution(device)

    def can_record(self, device: torch.device) -> bool:
        """Return what the policy returns."""
        return self._policy.can_record(device)

    def recorder(self, device: torch.device) -> Recorder:
        """Return the policy's recorder, counting."""
        return cast(Recorder, _CountingRecorder(self._policy.recorder(device), self))


def recorded_or_fixed(device: torch.device, policy: DevicePolicy | None) -> Execution:
    """Return "graphs", or "fixed" where there are none."""
    return "graphs" if (policy or DevicePolicy()).can_record(device) else "fixed"


class _CountingRecorder:
    """A recorder that counts; all but `record` is left to the one inside."""

    def __init__(self, recorder: Recorder, tally: Tally) -> None:
        self._recorder = recorder
        self._tally = tally

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)

    def record(self, *args: Any, **kwargs: Any) -> Any:
        """Record a forward, and count it and its replays."""
        before, start = self._recorder.num_bytes(), perf_counter()
        recording = self._recorder.record(*args, **kwargs)
        self._tally.recording_sec += perf_counter() - start
        self._tally.recording_bytes += self._recorder.num_bytes() - before
        self._tally.num_recorded += 1

        def replay() -> None:
            self._tally.num_replayed += 1
            recording.replay()

        return recording._replace(replay=replay)


class Used(NamedTuple):
    """What a call used; its fields are those of a row."""

    verification: str
    attention: str | None
    in_triton: bool  # whether that attention runs in kernels of our own
    execution: str  # of steps: "eager", "fixed", "graphs", "compiled"; "plain" without drafts
    why_not_recorded: str | None  # or why not of fixed shape, or why plain
    num_kept: int  # recordings
    workspace_bytes: int  # of keys and values for steps of fixed shape, with room for texts to come


def used_by(
    model: Model,
    chosen: VerificationPlan,
    target: Target | None,
    *,
    can_record: bool,
    num_replayed: int,
) -> Used:
    """Return what was used in steps that have been run."""
    attention = chosen.attention or attention_of(model)
    in_triton = attention == TREE_ATTENTION and runs_in_triton(
        model.device, model.dtype, model.config.get_text_config().head_dim
    )
    execution, why = "eager", chosen.why_eager
    num_kept = workspace_bytes = 0
    if isinstance(target, FixedTarget):
        num_kept, workspace_bytes = target.num_recordings, target.cache.num_bytes
        execution, why = "fixed", target.why_not_recorded
        if chosen.execution == "compiled":
            execution = "compiled"
        elif num_replayed:
            execution = "graphs"
        if not can_record:
            why = NO_GRAPHS
    elif target is None:
        execution = "plain"
        why = "; ".join(f"{name}: {reason}" for name, reason in chosen.reasons.items())
    return Used(
        *(chosen.verification, attention, in_triton, execution, why, num_kept, workspace_bytes)
    )


class _Noted(Generation):
    """A call that remembers its plan."""

    plan: VerificationPlan
    target: Target | None

    def _plan(self) -> Any:
        plan, call, target = super()._plan()
        self.plan, self.target = plan, target
        return plan, call, target


class NotingLade:
    """`lade.generate` as a method of the benchmark, which notes what it used.

    Attributes:
        used: what the last call used.
    """

    def __init__(
        self, config: Config, drafter: Drafter | None = None, policy: DevicePolicy | None = None
    ) -> None:
        self.tally = Tally(policy)
        self.used: Used | None = None
        self._arguments = Arguments(None, drafter, config)

        class Noted(_Noted):
            policy = self.tally

        self._call_class: type[_Noted] = Noted

    def __call__(self, model: Model, inputs: dict[str, Any], options: dict[str, Any]) -> Answer:
        """Answer the rows of `inputs`."""
        calls: list[_Noted] = []

        def decode(
            model: Model,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> Any:
            prepared = (input_ids, logits_processor, stopping_criteria, generation_config)
            call = self._call_class(Call(model, *prepared, model_kwargs, self._arguments, None))
            calls.append(call)
            return call.run()

        self._arguments.check()
        num_replayed = self.tally.num_replayed
        start = perf_counter()
        output = type(model).generate(
            model, **inputs, custom_generate=decode, return_dict_in_generate=True, **options
        )
        wait_for(model.device)
        sec = perf_counter() - start
        (call,) = calls
        self.used = used_by(
            model,
            call.plan,
            call.target,
            can_record=self.tally.can_record(model.device),
            num_replayed=self.tally.num_replayed - num_replayed,
        )
        return answer_of(model, inputs, output, sec)
