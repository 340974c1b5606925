"""Set a model up for the chosen verification method."""

from typing import Any, NamedTuple

from torch import Tensor
from transformers import GenerationConfig

from lade.compat import Model, device_of_inputs
from lade.compat.closeness import limit_of
from lade.config import Execution, Verification
from lade.gpu.fixed import FixedTarget, StepSettings, widths_on
from lade.gpu.graphs import Graphs, why_not_recorded
from lade.gpu.policy import DevicePolicy
from lade.probing.profile import Profile, Widths, profile_of
from lade.probing.user_code import has_user_inputs
from lade.targets.base import Target
from lade.targets.paths import ChainTarget
from lade.targets.rows import Prompts, RowsTarget, split
from lade.targets.trees import TreeTarget


class VerificationPlan(NamedTuple):
    """How a call is decoded, and why no better method was chosen."""

    verification: Verification
    attention: str | None
    reasons: dict[Verification, str]
    execution: Execution = "eager"
    widths: Widths = None  # padded widths of trees that are not executed eagerly
    why_eager: str | None = None  # if another execution was requested
    is_fast: bool = False  # whether forwards may run by a view with lade's kernels


def make_target(
    model: Model,
    input_ids: Tensor,
    model_kwargs: dict[str, Any],
    chosen: VerificationPlan,
    max_new_tokens: int,
    generation_config: GenerationConfig,
    profile: Profile | None = None,
    policy: DevicePolicy | None = None,
) -> Target:
    """Return the target set up to verify drafts after these prompts by the chosen method."""
    if len(input_ids) > 1:
        rows = split(
            model, input_ids, model_kwargs, bool(generation_config.return_dict_in_generate)
        )
        targets = [
            make_target(
                *(model, row.input_ids, row.model_kwargs, chosen, max_new_tokens),
                *(generation_config, profile, policy),
            )
            for row in rows
        ]
        of_trees = [each for each in targets if isinstance(each, TreeTarget)]
        pad_token = getattr(generation_config, "_pad_token_tensor", None)
        whole = Prompts(model, input_ids, model_kwargs, generation_config, int(pad_token or 0))
        return RowsTarget(rows, of_trees, whole)
    if chosen.verification == "tree":
        known = profile or profile_of(model)
        settings = (
            *(model, input_ids, model_kwargs, known.layout_of(model), max_new_tokens),
            *(generation_config, chosen.attention),
        )
        if chosen.execution == "eager":
            return TreeTarget(*settings, known.fast_views_for(model) if chosen.is_fast else None)
        of_steps = StepSettings(
            known.workspace_store,
            variant=(chosen.execution, chosen.widths),
            widths=chosen.widths or widths_on(device_of_inputs(model)),
            **_recording(model, chosen, policy or DevicePolicy()),
        )
        return FixedTarget(*settings, settings=of_steps)
    restores = chosen.verification == "snapshot"
    return ChainTarget(
        *(model, input_ids, model_kwargs, restores, generation_config),
        proves_inputs=has_user_inputs(model),
    )


def _recording(model: Model, chosen: VerificationPlan, policy: DevicePolicy) -> dict[str, Any]:
    """Return the `StepSettings` that record steps, or that say why they are not."""
    device = device_of_inputs(model)
    if chosen.execution == "fixed" or not policy.can_record(device):
        return {}
    reason = why_not_recorded(model)
    if reason is not None:
        return {"why_not_recorded": reason}
    # A text that must not depend on drafts must not depend on earlier recordings, either.
    limit = 0.0 if is_single(chosen.widths) else limit_of(model)
    return {"new_graphs": lambda: Graphs(policy.recorder(device), limit)}


def is_single(widths: Widths) -> bool:
    """Return whether all forwards have one width."""
    return widths is not None and len(widths) == 1
