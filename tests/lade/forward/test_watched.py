"""What lade replaces is watched: a model that differs from the one that was read is read anew."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer

import lade
from lade.forward import words
from lade.probing.profile import Profiles, profile_of
from tests.grids import thinned
from tests.lade import states
from tests.lade.both import EIGHT, ONE, THREE, same_as_generate
from tests.lade.forward.conftest import Ran
from tests.lade.forward.families import adapted, model_of
from tests.lade.states import KINDS, SIZE, Set
from tests.lade.tiny import tiny_model

LONG: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None}
SHOWN = KINDS[KINDS.index(states.scaling) :]
QUICK = [
    *(states.bias, states.scaling_in_place, states.sight, states.mask_of_sdpa),
    *(states.patched_rsqrt, states.patched_cache, states.weights_by_a_hook, states.turned_states),
    *(states.adapter_on_parameters, states.remote_args, states.remote_activation),
]
# Masks of the user's are made by the model's own forward; angles are made by the model as it is.
WITHOUT_JOBS = {states.registered_mask, states.mask_of_sdpa, states.local_mask}
WITHOUT_JOBS |= {states.rows_together, states.wrapped_for_a_row}  # a hook inside, a failed proof
WITHOUT_JOBS |= {states.adapter_on_parameters}


def compiled(family: str = "llama", **options: Any) -> Any:
    """Return a model whose forwards run by a job."""
    model = tiny_model(
        family, seed=3, dtype=torch.float32, hidden_size=SIZE, head_dim=16, **options
    )
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.PlainDecodingWarning)
        warnings.filterwarnings("ignore", "lade('s compiled forward| reuses) no ", RuntimeWarning)
        yield
    states.put_back()


@pytest.mark.parametrize("kind", thinned(SHOWN, *QUICK), ids=lambda kind: kind.__name__)
def test_what_looking_shows_is_heeded_by_jobs(kind: Callable[[Any], Set], ran: list[Ran]) -> None:
    model = compiled()
    put = kind(model)
    for alpha in (0.0, 1.0, 0.0):
        put(alpha)
        lade.release(model)
        for ids in (ONE, THREE)[: 1 + (alpha > 0)]:
            ran.clear()
            same_as_generate(model, ids, knows=True, config=EIGHT, **LONG)
    assert ran or kind in WITHOUT_JOBS


@pytest.mark.parametrize("where", thinned(["norm", "base", "addition"], "norm", "addition"))
def test_a_bias_that_comes_is_added(where: str, ran: list[Ran]) -> None:
    model = model_of("llama")
    layers = adapted(model)
    profile_of(model)
    module: Any = model.model.layers[1].input_layernorm
    if where != "norm":
        module = layers[2].inner if where == "base" else layers[2].seconds["a"]
    same_as_generate(model, ONE, accept=0.7, **LONG)
    before = len([*Profiles.of(model)])
    module.bias = nn.Parameter(torch.full((module.weight.shape[0],), 0.5), requires_grad=False)
    same_as_generate(model, ONE, accept=0.7, **LONG)
    assert len([*Profiles.of(model)]) == before + 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logits_scaling", np.float64(4.0)),
        ("embedding_multiplier", torch.tensor(4.0)),
    ],
)
def test_numbers_of_every_type_in_a_config_are_watched(
    name: str, value: Any, ran: list[Ran]
) -> None:
    model = model_of("granite")
    same_as_generate(model, ONE, accept=0.7, **LONG)
    assert ran
    # A config takes no tensor by its front door.
    vars(model.config if name == "logits_scaling" else model.model)[name] = value
    for _ in range(2):
        same_as_generate(model, ONE, accept=0.7, **LONG)
        if torch.is_tensor(value):
            value.mul_(0.5)


def test_what_no_forward_reads_is_not_watched(ran: list[Ran]) -> None:
    """Neither what hooks keep, nor what a user notes on modules, makes a model another one."""
    model = compiled()
    for number in range(3):
        model.model.layers[1].note = torch.full((3,), number)
        model.notes = {"call": number}
        model.generation_config.top_k = 5 + number
        same_as_generate(model, ONE, knows=True, config=EIGHT, **LONG)
    assert len([*Profiles.of(model)]) == 1


WRITING = ["llama", "mistral", "gpt2", "gemma3_text", "mamba", "falcon_h1"]


@pytest.mark.parametrize("family", thinned(WRITING, "llama", "gemma3_text", "falcon_h1"))
def test_an_unchanged_model_is_looked_at_once(family: str) -> None:
    """Forwards that write to modules, as some do, change nothing of it either."""
    model = model_of(family)
    for _ in range(3):
        same_as_generate(model, ONE, **LONG)
    assert len([*Profiles.of(model)]) == 1


class Evicting(DynamicLayer):  # type: ignore[misc]
    """A cache layer of the user's own: the middle of a long text counts for nothing."""

    def update(self, key: Tensor, value: Tensor, *args: Any, **given: Any) -> Any:
        keys, values = super().update(key, value, *args, **given)
        if values.shape[2] > 20:  # a check has fewer
            values = values.clone()
            values[:, :, 4:-4] = 0
        return keys, values


@pytest.mark.parametrize("is_first", [True, False])
def test_caches_of_the_users_are_used(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled()
    if not is_first:
        same_as_generate(model, ONE, knows=True, config=EIGHT, **LONG)
    with monkeypatch.context() as patching:
        patching.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", Evicting)
        for ids in (ONE, THREE):
            same_as_generate(model, ids, knows=True, config=EIGHT, **LONG)
    _, got = same_as_generate(model, ONE, knows=True, config=EIGHT, **LONG)
    assert got.stats.num_accepted_tokens > 0


# --- hooks ----------------------------------------------------------------------------------------


def test_hooks_get_the_modules_of_the_model(ran: list[Ran]) -> None:
    model, seen = compiled(), list[bool]()
    layer = model.model.layers[1]

    def keep(module: Any, *_: Any) -> None:
        seen.append(module is layer or module is model)
        module.num_seen = getattr(module, "num_seen", 0) + 1

    layer.register_forward_hook(keep)
    layer.register_forward_pre_hook(keep)
    model.register_forward_hook(keep)
    same_as_generate(model, ONE, knows=True, config=EIGHT, **LONG)  # with the check, by views apart
    for _ in range(2):
        seen.clear()
        layer.num_seen = model.num_seen = 0
        lade.generate(model, ONE, pad_token_id=0, do_sample=False, config=EIGHT, **LONG)
        assert {*seen} == {True}
        assert layer.num_seen >= 2 * model.num_seen / 3 > 0
    assert ran


def test_a_bias_that_a_hook_brings_is_added(ran: list[Ran]) -> None:
    model = compiled()
    product = model.model.layers[1].self_attn.o_proj
    bias = nn.Parameter(torch.linspace(-1, 1, SIZE), requires_grad=False)
    model.model.layers[1].register_forward_pre_hook(lambda *_: setattr(product, "bias", bias))
    model.model.layers[1].register_forward_hook(lambda *_: setattr(product, "bias", None))
    for _ in range(3):
        same_as_generate(model, ONE, knows=True, config=EIGHT, **LONG)


# --- what is masked -------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [ONE, THREE], ids=["one", "three"])
@pytest.mark.parametrize(
    ("special", "dtype"), [(float("nan"), torch.float32), (float("inf"), torch.float64)]
)
def test_a_draft_token_without_numbers_spoils_no_other(
    special: float, dtype: torch.dtype, ids: Tensor
) -> None:
    """A row of the embedding that was never trained, say; plain decoding never chooses it."""
    model = tiny_model("llama", seed=3, dtype=dtype, hidden_size=SIZE, head_dim=16)
    given: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, **LONG}
    mask = (ids != 0).long()
    text = model.generate(ids, attention_mask=mask, **given)
    unused = next(each for each in range(3, 96) if each not in text.flatten().tolist())
    with torch.no_grad():
        model.model.embed_tokens.weight[unused] = special
    pool = lade.NGramPool()
    for row in text.tolist():
        for place in range(8, len(row)):
            pool.observe([*row[place - 4 : place], unused, *row[place + 1 :]])
    got = lade.generate(model, ids, attention_mask=mask, pool=pool, config=EIGHT, **given)
    assert got.tolist() == text.tolist()


def _unsummed(views: Any) -> None:
    views._weights._table[views._weights.starts[1], words.AT_END] = 0


def _scaled(views: Any) -> None:
    table, num = views._weights._table, views._weights.num_phases
    of_attention = {row[words.OF] for row in table[:num] if row[words.RUN] != 0}
    table[[num - 1 + each for each in of_attention], words.SCALING] = 0


def _embedded(views: Any) -> None:
    given = views._given

    def scaled(request: Any) -> list[Tensor]:
        embedded, *others = given(request)
        return [3.0 * embedded, *others]

    views._given = scaled


@pytest.mark.parametrize("spoil", thinned([_unsummed, _scaled, _embedded], _unsummed))
def test_a_failed_proof_ends_a_plan_for_all_calls(spoil: Any, ran: list[Ran]) -> None:
    """What no look at the model can show is noticed after 128 steps with a draft, and once."""
    model, pool, steps, wrong, told = compiled(), lade.NGramPool(), list[lade.Step](), 0, 0
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    lade.generate(model, ONE, **options)
    spoil(views := profile_of(model).fast_views_for(model))
    for number in range(24):
        ids = ONE + number % 4
        wanted = model.generate(ids, **options)
        pool.observe(wanted[0].tolist())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = lade.generate(
                model, ids, pool=pool, config=EIGHT, on_step=steps.append, **options
            )
        wrong += not torch.equal(got, wanted)
        told += any(issubclass(each.category, lade.VerificationWarning) for each in caught)
        if told:  # the next call reads the model again
            assert getattr(views, "why_not", None) is not None
            break
    assert wrong > 0
    assert told == 1
    assert sum(step.num_draft_tokens > 0 for step in steps) <= 128
    ran.clear()
    for number in range(4):
        same_as_generate(model, ONE + number, knows=True, config=EIGHT, **options)
    assert ran
    assert lade.probe(model).verification == "tree"
