"""`RIVALS`: the rivals by name, each with the budget it was published with.

Next file: `lade/bench/methods.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.rivals.goose import GooseDrafter
from benchmarks.rivals.lookahead import NGRAM_SIZE, LookaheadDrafter
from benchmarks.rivals.prompt_lookup import PromptLookupDrafter
from benchmarks.rivals.recycling import RecyclingDrafter
from benchmarks.rivals.sam import SamDrafter, SamRecyclingDrafter
from lade.config import Lookahead
from lade.drafting.drafter import Drafter


class Rival(NamedTuple):
    """A published drafting method."""

    make_drafter: Callable[[], Drafter]  # for all prompts of a pass
    max_draft_tokens: int  # as published
    description: str  # with its source and settings
    lookahead: Lookahead | None = None  # the window it runs beside its draft


#: By name, in the order of tables.
RIVALS: dict[str, Rival] = {
    "rival_prompt_lookup": Rival(
        PromptLookupDrafter,
        10,
        "prompt lookup (Saxena 2023): n-grams of 3 to 1 tokens, 10 tokens copied",
    ),
    "rival_lookahead": Rival(
        LookaheadDrafter,
        28,
        "pool of Lookahead Decoding (arXiv 2402.02057): N=5, G=7, n-grams of prompt and answer "
        "instead of a window's, new for each prompt",
    ),
    "rival_lookahead_window": Rival(
        lambda: LookaheadDrafter(has_window=True),
        28,
        "Lookahead Decoding (arXiv 2402.02057): N=5, G=7, n-grams of the prompt and of a window "
        "with W=7, whose 27 tokens come on top of the draft's, new for each prompt",
        Lookahead(window_size=7, ngram_size=NGRAM_SIZE),
    ),
    "rival_recycling": Rival(
        RecyclingDrafter,
        80,
        "Token Recycling (arXiv 2408.08696): top 8 of every node, static tree of 80, kept warm",
    ),
    "rival_sam": Rival(
        SamDrafter,
        40,
        "SAM-Decoding (arXiv 2411.10666): 1 + 4 tokens for each that matched, 40 at most, new for "
        "each prompt",
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
}
