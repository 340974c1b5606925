"""A tiny model with random weights of every causal LM that the installed transformers has.

Default configurations are shrunk by the names of their fields, so that new model types are handled
too. Types whose numbers must fit each other in special ways are in `overrides.py`. Nothing is
downloaded.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D

from lade import LadeError
from tests.support.overrides import MORE_ROWS, NOT_TEXT, OVERRIDES

Model = Any  # a transformers PreTrainedModel with generate; transformers is untyped here

VOCAB_SIZE = 97
PAD_TOKEN_ID = 0
BOS_TOKEN_ID = 1
EOS_TOKEN_ID = 96

_MIN_LAYERS = 3
_MAX_LAYERS = 12
_LAYER_COUNT = re.compile(r"num_hidden_layers|n_layers?|num_layers|(num_)?(en|de)coder_layers")
_TOKEN_ID = re.compile(r"token_ids?$|token_index$|_index$")
_TOKEN_IDS = {
    "pad_token_id": PAD_TOKEN_ID,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "decoder_start_token_id": BOS_TOKEN_ID,
}
_SWITCHES = {
    "is_decoder": True,
    "tie_word_embeddings": False,  # a tied model with random weights repeats its last token
}
_RECURRENT = re.compile(r"A_log|dt_bias|time_decay|decay")
_LAYER_INDICES = re.compile(r"layers|_(idxs|ids|indices|indexes)$")
# An integer field is cut down to the size of the first pattern found in its name. Sizes that
# must fit each other: width 64 = 4 heads of 16; 128 = 8 recurrent heads of 16 = expand * width.
_SIZES = [
    (re.compile(pattern), size)
    for pattern, size in {
        r"vocab": VOCAB_SIZE,
        r"max_.*positions?|n_positions|max_seq|n_ctx|model_max|context_length|axial_pos_shape": 512,
        r"max_window_layers|offset|dense_replace|dense_layers|layer_start": 1,
        r"period|interval|every_n|pattern|sparse_step|kv_shared_layers|depth|per_stack|per_attn": 2,
        r"block_size|topk_blocks": 4,
        r"^keep_window": 2048,  # doge: cached steps beyond it differ from a full forward
        r"^local_attention$": 16,  # both sides together
        r"window|chunk": 8,
        r"(qk_(rope|nope)|^v)_head_dim": 8,
        r"mamba_n(um)?_heads": 8,
        r"kv_heads|key_value_heads|kv_n_heads|query_groups|key_heads|n_groups|ngroups": 2,
        r"head_?dim|d_head|d_kv|head_size|dim_head|kv_channels": 16,
        r"index.*heads": 16,  # with few, all-zero scores tie, and top-k picks any of them
        r"heads?$|n_heads": 4,
        r"experts_per|expert_group|n_group|moe_k$|moe_top_?k|top_k_experts": 2,
        r"topk_group|shared_experts$": 1,
        r"expert(s|_num)$": 4,
        r"kv_lora_rank": 16,
        r"rank|state_size|d_state|rotary_dim|d_rel|rel_extent": 8,
        r"d_ssm": 128,
        r"(expert|moe).*(intermediate|ffn|hidden)": 32,
        r"intermediate|ffn|d_?ff|dim_ff|d_inner|mlp_dim|feed_forward": 96,
        r"per_layer_input|ple_embed": 16,
        r"hidden_size|d_model|dim_model|embd|emb_dim|embed|width|put_size|adapter|out_dim": 64,
        r"(?<!image)_(dims?|sizes?|channels|features|units)$": 64,  # for types not seen yet
    }.items()
]

# Fields kept equal to another one if they are equal by default.
_FOLLOWS = {
    "num_key_value_heads": "num_attention_heads",
    "head_dim": "qk_rope_head_dim",
    "adapter_in_dim": "hidden_size",
}
# Fields that must not be empty, though some defaults leave them so.
_NEEDED = {"head_dim": 16, "num_key_value_heads": 2}


def causal_lm_types() -> list[str]:
    """Return the model types that the installed transformers maps to a causal LM, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


#: Variants of installed types: name -> (model type, what its default configuration leaves off).
VARIANTS = {name: row for name, row in sorted(MORE_ROWS.items()) if row[0] in causal_lm_types()}


class CannotBuild(LadeError):
    """A tiny model of this type cannot be built, or its forward does not run."""


class NotText(CannotBuild):
    """Models of this type do not continue a text."""


def tiny_config(name: str, **overrides: Any) -> PretrainedConfig:
    """Return a small configuration of a model type or variant."""
    model_type, switches = VARIANTS.get(name, (name, {}))
    try:
        return _shrunk(CONFIG_MAPPING[model_type], {**switches, **overrides})
    except Exception as error:  # a configuration's own checks may raise anything
        raise CannotBuild(f"{name}: no small configuration: {error_line(error)}") from error


def tiny_model(
    name: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    attention: str | None = None,
    widens: bool = False,
    **overrides: Any,
) -> Model:
    """Return a tiny causal LM on the CPU whose logits depend on the whole text.

    It is of a type of `causal_lm_types` or of a key of `VARIANTS`. `overrides` are fields of its
    configuration, set before the others are shrunk. With `widens`, windows are of 16 tokens and
    chunks of 32, else both of 8. torch's own random state is left unchanged.

    Raises:
        CannotBuild: it cannot be built, or its forward does not run; `NotText` by its type.
    """
    model_type = VARIANTS.get(name, (name,))[0]
    if model_type in NOT_TEXT:
        raise NotText(f"{name}: {NOT_TEXT[model_type]}")
    config = tiny_config(name, **overrides)
    _replace_timm(config)
    for part in (config, config.get_text_config(decoder=True)) if widens else ():
        for field, value in [*vars(part).items()]:
            if value == 8 and ("window" in field or "chunk" in field):
                setattr(part, field, 16 if "window" in field else 32)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation=attention,
                experts_implementation="eager",  # grouped experts do not run in float64
            ).eval()
            for parameter_name, parameter, is_transposed in _parameters(model):
                _randomize(parameter_name, parameter, is_transposed)
            for buffer_name, buffer in model.named_buffers():
                if buffer_name.endswith("layer_scalar"):  # one by default
                    buffer.uniform_(0.5, 1.5)
            logits = _settle(model)
    except Exception as error:  # a class not seen before may raise anything
        raise CannotBuild(f"{name}: {error_line(error)}") from error
    if logits.shape[-1] < VOCAB_SIZE or not logits.isfinite().all():
        raise CannotBuild(f"{name}: its logits {list(logits.shape)} are no text, or not finite")
    model.generation_config = GenerationConfig(
        pad_token_id=PAD_TOKEN_ID, bos_token_id=BOS_TOKEN_ID, eos_token_id=EOS_TOKEN_ID
    )
    return model


def _settle(model: Model) -> Tensor:
    """Run a model once and make its text vary; return logits [4, 32, vocab_size].

    What all hidden states have in common is removed from the output layer: with random weights it
    can be most of them, and would make every token the same. If the forward fails, it is repeated
    with the parts that the class keeps in float32 converted to that.
    """
    token_ids = torch.randint(2, VOCAB_SIZE - 1, (4, 32))
    hidden: list[Tensor] = []
    head = model.get_output_embeddings()
    hooks = []
    if isinstance(head, torch.nn.Linear):
        hooks.append(head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0])))
    try:
        try:
            logits: Tensor = model(input_ids=token_ids).logits
        except RuntimeError:
            kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
            for name, parameter in model.named_parameters():
                if any(part in name for part in kept):
                    parameter.data = parameter.data.float()
            logits = model(input_ids=token_ids).logits
    finally:
        for hook in hooks:
            hook.remove()
    if hidden:
        common = torch.nn.functional.normalize(hidden[-1].flatten(0, -2).mean(0), dim=0)
        head.weight.sub_((head.weight @ common)[:, None] * common)
        if head.bias is not None:
            head.bias.zero_()
    return logits


def _replace_timm(config: PretrainedConfig) -> None:
    """Replace a vision tower of timm, which needs one more package and is of no use to a text."""
    for name, part in [*vars(config).items()]:
        kind = getattr(part, "model_type", None)
        if MODEL_MAPPING_NAMES.get(kind) != "TimmWrapperModel":
            continue
        tower = _shrunk(CONFIG_MAPPING["siglip_vision_model"], {})
        # What the rest of the model reads of it. Not set by setattr, which checks the class.
        vars(tower).update({key: vars(part)[key] for key in vars(part).keys() - vars(tower).keys()})
        vars(config)[name] = tower


def error_line(error: Exception) -> str:
    """Return an error as one line, with its type."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _shrunk(kind: Any, given: dict[str, Any]) -> PretrainedConfig:
    """Return a small configuration of a class; `given` fields are taken as they are."""
    default = kind(**given)  # with `given`, which may change the kinds of its layers
    given = {**OVERRIDES.get(kind.model_type, {}), **given}
    presets = {field.name: field.default for field in dataclasses.fields(kind)}
    # Not by getattr, which fails for a field that differs between layers.
    values = {name: vars(default).get(name, preset) for name, preset in presets.items()}
    per_layer = default.to_dict().get("per_layer_config")  # {layer index: {field: value}}
    if per_layer and "per_layer_config" not in given:
        values["per_layer_config"] = {int(index): part for index, part in per_layer.items()}
    count = getattr(default, "num_hidden_layers", 0) or 0
    counts = [name for name in presets if _LAYER_COUNT.fullmatch(name)]
    layers = [*range(count)] if given.keys() & counts else _chosen_layers(values, count)
    spare_ids = iter(range(EOS_TOKEN_ID - 1, 0, -1))
    small: dict[str, Any] = {}
    for name, value in values.items():
        if name in given:
            continue
        if value is None and name in _NEEDED:
            small[name] = _NEEDED[name]
        elif name in counts:
            small[name] = len(layers)
        elif name == "per_layer_config":
            parts = [(new, value[old]) for new, old in enumerate(layers) if old in value]
            small[name] = {new: _small_part(part, values) for new, part in parts}
        elif name in _SWITCHES:
            small[name] = _SWITCHES[name]
        elif isinstance(value, PretrainedConfig):
            small[name] = _shrunk(type(value), {})
        elif _TOKEN_ID.search(name):
            small[name] = _TOKEN_IDS.get(name, value)
            if isinstance(value, int) and value >= VOCAB_SIZE and name not in _TOKEN_IDS:
                small[name] = next(spare_ids)
        elif _is_layer_indices(name, value, count):
            small[name] = [new for new, old in enumerate(layers) if old in value]
        elif _is_per_layer(value, count):
            small[name] = [_small(name, value[old]) for old in layers]
        elif isinstance(presets[name], int):  # else the class derives it from other fields
            small[name] = _small(_ruled_by(name, values), value)
    return kind(**{**small, **given})


def _small(name: str, value: Any) -> Any:
    """Return a field's value, made small if it is an integer."""
    if type(value) is not int:
        return value
    return min(value, next((size for pattern, size in _SIZES if pattern.search(name)), value))


def _small_part(part: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Return one layer's own fields made small, sizes in the same ratio to the `whole`'s."""
    small = {}
    for name, value in part.items():
        small[name] = _small(_ruled_by(name, part), value)
        if type(value) is int and whole[name]:
            of_whole = _small(_ruled_by(name, whole), whole[name])
            small[name] = max(1, of_whole * value // whole[name])
    return small


def _ruled_by(name: str, values: dict[str, Any]) -> str:
    """Return the name of the field whose rule gives a field its size."""
    followed = _FOLLOWS.get(name, name)
    return followed if values.get(followed) == values[name] else name


def _is_per_layer(value: Any, count: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == count > 1


def _is_layer_indices(name: str, value: Any, count: int) -> bool:
    if not (_LAYER_INDICES.search(name) and isinstance(value, list) and value):
        return False
    return all(type(i) is int and i < count for i in value) and sorted(set(value)) == value


def _chosen_layers(values: dict[str, Any], count: int) -> list[int]:
    """Return the layers to keep: two or more of every kind if possible, in the default's order.

    Each round takes the next layer of every kind, so that a layer that reads what an earlier one
    of its kind has stored still has one before it.
    """
    columns: list[Sequence[Any]] = []
    for name, value in values.items():
        if _is_layer_indices(name, value, count) or name == "per_layer_config":
            columns.append([i in value for i in range(count)])
        elif _is_per_layer(value, count):
            columns.append(value)
    kinds = [repr([column[i] for column in columns]) for i in range(count)]
    chosen: list[int] = []
    num_rounds = 0
    while num_rounds < 2 or len(chosen) < _MIN_LAYERS:
        seen: dict[str, int] = {}
        for i in range(chosen[-1] + 1 if chosen else 0, count):
            seen.setdefault(kinds[i], i)
        if not seen or len(chosen) + len(seen) > _MAX_LAYERS:
            break
        chosen += seen.values()
        num_rounds += 1
    return chosen


def _parameters(model: Model) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield each parameter's name, the parameter, and whether its inputs are on the first axis."""
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(module_name, recurse=False):
            yield name, parameter, isinstance(module, Conv1D)


def _randomize(name: str, parameter: Tensor, is_transposed: bool) -> None:
    """Draw a matrix so that activations keep their scale; change all else only a little."""
    noise = torch.randn(parameter.shape, dtype=torch.float64)
    if parameter.numel() == max(parameter.shape, default=1) or _RECURRENT.search(name):
        # Norms, biases and decays: near what the class draws, as they must stay in their range.
        parameter.add_(0.1 * noise)
    else:
        fan_in = parameter.shape[0 if is_transposed else -1]
        parameter.copy_(1.5 * fan_in**-0.5 * noise)
