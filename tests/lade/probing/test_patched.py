"""Functions of torch that somebody has patched: lade calls what `generate` calls at that time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import lade
from tests.lade.both import EIGHT, same_as_generate
from tests.lade.tiny import tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:lade decodes:lade.PlainDecodingWarning"),
    pytest.mark.filterwarnings("ignore:lade decodes:lade.VerificationWarning"),
    pytest.mark.filterwarnings("ignore:lade reuses no prefix:RuntimeWarning"),
]

PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 9, 11, 13, 5, 6, 7, 8, 20, 21, 22, 23]])
SHORT = PROMPT[:, :7]
OPTIONS: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": None, "do_sample": False}

_attend, _linear, _softmax = (
    functional.scaled_dot_product_attention,
    functional.linear,
    functional.softmax,
)
_multinomial = torch.multinomial


def sharper(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _attend(query * 1.4, *args, **kwargs)


def sharper_alone(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Sharpen the attention of a token that is in a forward of its own."""
    return _attend(query * (2.0 if query.shape[2] == 1 else 1.0), *args, **kwargs)


def rounded(inputs: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    return _linear(inputs, (weight * 16).round() / 16, bias)


def rounded_together(inputs: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    """Round inputs as the largest of all tokens demands."""
    step = inputs.abs().max() / 8 + 1e-9
    return _linear((inputs / step).round() * step, weight, bias)


def _with_scale(factor: float, *args: Any, **kwargs: Any) -> Tensor:
    return _attend(*args, **{**kwargs, "scale": factor})


class Rounded:
    """A patch that is no function."""

    __call__ = staticmethod(rounded)


IN_FORWARDS: dict[str, tuple[str, Any]] = {
    "sharper": ("scaled_dot_product_attention", sharper),
    "sharper alone": ("scaled_dot_product_attention", sharper_alone),
    "partial": ("scaled_dot_product_attention", partial(_with_scale, 0.7)),
    "rounded": ("linear", rounded),
    "rounded together": ("linear", rounded_together),
    "object": ("linear", Rounded()),
}
in_forwards = pytest.mark.parametrize(("name", "patch"), IN_FORWARDS.values(), ids=IN_FORWARDS)


def hot(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _softmax(scores * 0.5, *args, **kwargs)


def squared(probs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _multinomial(probs * probs, *args, **kwargs)


def second(scores: Tensor, dim: int = -1, keepdim: bool = False) -> Tensor:
    return scores.topk(2, dim).indices.select(dim, 1)


IN_CHOICES: dict[str, tuple[Any, str, Any, bool]] = {
    "softmax": (functional, "softmax", hot, True),
    "multinomial": (torch, "multinomial", squared, True),
    "argmax": (torch, "argmax", second, False),
    "argmax by torch's": (torch, "argmax", torch.argmin, False),
}
in_choices = pytest.mark.parametrize(
    ("module", "name", "patch", "do_sample"), IN_CHOICES.values(), ids=IN_CHOICES
)


def wide(**options: Any) -> Any:
    """Return a model with layers for which lade has products of its own."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 400}
    return tiny_model("llama", seed=1, **{"dtype": torch.float32, **sizes, **options})


def check(model: Any, **options: Any) -> int:
    """Hold lade against `generate`; return how many tokens were drafted with a good pool."""
    given = {**OPTIONS, **options}
    torch.manual_seed(0)
    pool = lade.NGramPool()
    pool.observe(
        model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **given)[0].tolist()
    )
    for config in (None, lade.Config(max_draft_tokens=0), EIGHT):
        _, got = same_as_generate(model, PROMPT, pool=pool, config=config, **given)
    num: int = got.stats.num_draft_tokens
    return num


@pytest.mark.parametrize(
    ("make", "do_sample"),
    [(tiny_model, False), (tiny_model, True), (wide, False)],
    ids=["float64", "sampled", "products"],
)
@pytest.mark.parametrize("is_known", [False, True], ids=["before", "after"])
@in_forwards
def test_a_function_in_forwards_is_the_patched_one(
    name: str,
    patch: Any,
    is_known: bool,
    make: Callable[[], Any],
    do_sample: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make()
    if is_known:
        assert check(model, do_sample=do_sample) > 0
    plain = model.generate(PROMPT, **OPTIONS)
    with monkeypatch.context() as patching:
        patching.setattr(functional, name, patch)
        assert model.generate(PROMPT, **OPTIONS).tolist() != plain.tolist()
        check(model, do_sample=do_sample)
    assert check(model, do_sample=do_sample) > 0


@in_choices
@pytest.mark.parametrize("is_known", [False, True], ids=["before", "after"])
def test_a_function_that_chooses_is_the_patched_one(
    is_known: bool,
    module: Any,
    name: str,
    patch: Any,
    do_sample: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model(seed=1)
    if is_known:
        assert check(model, do_sample=do_sample) > 0
    with monkeypatch.context() as patching:
        patching.setattr(module, name, patch)
        check(model, do_sample=do_sample)
    assert check(model, do_sample=do_sample) > 0


@in_forwards
def test_what_was_kept_is_not_used_under_a_patch_nor_the_other_way_round(
    name: str, patch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = wide(), lade.Config(reuses_prefix=True, max_draft_tokens=8)

    def num_reused() -> int:
        _, got = same_as_generate(model, PROMPT, config=config, **OPTIONS)
        num: int = got.stats.num_reused_tokens
        return num

    assert [num_reused(), num_reused()] == [0, 17]
    with monkeypatch.context() as patching:
        patching.setattr(functional, name, patch)
        assert [num_reused(), num_reused()] == [0, 0]
    assert num_reused() in (0, 17)
    assert num_reused() == 17


@in_forwards
def test_calls_of_a_batcher_run_the_patched_one(
    name: str, patch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wide()
    in_batcher(model, do_sample=False)
    with monkeypatch.context() as patching:
        patching.setattr(functional, name, patch)
        in_batcher(model, do_sample=False)
    in_batcher(model, do_sample=False)


@in_choices
def test_calls_of_a_batcher_choose_by_the_patched_one(
    module: Any, name: str, patch: Any, do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(seed=1)
    in_batcher(model, do_sample=do_sample)
    with monkeypatch.context() as patching:
        patching.setattr(module, name, patch)
        in_batcher(model, do_sample=do_sample)
    in_batcher(model, do_sample=do_sample)


def in_batcher(model: Any, do_sample: bool) -> None:
    """Hold four calls that run beside each other against `generate`."""
    given, expected = {**OPTIONS, "do_sample": do_sample}, []
    for seed, ids in enumerate((PROMPT, SHORT)):
        torch.manual_seed(seed)
        mask = torch.ones_like(ids)
        expected.append(model.generate(ids, attention_mask=mask, **given)[0].tolist())
    pool = lade.NGramPool()
    for text in expected:
        pool.observe(text)
    with lade.Batcher(model, pool=pool, config=EIGHT) as batcher:
        asked = [
            batcher.submit(ids, seed=seed, **given)
            for seed, ids in [*enumerate((PROMPT, SHORT))] * 2
        ]
        assert [each.result()[0].tolist() for each in asked] == expected * 2
