"""Models that `torch.compile` was applied to, or to parts of: lade compiles nothing more."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lade
from tests.lade.tiny import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:lade decodes:lade.PlainDecodingWarning")

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}


class Backend:
    """Runs graphs as they are; counts how many there are, and how often they run."""

    def __init__(self) -> None:
        self.num_compiled = self.num_run = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.num_compiled += 1

        def run(*args: Any) -> Any:
            self.num_run += 1
            return graph.forward(*args)

        return run


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def forward_of(model: Any, **options: Any) -> None:
    model.forward = torch.compile(model.forward, **options)


def in_place(model: Any, **options: Any) -> None:
    model.compile(**options)


def layer(model: Any, **options: Any) -> None:
    model.model.layers[0] = torch.compile(model.model.layers[0], **options)


def layer_in_place(model: Any, **options: Any) -> None:
    model.model.layers[1].mlp.compile(**options)


def forward_of_layer(model: Any, **options: Any) -> None:
    model.model.norm.forward = torch.compile(model.model.norm.forward, **options)


WAYS = {
    each.__name__: each for each in (forward_of, in_place, layer, layer_in_place, forward_of_layer)
}
PARTS = {
    "forward_of": "LlamaForCausalLM",
    "in_place": "LlamaForCausalLM",
    "layer": "model.layers.0",
    "layer_in_place": "model.layers.1.mlp",
    "forward_of_layer": "model.norm",
}


def prompt(length: int) -> Any:
    return torch.randint(2, 90, (1, length), generator=torch.Generator().manual_seed(length))


def decode(
    way: str, call: Callable[..., Any], lengths: Any, then: bool, **options: Any
) -> tuple[Any, ...]:
    """Return the texts, how many compilations there were, and runs of plain `generate` after it."""
    torch._dynamo.reset()
    backend, model = Backend(), tiny_model(seed=1)
    WAYS[way](model, backend=backend, **options.pop("compiling", {}))
    texts = [call(model, prompt(length), **GREEDY, **options).tolist() for length in lengths]
    num_compiled, num_run = backend.num_compiled, backend.num_run
    if then:
        model.generate(prompt(lengths[-1] + 4), **GREEDY, **options)
    return texts, num_compiled, num_run, backend.num_compiled, backend.num_run


def plain(model: Any, *args: Any, **options: Any) -> Any:
    return type(model).generate(model, *args, **options)


def in_batcher(model: Any, *args: Any, **options: Any) -> Any:
    with lade.Batcher(model) as batcher:
        return batcher.submit(*args, **options).result()


@pytest.mark.parametrize(
    ("way", "dynamic"), [("forward_of", None), ("in_place", True), ("layer", None)]
)
def test_nothing_is_compiled_but_what_generate_compiles(way: str, dynamic: bool | None) -> None:
    given: dict[str, Any] = {"lengths": (5, 12), "then": True, "compiling": {"dynamic": dynamic}}
    expected = decode(way, plain, **given)
    assert expected[1] > 0
    assert decode(way, lade.generate, **given) == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("call", [lade.generate, in_batcher])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_compiled_over_many_prompts(way: str, dynamic: bool | None, call: Any) -> None:
    lengths = (16, 40, 100, 23, 57, 200)
    given: dict[str, Any] = {"lengths": lengths, "then": True, "compiling": {"dynamic": dynamic}}
    assert decode(way, call, **given) == decode(way, plain, **given)


@pytest.mark.parametrize("way", ["forward_of", "layer"])
def test_a_whole_graph_and_a_static_cache_go_on_past_the_limit_of_torch(way: str) -> None:
    given: dict[str, Any] = {
        "lengths": (16, 40, 23),
        "then": True,
        "compiling": {"fullgraph": True},
        "cache_implementation": "static",
    }
    expected = decode(way, plain, **given)
    assert decode(way, lade.generate, **given) == expected


@pytest.mark.parametrize("way", WAYS)
def test_a_probe_says_which_part_is_compiled_and_compiles_nothing(way: str) -> None:
    model, backend = tiny_model(), Backend()
    assert lade.probe(model).verification == "tree"
    WAYS[way](model, backend=backend)
    found = lade.probe(model)
    assert found.verification == "plain"
    assert set(found.reasons) == {"tree", "chain", "snapshot"}
    why = f"{PARTS[way]} is compiled by torch.compile, and drafts would have it compiled anew"
    assert all(reason.startswith(why) for reason in found.reasons.values())
    with pytest.warns(lade.PlainDecodingWarning, match=r"is compiled by torch\.compile"):
        lade.generate(model, prompt(5), **GREEDY)
    lade.generate(model, prompt(5), **GREEDY)
    lade.warm_up(model)
    with pytest.raises(lade.UnsupportedModelError, match=r"is compiled by torch\.compile"):
        lade.generate(model, prompt(5), config=lade.Config(verification="chain"), **GREEDY)


def test_a_part_put_back_has_drafts_again() -> None:
    model = tiny_model(seed=1)
    whole = model.model.layers[0]
    layer(model, backend=Backend())
    assert lade.probe(model).verification == "plain"
    model.model.layers[0] = whole
    assert lade.probe(model).verification == "tree"


def test_a_wrapper_of_the_whole_model_is_no_hindrance() -> None:
    """A guard: `generate` runs the model inside of it."""
    backend, model = Backend(), tiny_model(seed=1)
    wrapped = torch.compile(model, backend=backend)
    expected = model.generate(prompt(5), **GREEDY)
    assert lade.generate(wrapped, prompt(5), **GREEDY).tolist() == expected.tolist()
    assert lade.probe(wrapped).verification == "tree"
