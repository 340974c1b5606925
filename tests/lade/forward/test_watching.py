"""What is read of a model holds whatever its weights are, and for texts of any length."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import LlamaModel, masking_utils

from lade.forward.job import why_by_torch
from lade.forward.reading import read
from tests.grids import thinned
from tests.lade.both import EIGHT, ONE, same_as_generate
from tests.lade.forward.conftest import Ran
from tests.lade.forward.families import SORTS, model_of

FAMILIES = [*SORTS, "deepseek_v2", "qwen3_next", "phimoe", "dots1-window"]


def is_same(model: Any, ids: Tensor = ONE, **options: Any) -> None:
    same_as_generate(model, ids, knows=True, config=EIGHT, eos_token_id=None, **options)


@pytest.mark.parametrize("value", thinned([0.0, 1.0, 1e30, math.nan], 0.0, math.nan))
@pytest.mark.parametrize("family", thinned(FAMILIES, "llama", "gpt_oss"))
def test_weights_decide_nothing(family: str, value: float) -> None:
    model = model_of(family)
    plan = read(model)
    for name, numbers in model.state_dict().items():
        if not name.endswith("inv_freq"):
            numbers.fill_(value)
    assert read(model) == plan


@pytest.mark.parametrize(
    ("family", "part", "factor"),
    [("llama", "mlp.gate", 0.0), ("glm4_moe", "gate.weight", 1e15), ("qwen3", "", 0.0)],
)
def test_weights_may_come_after_the_first_use(
    family: str, part: str, factor: float, ran: list[Ran]
) -> None:
    model = model_of(family)
    weights = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(factor if part in name else 1.0)
    # Where every weight is zero or huge, so is every logit: no verdict, and none is remembered.
    is_same(model, plainly=None if part else "no check can compare them")
    model.load_state_dict(weights)
    ran.clear()
    is_same(model)
    assert ran


# --- weights that are made of others --------------------------------------------------------------

PARAMETRIZED = {
    "model.embed_tokens.weight": "llama",
    "model.layers.1.input_layernorm.weight": "llama",
    "lm_head.weight": "llama",
    "model.layers.1.mlp.experts.down_proj": "qwen3_moe",
    "model.layers.1.self_attn.sinks": "gpt_oss",
}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ADAPTERS: dict[str, Any] = {
    "experts": {"target_modules": [], "target_parameters": EXPERTS},
    "a weight": {"target_modules": [], "target_parameters": ["o_proj.weight"]},
    "lengths": {"target_modules": ["o_proj"], "use_dora": True},
    "an embedding": {"target_modules": ["embed_tokens"]},
    "factors": {"target_modules": ["v_proj"], "feedforward_modules": []},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", thinned([*PARAMETRIZED, *ADAPTERS], [*PARAMETRIZED][1], "experts", "lengths")
)
def test_weights_made_of_others_are_those_of_the_moment(kind: str, ran: list[Ran]) -> None:
    """Adapters add nothing yet when they are first used."""
    model = model_of(PARAMETRIZED.get(kind, "qwen3_moe"))
    if kind in PARAMETRIZED:
        path, name = kind.rsplit(".", 1)
        parametrize.register_parametrization(model.get_submodule(path), name, nn.Tanh())
    else:
        peft = pytest.importorskip("peft")
        of_kind = peft.IA3Config if kind == "factors" else peft.LoraConfig
        model = peft.get_peft_model(model, of_kind(**ADAPTERS[kind])).eval().get_base_model()
    is_same(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(each in name for each in ("lora_", "ia3_", "original")):
                weight.add_(torch.linspace(-1, 1, weight.numel()).view(weight.shape))
    is_same(model)


class Changed(nn.Module):
    """A module whose results are multiplied by a buffer, or added to it."""

    def __init__(self, inner: nn.Module, numbers: Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("numbers", numbers)

    def forward(self, states: Tensor) -> Any:
        made, numbers = self.inner(states), self.get_buffer("numbers")
        return made * numbers if numbers.any() else made + numbers


@pytest.mark.parametrize("numbers", [torch.ones(1), torch.ones(64), torch.zeros(64)], ids=str)
def test_a_buffer_of_ones_or_zeros_is_not_left_out(numbers: Tensor) -> None:
    model = model_of("llama")
    layer = model.model.layers[1]
    before = str(read(model))
    layer.register_buffer("unused", numbers)
    assert str(read(model)).count("Constant(") == before.count("Constant(")
    layer.mlp = Changed(layer.mlp, numbers)
    assert why_by_torch(model) == "its code depends on numbers of its parameters"


# --- what a query sees ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    thinned(
        ["qwen2_moe-window", "phimoe-window", "gemma3_text", "afmoe"],
        *("phimoe-window", "gemma3_text"),
    ),
)
def test_prompts_beyond_windows_are_answered_as_by_generate(family: str, ran: list[Ran]) -> None:
    """Two of them have their window in the mask alone."""
    model = model_of(family, widens=True)
    assert read(model).reach == 16
    for num in (12, 17, 70):
        is_same(model, torch.randint(3, 96, (1, num), generator=torch.Generator().manual_seed(num)))
    assert ran


def test_windows_of_thousands_of_tokens_are_read() -> None:
    plan = read(model_of("mistral", sliding_window=4096, max_position_embeddings=131_072))
    assert (plan.reach, *{span and span.window for span in plan.spans}) == (4096, 4096)


@pytest.mark.parametrize(
    "sees",
    [
        lambda _, __, query, key: (key <= query) & (key > query - 50),
        lambda _, __, query, key: (key <= query) & ((query < 511) | (key % 3 == 0)),
        lambda _, __, query, key: key // 40 == query // 40,
    ],
)
def test_masks_that_no_config_tells_of_are_refused(sees: Any) -> None:
    model = model_of("llama")

    def forward(self: Any, *args: Any, attention_mask: Any = None, **given: Any) -> Any:
        of_tokens = self.embed_tokens(given["input_ids"]), attention_mask, None
        mask = masking_utils.create_causal_mask(self.config, *of_tokens, and_mask_function=sees)
        return LlamaModel.forward(self, *args, attention_mask=mask, **given)

    model.model.__class__ = type("LlamaModel", (LlamaModel,), {"forward": forward})
    assert "masks" in str(why_by_torch(model))
