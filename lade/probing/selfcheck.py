"""The self-check: a verification method compared with standard decoding of a dozen tokens."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lade.compat import CACHE, Model, attention_of, device_of_inputs
from lade.compat.attempts import Attempt
from lade.compat.closeness import distance, limit_of
from lade.compat.view import apart
from lade.drafting.drafts import draft_of, narrowed
from lade.errors import UnsupportedModelError
from lade.machine.generators import are_random_states, put_back, random_states
from lade.probing.factory import VerificationPlan, make_target
from lade.probing.layers import why_not_exact
from lade.probing.profile import CacheKind, CheckKey, CheckResult, Profile, profile_of
from lade.probing.state import check_tokens
from lade.probing.user_code import is_patched, is_users
from lade.targets.base import Target
from lade.targets.layout import takes_parts
from lade.targets.parts import TREE_SDPA
from lade.targets.trees import MASK_IS_ADDED
from lade.tree import Tree, starts
from ngram_pool import Draft

# For a model that only drafts: its mistakes cost time and change no text. Weights in int8
# (`benchmarks.quantized`) stay below it. If the largest activation of a forward sets the scale,
# SmolLM2-135M differs by 1.1 (paths) to 1.8 (trees) and is refused: a model with wrong positions
# differs as much.
_DRAFTING_LIMIT = 1.0
_NUM_RUNS = 3  # runs that must all change the random state: other threads may draw, too


class NoVerdictError(Exception):
    """A check came to no verdict; a later one may."""


def check(model: Model, profile: Profile, key: CheckKey) -> CheckResult:
    """Compare one verification method with standard decoding; any failure becomes the reason.

    Raises:
        torch.OutOfMemoryError: the check had too little memory for a verdict.
        NoVerdictError: logits are alike whatever was run, until weights change.
    """
    verification, reason = key.verification, None
    if not key.is_drafting and (why := reason_of_layers(model, profile)) is not None:
        return CheckResult(why)
    read = profile.state.settings
    if verification == "tree" and read is not None and read.sees_ahead:
        # In `generate`, too, this holds only for prompts without padding.
        return CheckResult("its tokens see later tokens unless a mask hides them")
    attentions: list[str | None] = [None]
    if verification == "tree":
        attentions = _attentions_for(model)
    limit = _DRAFTING_LIMIT if key.is_drafting else limit_of(model)
    try:
        for attention in attentions:
            chosen = VerificationPlan(verification, attention, {}, key.execution)
            found = _Check(model, profile, chosen, key).reason(limit)
            if found is None:
                return CheckResult(None, attention)
            reason = reason or found
    except UnsupportedModelError as failure:
        return CheckResult(str(failure))  # a rule, independent of the attention
    if verification == "tree" and device_of_inputs(model).type == "cpu":
        layout, views = profile.layout_of(model), profile.fast_views_for(model)
        if views is not None and views.counts and not layout.is_path:
            profile.found["layout"] = layout._replace(is_path=True)
            return check(model, profile, key)
    return CheckResult(reason)


def reason_of_layers(model: Model, profile: Profile) -> str | None:
    """Return why the layers of a model let no method be exact, or None."""

    def find() -> str | None:
        # Some formats unpack their weights at the first forward.
        return why_not_exact(profile.state.watch(model))

    with Attempt(), unchanged_random_state(model, profile):
        return profile.once("why_not_exact", find)
    return None  # the check will report the failure


def _attentions_for(model: Model) -> list[str | None]:
    """Return attention implementations to try for trees, best first; None is the model's own."""
    of_model = attention_of(model)
    takes_no_mask = of_model is not None and of_model not in MASK_IS_ADDED
    if takes_no_mask and is_users(ALL_ATTENTION_FUNCTIONS.get(of_model)):
        return [None, "sdpa", "eager"]  # only the user's attention may do what it does
    others: list[str | None] = ["sdpa", "eager"] if takes_no_mask else [None]
    may_exchange = of_model == "sdpa" or takes_no_mask
    # The others call a function that the user has replaced as standard decoding does.
    if not may_exchange or is_patched("scaled_dot_product_attention"):
        return others
    return [TREE_SDPA, *others]


@torch.no_grad()
def why_not_continued(model: Model, profile: Profile) -> str | None:
    """Return why a text cannot continue from the KV cache of its beginning, or None.

    This takes three short forwards and the check of the model's layers.

    Raises:
        torch.OutOfMemoryError: the check had too little memory for a verdict.
    """
    if (reason := reason_of_layers(model, profile)) is not None:
        return reason
    tokens, errors, limit = check_tokens(model), list[float](), limit_of(model)
    wanted: dict[str, Any] = {"num_new": 1, "output_logits": True, "return_dict_in_generate": True}
    with Attempt() as attempt, unchanged_random_state(model, profile):
        whole = Plain(model, tokens)
        expected = whole.generate(**wanted).logits[0]
        for num_cached in (3, len(tokens) - 1):
            cache = getattr(Plain(model, tokens[:num_cached]).generate(**wanted), CACHE)
            if cache is None:
                return "it returns no cache"
            rest = whole.generate(**wanted, **{CACHE: cache})
            errors.append(distance(rest.logits[0], expected))
    if attempt.failure is not None:
        return f"it cannot continue from a cache ({attempt.failure})"
    if profile.draws:
        return "its forwards draw random numbers"
    if max(errors) <= limit:
        return None
    return (
        f"its logits after a cached text differ from those of the whole text by {max(errors):.2g} "
        f"of their standard deviation (expected at most {limit:.2g})"
    )


@contextmanager
def unchanged_random_state(model: Model, profile: Profile | None = None) -> Iterator[None]:
    """Restore the global random state afterwards if the model's forwards draw from it.

    The state is shared: restoring it also undoes draws of other threads. So it is restored only for
    models whose forwards draw; this is tested once the state has changed.
    """
    profile, device = profile or profile_of(model), device_of_inputs(model)
    before = random_states(device)
    try:
        yield
    finally:
        if profile.draws is not False and not are_random_states(device, before):
            if profile.draws is None:
                profile.draws = model.training  # if forwards fail, as the check will report
                with Attempt():
                    profile.draws = _draws(model)
            if profile.draws:
                put_back(device, before)


def _draws(model: Model) -> bool:
    """Return whether forwards change the random state; one unchanged state is enough for a no."""
    plain, device = Plain(model, check_tokens(model)), device_of_inputs(model)
    for _ in range(_NUM_RUNS):
        before = random_states(device)
        plain.generate(num_new=2)
        if are_random_states(device, before):
            return False
    return True


_Path = tuple[int, ...]  # tokens after the prompt


class _Step(NamedTuple):
    """One step of the check: a root, a draft, and the nodes that are kept."""

    root: int
    draft: Draft
    kept: list[int]


# Two branches, 0-1-3 and 0-2-4, interleaved so that keeping the second one must move cache slots.
_PARENTS = (-1, -1, 0, 1)
_PROMPT_LENGTH = 6


class _Check(NamedTuple):
    """One verification method, compared with standard decoding of a dozen tokens."""

    model: Model
    profile: Profile
    chosen: VerificationPlan
    key: CheckKey

    def reason(self, limit: float) -> str | None:
        """Return why the method is not exact to a limit, or None.

        Raises:
            UnsupportedModelError: a rule excludes the method.
            torch.OutOfMemoryError: the check had too little memory for a verdict.
        """
        model = self.model
        passing = (UnsupportedModelError, NoVerdictError)
        with Attempt(*passing) as attempt, unchanged_random_state(model, self.profile):
            error = self.error()
        if attempt.failure is not None:
            return f"its forward fails ({attempt.failure})"
        if error <= limit:
            return None
        hint = "; the model is in training mode, try model.eval()" if model.training else ""
        return (
            f"its logits differ from those of plain decoding by {error:.2g} of their "
            f"standard deviation (expected at most {limit:.2g}){hint}"
        )

    def plain(self) -> "Plain":
        """Return standard decoding of the check's prompts; several if rows may run as one."""
        chosen, masks = self.chosen, None
        if self.key.is_padded:
            # The mask comes after the first token: a query that sees no key, as in left padding, is
            # NaN in eager attention in float64, also in `generate`.
            masks = [[1, 0, 0, *[1] * (_PROMPT_LENGTH - 3)]]
            if chosen.verification == "tree" and takes_parts(
                self.model, self.profile.layout_of(self.model), chosen.attention
            ):
                masks.insert(0, [1] * _PROMPT_LENGTH)
        prompt = check_tokens(self.model)[:_PROMPT_LENGTH]
        return Plain(self.model, prompt, masks, self.key.cache)

    @torch.no_grad()
    def error(self) -> float:
        """Return how far the logits of drafts, and of later tokens, are from standard decoding.

        There are three steps: one keeps a part of a path, one keeps a path to its end, and one has
        no draft. A second row keeps only its root in the first step, so that the other steps are
        ragged.

        The measure is the largest difference of two logits in units of their standard deviation.
        """
        plain = self.plain()
        logits = self._run(plain, self._script())
        # Some models are wrong in batches even in standard decoding; they are compared with single
        # rows.
        error = _difference(logits, plain.logits_at(logits, together=True))
        if not error <= limit_of(self.model):
            error = _difference(logits, plain.logits_at(logits, together=False))
        return error

    def _script(self) -> list[_Step]:
        """Return the steps; each draft is one path if the method verifies single paths."""
        root, after, last, *drafted = check_tokens(self.model)[_PROMPT_LENGTH:]
        first, second = draft_of(drafted[:4], _PARENTS), draft_of(drafted[4:6], (-1, -1))
        kept = [0, 2]
        is_tree = self.chosen.verification == "tree"
        if not is_tree or self.profile.layout_of(self.model).max_candidates is not None:
            first, second, kept = narrowed(first, 1), narrowed(second, 1), [0, 1]
        return [
            _Step(root, first, kept),
            _Step(after, second, [0, 1]),
            _Step(last, Draft.empty(), [0]),
        ]

    def _run(self, plain: "Plain", steps: Sequence[_Step]) -> dict[tuple[int, _Path], Tensor]:
        """Return the logits after every path of every row, each float64 [vocab_size]."""
        logits: dict[tuple[int, _Path], Tensor] = {}
        texts: list[_Path] = [()] * plain.num_rows
        num_new = len(check_tokens(self.model))
        target = plain.target(plain.model, self.chosen, num_new, self.profile)
        try:
            target.prefill()
            for number, step in enumerate(steps):
                trees, kept = [Tree.build(step.root, step.draft)], [step.kept]
                for _ in texts[1:]:  # trees of different sizes, and texts from then on
                    draft = step.draft.first(len(step.draft) // 2) if number == 0 else step.draft
                    trees.append(Tree.build(step.root, draft))
                    kept.append([0] if number == 0 else step.kept)
                of_nodes = target.forward(target.inputs(trees))[0].double()
                for row, start in starts(dict(enumerate(trees))).items():
                    tree = trees[row]
                    token_ids = np.array(tree.token_ids)
                    for node, seen in enumerate(tree.ancestors):
                        path = (*texts[row], *token_ids[seen].tolist())
                        logits[row, path] = of_nodes[start + node]
                    texts[row] += tuple(tree.token_ids[node] for node in kept[row])
                target.commit(kept)
        finally:
            target.close()
        return logits


def _difference(
    mine: dict[tuple[int, _Path], Tensor], theirs: dict[tuple[int, _Path], Tensor]
) -> float:
    reference = torch.stack([theirs[key] for key in mine])
    if bool((reference.nan_to_num() == reference[:, :1].nan_to_num()).all(-1).any()):
        raise NoVerdictError(
            "its logits are no numbers, or all equal, and no check can compare them"
        )
    return distance(torch.stack([*mine.values()]), reference)


class Plain:
    """Standard decoding of prompts, forced along given paths.

    It runs a view of the model, so that the model does not change, by the `generate` of
    transformers: if the model's class has its own, that has already run for the call.
    """

    def __init__(
        self,
        model: Model,
        prompt: Sequence[int],
        masks: Sequence[Sequence[int]] | None = None,
        cache: CacheKind = "dynamic",
    ) -> None:
        #: A view that runs instead of the model.
        self.model = apart(model)
        self.model.generation_config = GenerationConfig()  # none of the model's own options
        device = device_of_inputs(model)
        self._mask = torch.tensor(masks or [[1] * len(prompt)], dtype=torch.int64, device=device)
        self._input_ids = torch.tensor(
            [[*prompt]] * len(self._mask), dtype=torch.int64, device=device
        )
        self._cache = cache

    @property
    def num_rows(self) -> int:
        """Number of prompts."""
        return len(self._input_ids)

    def generate(self, rows: Sequence[int] | None = None, num_new: int = 16, **options: Any) -> Any:
        """Call transformers' `generate` on some of the prompts; None for all."""
        which = [*range(len(self._input_ids))] if rows is None else [*rows]
        mask = self._mask[which]
        return GenerationMixin.generate(
            self.model,
            input_ids=self._input_ids[which],
            attention_mask=None if bool(mask.all()) else mask,  # not every class takes one
            max_new_tokens=num_new,
            do_sample=False,
            use_cache=self._cache != "none",
            cache_implementation="static" if self._cache == "static" else None,
            disable_compile=True,
            **options,
        )

    def target(
        self, model: Model, chosen: VerificationPlan, num_new: int, profile: Profile | None = None
    ) -> Target:
        """Return a target for the prompts, not yet run, by the arguments `generate` prepares."""
        made: list[Target] = []

        def make(_: Model, input_ids: Tensor, generation_config: Any, **prepared: Any) -> Tensor:
            for unwanted in ("logits_processor", "stopping_criteria"):
                prepared.pop(unwanted, None)
            given = model, input_ids, prepared, chosen, num_new, generation_config, profile
            made.append(make_target(*given))
            return input_ids

        self.generate(num_new=num_new, custom_generate=make)
        return made[0]

    def logits_at(
        self, wanted: Collection[tuple[int, _Path]], together: bool
    ) -> dict[tuple[int, _Path], Tensor]:
        """Return the logits after paths of rows, each float64 [vocab_size].

        Args:
            wanted: rows and paths.
            together: whether to run all in one batch, instead of one at a time.
        """
        ends = [
            (row, path)
            for row, path in wanted
            if not any(
                row == other and len(path) < len(longer) and longer[: len(path)] == path
                for other, longer in wanted
            )
        ]
        found = {}
        for batch in [ends] if together else [[end] for end in ends]:
            length = max(len(path) for _, path in batch)
            tokens = [[*path, *path[:1] * (1 + length - len(path))] for _, path in batch]
            output = self.generate(
                [row for row, _ in batch],
                length + 1,
                logits_processor=[
                    partial(forced, self._input_ids.new_tensor(tokens), self._input_ids.shape[1])
                ],
                output_logits=True,
                return_dict_in_generate=True,
            )
            for index, (row, path) in enumerate(batch):
                for num in range(1, len(path) + 1):
                    found[row, path[:num]] = output.logits[num][index].double()
        return found


def forced(token_ids: Tensor, num_before: int, input_ids: Tensor, scores: Tensor) -> Tensor:
    """Return scores that force tokens on every row.

    Args:
        token_ids: int64 [num_rows, num_tokens]; each step forces one column.
        num_before: tokens of each row before these.
    """
    due = token_ids[:, input_ids.shape[1] - num_before, None]
    return torch.full_like(scores, -torch.inf).scatter_(1, due.to(scores.device), 0.0)
