"""Set a model up for the chosen verification method."""

from typing import Any, NamedTuple

from torch import Tensor
from transformers import GenerationConfig

from lade.compat import Model
from lade.config import Execution, Verification
from lade.probing.profile import Profile, profile_of
from lade.targets.base import Target
from lade.targets.paths import ChainTarget
from lade.targets.rows import RowsTarget, split
from lade.targets.static import StaticTarget
from lade.targets.trees import TreeTarget


class VerificationPlan(NamedTuple):
    """How a call is decoded, and why no better method was chosen."""

    verification: Verification
    attention: str | None
    reasons: dict[Verification, str]
    execution: Execution = "eager"
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
) -> Target:
    """Return the target set up to verify drafts after these prompts by the chosen method."""
    if len(input_ids) > 1:
        rows = split(
            model, input_ids, model_kwargs, bool(generation_config.return_dict_in_generate)
        )
        targets = [
            make_target(
                *(model, row.input_ids, row.model_kwargs, chosen, max_new_tokens),
                *(generation_config, profile),
            )
            for row in rows
        ]
        of_trees = [each for each in targets if isinstance(each, TreeTarget)]
        whole = model, input_ids, model_kwargs, generation_config
        target: Target = RowsTarget(rows, of_trees, *whole)
    elif chosen.verification == "tree":
        known = profile or profile_of(model)
        settings = (
            *(model, input_ids, model_kwargs, known.layout_of(model), max_new_tokens),
            *(generation_config, chosen.attention),
        )
        if chosen.execution == "static":
            steps = None if generation_config.disable_compile else known.static_steps
            target = StaticTarget(*settings, steps=steps)
        else:
            target = TreeTarget(*settings, known.fast_views_for(model) if chosen.is_fast else None)
    else:
        restores = chosen.verification == "snapshot"
        target = ChainTarget(model, input_ids, model_kwargs, restores, generation_config)
    target.verification = chosen.verification
    target.why_eager = target.why_eager or chosen.why_eager
    return target
