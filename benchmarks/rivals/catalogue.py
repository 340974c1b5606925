"""`RIVALS`: the rivals by name, each with the budget it was published with.

Next file: `lade/apps/bench/methods.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.rivals.goose import GooseDrafter
from benchmarks.rivals.prompt_lookup import PromptLookupDrafter
from benchmarks.rivals.recycling import RecyclingDrafter
from benchmarks.rivals.sam import SamRecyclingDrafter
from benchmarks.rivals.sssd import SssdDrafter
from lade.drafting.drafter import Drafter


class Rival(NamedTuple):
    """A published drafting method."""

    make_drafter: Callable[[], Drafter]  # for all prompts of a pass
    max_draft_tokens: int  # as published
    description: str  # with its source and settings


#: By name, in the order of tables.
RIVALS: dict[str, Rival] = {
    "rival_prompt_lookup": Rival(
        PromptLookupDrafter,
        10,
        "prompt lookup (Saxena 2023): n-grams of 3 to 1 tokens, 10 tokens copied",
    ),
    "rival_recycling": Rival(
        RecyclingDrafter,
        80,
        "Token Recycling (arXiv 2408.08696): top 8 of every node, static tree of 80, kept warm",
    ),
    "rival_sam_recycling": Rival(
        SamRecyclingDrafter,
        80,
        "SAM-Decoding (arXiv 2411.10666) after matches of 5 tokens or more, else Token Recycling",
    ),
    "rival_goose": Rival(
        GooseDrafter,
        100,
        "Goose (arXiv 2604.02047): copied spine, branches of the target's top 10, 60 to 100 nodes, "
        "new for each prompt",
    ),
    "rival_sssd": Rival(
        SssdDrafter,
        16,
        "SSSD (arXiv 2411.05894) without a datastore: all that followed the last 4 to 1 tokens, by "
        "frequency; 16 draft tokens here, where the paper measures how many",
    ),
}
