"""The arena: methods that draft for the same texts, with equal numbers of draft tokens.

Each prompt is answered once, token by token. At every token, one forward pass runs the drafts of
all methods that have a step there, equal paths once, and each method goes on where its own step
ends. So all of them get the model's logits for their own draft tokens, rejected ones too, as in
calls of their own: steps are replayed, and counted, and nothing depends on the machine's speed.

What a step costs is a matter of its number of tokens. For three machines (`CURVES`), every method
counts by how many times as fast as standard decoding it would be, without the time of drafting; and
lade also with the numbers of draft tokens that it chooses itself while it learns the machine.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from benchmarks.environment import environment
from benchmarks.prompts import Chosen
from benchmarks.report import Keeping, progress_bar, sheet, show
from benchmarks.rivals.catalogue import RIVALS
from lade.apps.cli.bench import describe_model
from lade.apps.cli.generate import encode_prompts
from lade.budget.budget import Budget
from lade.budget.seconds import Seconds
from lade.compat import end_tokens
from lade.drafting.drafter import Drafter
from lade.drafting.drafts import draft_of
from lade.drafting.sources import PoolDrafter
from lade.drafting.successors import Successors, successors_of
from lade.drafting.tables import table_for
from lade.models.loading import LoadedModel
from lade.models.settings import Settings
from lade.probing.factory import make_target
from lade.probing.plan import plan_of_calls, ready
from lade.probing.profile import profile_of
from lade.stats import ends_in_loop
from lade.targets.base import Target
from lade.tree import Tree
from ngram_pool import Draft, NGramPool

#: What steps of so many tokens cost: SmolLM2-135M in 16 bits, and layers of an 8B in 4 bits, one
#: token as 1; SmolLM2-135M in float32 on a machine without AVX-512, in milliseconds.
CURVES = {
    "16-bit weights": {1: 1.0, 2: 1.03, 4: 1.04, 8: 1.55, 16: 2.7},
    "8B in 4 bits": {1: 1.0, 2: 1.02, 4: 1.5, 8: 2.4, 16: 4.0},
    "float32": {1: 44.0, 2: 51.0, 4: 56.0, 8: 73.0, 16: 85.0},
}
LADE, PREWARMED = "lade", "lade_prewarmed"
DESCRIPTIONS = {
    LADE: "lade, a new pool for each prompt",
    PREWARMED: "lade, a new pool for each prompt, and the model's table",
    **{name: rival.description for name, rival in RIVALS.items()},
}
_Path = tuple[int, ...]  # the tokens of a node, from the first under the root on


def cost(curve: str, num_tokens: int) -> float:
    """Return what a step costs; beyond the last number of a curve, it is a line."""
    *_, before, last = (points := CURVES[curve])
    if num_tokens <= last:
        return float(np.interp(num_tokens, [*points], [*points.values()]))
    return points[last] + (num_tokens - last) * (points[last] - points[before]) / (last - before)


class Player:
    """A method with a number of draft tokens, at one text after the other.

    Args:
        name: of the method.
        make: returns its drafter for the next text.
        size: the number, or the name of the curve by which it is chosen.
    """

    def __init__(self, name: str, make: Callable[[], Drafter], size: int | str) -> None:
        self.name, self.size, self._make = name, size, make
        self.num_successors = make().num_successors
        self._costs: dict[int, Seconds] = {}  # of lade, learned over all texts
        self.steps, self.of_all = Counter[int](), Counter[int]()  # of this text, by draft tokens
        self.place = 0  # of its root among the new tokens
        self._proposed: Draft | None = None  # for the running step, verified or not
        self.paths: list[_Path] = []  # of the nodes that it verifies, the root's first

    def begin(self, prompt: list[int], first: int, found: dict[int, Successors]) -> None:
        """Read a prompt, its first new token and what may have come instead."""
        size, self.steps, self.place = self.size, Counter(), -1
        self._budget = Budget(self._costs) if isinstance(size, str) else Budget(fixed=size)
        self._drafter = self._make()
        self._sequence = self._drafter.open(prompt)
        self._draft, self._proposed, self.paths = Draft.empty(), None, [()]
        self.learn(prompt, [first], found, {(): 0})

    def propose(self, committed: list[int], num_left: int) -> list[_Path]:
        """Draft for a step that emits up to `num_left` tokens; return paths, the root's first."""
        self._draft, self._proposed, self.paths = Draft.empty(), None, [()]
        if not self._budget.is_resting:
            proposed = self._drafter.draft(self._sequence, committed, self._budget.wish)
            deep = np.flatnonzero(proposed.depths >= num_left).tolist()
            proposed = proposed.first(deep[0]) if deep else proposed
            (num,) = self._budget.nums_of_nodes({self: proposed.probs}).values()
            self._draft, self._proposed = proposed.first(num), proposed
        nodes = zip(self._draft.parents.tolist(), self._draft.token_ids.tolist(), strict=True)
        for parent, token_id in nodes:
            self.paths.append((*self.paths[parent + 1], token_id))
        self.steps[len(self._draft)] += 1
        if isinstance(self.size, str):
            self._budget.record(1, len(self._draft), cost(self.size, len(self.paths)))
        return self.paths

    def learn(
        self,
        committed: list[int],
        emitted: list[int],
        found: dict[int, Successors],
        index: dict[_Path, int],
    ) -> None:
        """Take in what came of the step: tokens, and successors of its nodes."""
        self.place += len(emitted)
        self._drafter.observe(self._sequence, emitted)
        if num := self._drafter.num_successors:
            nodes = [index[path] for path in self.paths]
            ids = [committed[-1], *self._draft.token_ids.tolist()]
            parents = [-1, *(self._draft.parents + 1).tolist()]
            likely = found[num]
            successors = Successors(likely.token_ids[0, nodes], likely.probs[0, nodes])
            self._drafter.harvest(self._sequence, committed, ids, parents, successors)
        proposed = {} if self._proposed is None else {self: (self._proposed, emitted)}
        self._budget.learn(proposed, {})


def replay(
    target: Target, prompt: list[int], players: Sequence[Player], num_new: int, ends: set[int]
) -> list[int]:
    """Answer a prompt greedily, and let each player draft for the answer; return its new tokens."""
    logits = target.prefill()
    text = [int(logits[0, -1].argmax())]
    wanted = {player.num_successors for player in players} - {0}
    found = _successors(logits, wanted)
    for player in players:
        player.begin(prompt, text[0], found)
    while text[-1] not in ends and (num_left := num_new - len(text)):
        here = [player for player in players if player.place == len(text) - 1]
        committed, index = [*prompt, *text], dict[_Path, int]({(): 0})
        for player in here:
            for path in player.propose(committed, num_left):
                index.setdefault(path, len(index))
        nodes = [(path[-1], index[path[:-1]] - 1) for path in index if path]
        tree = Tree.build(text[-1], draft_of(*zip(*nodes, strict=True)) if nodes else Draft.empty())
        logits = target.forward(target.inputs([tree]))
        chosen, found = logits[0].argmax(-1).tolist(), _successors(logits, wanted)
        for player in here:
            walked: _Path = ()
            while walked in player.paths and len(walked) < num_left and not ends & {*walked}:
                walked += (chosen[index[walked]],)
            player.learn(committed, [*walked], found, index)
        text.append(chosen[0])
        target.commit([[0]])
    return text


def _successors(logits: torch.Tensor, wanted: set[int]) -> dict[int, Successors]:
    """Return the likeliest tokens after each node, by how many of them are wanted."""
    return {num: successors_of(logits, num) for num in wanted}


def summed(player: Player, num_tokens: int) -> dict[str, Any]:
    """Return what a method with a number of draft tokens did in texts of so many tokens."""
    steps, size = player.of_all, player.size

    def speed(curve: str) -> float:
        taken = sum(times * cost(curve, 1 + num) for num, times in steps.items())
        return num_tokens * cost(curve, 1) / taken

    return {
        "method": player.name,
        "max_draft_tokens": size,
        "mean_accepted_tokens": num_tokens / steps.total(),
        "draft_tokens_per_step": sum(map(prod, steps.items())) / steps.total(),
        "speeds": {curve: speed(curve) for curve in ([size] if size in CURVES else CURVES)},
        "steps": dict(sorted(steps.items())),
    }


def run(
    loaded: LoadedModel,
    chosen: Chosen,
    methods: Sequence[str],
    draft_sizes: Sequence[int],
    settings: Settings,
    file: Path | None,
) -> None:
    """Run the arena; print and write the results, even after an interruption.

    Answers that end in a loop are left out.

    Raises:
        ValueError: the model does not verify trees, or has no table that is asked for.
    """
    model, plan = plan_of_calls(loaded.model)
    profile, num_new = profile_of(model), settings.max_new_tokens
    plan = ready(plan, model, profile)
    if plan.verification != "tree":
        raise ValueError(f"expected a model that verifies trees, not one by {plan.verification}")
    table = table_for(loaded.model)
    if PREWARMED in methods and table is None:
        raise ValueError(f"expected a table of the model for {PREWARMED}; lade prewarm makes one")
    sizes: tuple[int | str, ...] = (*draft_sizes, *CURVES)
    players = [
        Player(name, _maker(name, table and table.pool), size)
        for name in methods
        for size in (draft_sizes if name in RIVALS else sizes)
    ]
    ends = {*end_tokens(loaded.model.generation_config)}
    lengths, num_loops = list[int](), 0
    inputs = [*encode_prompts(loaded, [each.text for each in chosen.prompts], num_new)]
    with Keeping(lengths) as kept, progress_bar() as bars, torch.inference_mode():
        for given in bars.track(inputs, description="replaying"):
            ids = given["input_ids"]
            target = make_target(model, ids, {}, plan, num_new, GenerationConfig(), profile)
            text = replay(target, ids[0].tolist(), players, num_new, ends)
            if ends_in_loop(text):
                num_loops += 1
                continue
            lengths.append(len(text) - 1)  # the first token takes no step
            for player in players:
                player.of_all += player.steps
    described: dict[str, Any] = {
        **describe_model(loaded),
        **asdict(settings),
        "prompts": chosen.described,
        "num_answers": len(lengths),
        "num_loops": num_loops,
        "methods": {name: DESCRIPTIONS[name] for name in methods},
        "draft_sizes": [*draft_sizes],
        "num_table_contexts": table and table.pool.num_contexts,
        "curves": CURVES,
        "interrupted": kept.by is not None,
    }
    runs = [summed(player, sum(lengths)) for player in players] if lengths else []
    rows = [
        (
            *(each["method"], str(each["max_draft_tokens"])),
            *(f"{each[name]:.2f}" for name in ("mean_accepted_tokens", "draft_tokens_per_step")),
            *(f"{speed:.2f}x" if (speed := each["speeds"].get(curve)) else "" for curve in CURVES),
        )
        for each in runs
    ]
    headings = ("method", "max draft tokens", "MAT", "draft tokens/step", *CURVES)
    title = f"Replayed on {len(lengths)} answers, {num_loops} with loops left out"
    content = {"environment": environment(), "settings": described, "runs": runs}
    show(file, content, sheet(title, headings, [rows]))
    kept.end(f"stopped after {len(lengths) + num_loops} of {len(inputs)} prompts")


def _maker(name: str, table: NGramPool | None) -> Callable[[], Drafter]:
    """Return what makes a method's drafter for each text; a rival keeps one for all texts."""
    if name in RIVALS:
        rival = RIVALS[name].make_drafter()
        return lambda: rival
    layers = () if name == LADE or table is None else (table,)
    return lambda: PoolDrafter(NGramPool(seed=0), layers=layers)
