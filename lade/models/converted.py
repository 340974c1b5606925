"""What llama.cpp's converter writes of a model, by architecture; and the config that it came from.

Each key goes into the config, or changes no text, or the file is refused by the key's name. What
the converter of other architectures does to tensors is not known, so these are refused.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import CONFIG_MAPPING

from lade.errors import UserError, in_one_line


class Only(NamedTuple):
    """The one value that is read of a key."""

    value: float


class Architecture(NamedTuple):
    """How the models of an architecture are stored."""

    types: tuple[str, ...]  # of transformers; a file alone is of the first
    changes: str = ""  # to tensors: TURNED, RAISED or GROUPED
    keys: Mapping[str, str | Only] | None = {}  # beyond `_KEYS`; None if files tell too little
    needs: tuple[str, ...] = ()  # keys that files without a config must have
    second_if: str = ""  # the key with which a file alone is of the second type
    layers: tuple[int, ...] = ()  # numbers of layers for which the rest of the config is known


# Rows of q and k alternate between the halves of a head; norms are stored plus one; rows of q, k
# and v, in turns for each head, are put together.
TURNED, RAISED, GROUPED = "turned", "raised", "grouped"
_WINDOW, _NORM = "attention.sliding_window", "attention.layer_norm_epsilon"
_RMS_NORM, _HEAD = "attention.layer_norm_rms_epsilon", "attention.key_length"
_TURNED_PART, _BASE, _SCALE = "rope.dimension_count", "rope.freq_base", "logit_scale"
# By key, the field of the config; of `rope_parameters`, with a dot; "" if it changes no text.
_KEYS: dict[str, str | Only] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "",  # a tensor tells it
    "tensor_data_layout": "",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.causal": Only(True),
    "attention.value_length": "head_dim",
    _HEAD: "head_dim",
    _NORM: "layer_norm_eps",
    _RMS_NORM: "rms_norm_eps",
    _BASE: ".rope_theta",
    _TURNED_PART: ".turned",
    "rope.scale_linear": ".factor",  # of older files
    "rope.scaling.type": ".rope_type",
    "rope.scaling.factor": ".factor",
    "rope.scaling.original_context_length": ".original_max_position_embeddings",
    "rope.scaling.attn_factor": ".scale",
    "rope.scaling.yarn_attn_factor": ".attention_factor",
    "rope.scaling.yarn_ext_factor": Only(1),
    "rope.scaling.yarn_beta_fast": ".beta_fast",
    "rope.scaling.yarn_beta_slow": ".beta_slow",
    "rope.scaling.finetuned": "",
}
_EXPERTS: dict[str, str | Only] = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "",  # tensors tell it
    "expert_shared_feed_forward_length": "",
    "expert_gating_func": Only(1),  # softmax
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": Only(1),
}
_OF_EXPERTS = ("expert_count", "expert_used_count")
_MIXTRAL = {**_EXPERTS, "expert_count": "num_local_experts", "expert_weights_norm": Only(True)}
_CAPS: dict[str, str | Only] = {_WINDOW: "sliding_window"}
_CAPS |= {f"{name}_logit_softcapping": f"{name}_logit_softcapping" for name in ("attn", "final")}
_MULTIPLIERS: dict[str, str | Only] = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    _SCALE: "logits_scaling",
}
_GRANITE = {**_MULTIPLIERS, "rope.scaling.finetuned": Only(True)}  # else nothing is turned
_TEMPERATURE = "attention.temperature_scale"
_MINISTRAL: dict[str, str | Only] = {
    _TEMPERATURE: ".llama_4_scaling_beta",
    "rope.scaling.yarn_log_multiplier": ".mscale_all_dim",
}
_LFM2: dict[str, str | Only] = {_RMS_NORM: "norm_eps", "shortconv.l_cache": "conv_L_cache"}
_PARALLEL = "use_parallel_residual"
#: By the name of the architecture in a file.
ARCHITECTURES = {
    "llama": Architecture(
        ("llama", "mixtral", "mistral"), TURNED, _MIXTRAL, second_if="expert_count"
    ),
    "mistral3": Architecture(("mistral", "ministral3"), TURNED, _MINISTRAL, (), _TEMPERATURE),
    "arcee": Architecture(("arcee",), TURNED),
    "smollm3": Architecture(("smollm3",), TURNED, layers=(36,)),
    "granite": Architecture(("granite",), TURNED, _GRANITE, (*_MULTIPLIERS,)),
    "olmo": Architecture(("olmo",), TURNED, {"attention.clamp_kqv": "clip_qkv", _NORM: Only(1e-5)}),
    "olmo2": Architecture(("olmo2", "olmo3")),
    "gemma": Architecture(("gemma",), RAISED, needs=(_HEAD,)),
    "gemma2": Architecture(("gemma2",), RAISED, _CAPS, (_HEAD, *_CAPS), layers=(26, 42, 46)),
    "gemma3": Architecture(
        ("gemma3_text",),
        RAISED,
        {**_CAPS, "rope.freq_base_swa": ".local_theta"},
        (_HEAD, _WINDOW, _BASE),
        layers=(18, 26, 34, 48, 62),
    ),
    "qwen2": Architecture(("qwen2",)),
    "qwen3": Architecture(("qwen3",), needs=(_HEAD,)),
    "qwen2moe": Architecture(("qwen2_moe",), "", _EXPERTS, _OF_EXPERTS),
    "qwen3moe": Architecture(("qwen3_moe",), "", _EXPERTS, (*_OF_EXPERTS, _HEAD)),
    "lfm2": Architecture(("lfm2",), "", _LFM2, (*_LFM2, "attention.head_count_kv")),
    "phi2": Architecture(("phi",), needs=(_TURNED_PART,)),
    "phi3": Architecture(("phi3",), "", {_WINDOW: "sliding_window"}, (_WINDOW, _TURNED_PART)),
    "starcoder2": Architecture(("starcoder2",), "", {_NORM: "norm_epsilon"}, (_BASE,)),
    "command-r": Architecture(("cohere",), "", {_SCALE: "logit_scale"}, (_SCALE, _BASE)),
    "cohere2": Architecture(
        ("cohere2",),
        "",
        {_SCALE: "logit_scale", _WINDOW: "sliding_window"},
        (_SCALE, _WINDOW, _BASE),
    ),
    "glm4": Architecture(("glm4",), needs=(_TURNED_PART, _HEAD)),
    "nemotron": Architecture(
        ("nemotron",),
        RAISED,
        {_NORM: "norm_eps", _RMS_NORM: "norm_eps"},
        (_TURNED_PART,),
    ),
    "stablelm": Architecture(("stablelm",), "", {_PARALLEL: ""}, (_TURNED_PART,)),
    "gptneox": Architecture(
        ("gpt_neox",), GROUPED, {_PARALLEL: _PARALLEL}, (_TURNED_PART, _PARALLEL)
    ),
    "gemma4": Architecture(("gemma4_text",), keys=None),
    "gpt-oss": Architecture(("gpt_oss",), keys=None),
    "chatglm": Architecture(("glm",), keys=None),
    "exaone4": Architecture(("exaone4",), keys=None),
    "ernie4_5": Architecture(("ernie4_5",), keys=None),
    "hunyuan-dense": Architecture(("hunyuan_v1_dense",), keys=None),
    "jais2": Architecture(("jais2",), keys=None),
}
# Of a key, the order of rows depends; and what these parts of a file do, a text model does not.
_REORDERED, _OTHER_PARTS = "rope.dimension_sections", ("adapter", "clip", "diffusion", "xielu")
# Fields that are true if layers have one of such tensors, and those that are the size of one.
_TOLD_BY_TENSORS = {
    "attention_bias": "attn_q.bias attn_qkv.bias",
    "mlp_bias": "ffn_up.bias",
    "use_bias": "attn_q.bias",
    "use_qkv_bias": "attn_q.bias",
    "use_qk_norm": "attn_q_norm.weight",
    "qk_layernorm": "attn_q_norm.weight",
    "conv_bias": "shortconv.in_proj.bias",
}
_SIZES_OF_EXPERTS = {
    "moe_intermediate_size": "ffn_gate_exps.weight",
    "shared_expert_intermediate_size": "ffn_gate_shexp.weight",
}
#: Tensors of angles, which no model has as parameters.
ANGLES = ("rope_freqs", "rope_factors_long", "rope_factors_short")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192}


def architecture_of(path: Path, settings: Mapping[str, Any]) -> Architecture:
    """Return how the tensors of a file were made.

    Raises:
        UserError: that is not known, or a key says that they were made otherwise.
    """
    name = settings.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UserError(
            f"expected an architecture whose conversion is known in {path}, got {name!r}; known "
            f"are {', '.join(ARCHITECTURES)}"
        )
    others = {*_OTHER_PARTS, *ARCHITECTURES} - {name}
    for key in settings:
        if key.split(".")[0] in others or key == f"{name}.{_REORDERED}":
            raise UserError(f"{path} has {key!r}, which is not read")
    return ARCHITECTURES[name]


def config_of(path: Path, settings: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    """Return the config of a file alone.

    Args:
        path: of the file.
        settings: all keys of its header.
        tensors: shapes by name; of those of angles, the numbers.

    Raises:
        UserError: the file tells too little, or has a key that is not read.
    """
    made, name = architecture_of(path, settings), settings["general.architecture"]
    start = f"{name}."
    own = {key[len(start) :]: each for key, each in settings.items() if key.startswith(start)}
    missing, num = [start + key for key in made.needs if key not in own], own.get("block_count")
    if not own.keys() & {_NORM, _RMS_NORM}:  # for which classes have defaults, llama.cpp has none
        missing.append(f"{start}{_NORM} or {_RMS_NORM}")
    if made.keys is None or missing or (made.layers and num not in made.layers):
        lacks = missing[0] if missing else f"all of the config of {name} with {num} layers"
        raise UserError(f"expected config.json beside {path}, which does not tell {lacks}")
    try:
        return _made(path, made, own, settings, tensors)
    except UserError:
        raise
    except Exception as error:  # configs divide by what they have not checked
        raise UserError(f"{path} has no config: {in_one_line(error)}") from error


def _made(path: Path, made: Architecture, own: Any, settings: Any, tensors: Any) -> Any:
    """Return the config of a file alone; errors of its class are not yet the user's."""
    kind = CONFIG_MAPPING[made.types[bool(own.get(made.second_if))]]
    fields, rope = _read(path, own, {**_KEYS, **(made.keys or {})})
    known, name = kind(), kind.model_type  # whose fields are asked for
    _put_by_tensors(fields, known, tensors)
    size = fields["hidden_size"] // fields["num_attention_heads"]
    if name in ("gemma2", "gemma3_text"):  # by the number of layers, as in llama.cpp
        is_largest = fields["num_hidden_layers"] == max(made.layers)
        fields["query_pre_attn_scalar"] = size if is_largest else fields["head_dim"]
    elif name == "lfm2":
        heads = fields["num_key_value_heads"]
        fields["layer_types"] = ["full_attention" if each else "conv" for each in heads]
        fields |= {"num_key_value_heads": max(heads), "block_auto_adjust_ff_dim": False}
    elif name == "qwen3_moe":  # older files do not tell
        fields.setdefault("norm_topk_prob", True)
    local = {"rope_type": "default", "rope_theta": rope.pop("local_theta", 1e4)}
    context = rope.get("original_max_position_embeddings")
    if context and hasattr(known, "original_max_position_embeddings"):
        fields["original_max_position_embeddings"] = context
    turned = rope.pop("turned", head := fields.get("head_dim", size))
    if turned != head or _TURNED_PART in made.needs:  # some classes turn less by default
        rope["partial_rotary_factor"] = turned / head
    rope = _scaled(path, rope, tensors, turned, fields.get("max_position_embeddings"))
    if name == "gemma3_text":
        rope = {"full_attention": rope, "sliding_attention": local}
    for field, token in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
        fields[f"{field}_token_id"] = settings.get(f"tokenizer.ggml.{token}_token_id")
    usual = {"head_dim": size, "num_key_value_heads": fields["num_attention_heads"]}
    usual |= {"num_local_experts": 0, "num_experts_per_tok": 0}  # in files of dense models
    for field in [each for each in fields if not hasattr(known, each)]:
        if fields[field] == usual.get(field):
            del fields[field]
        elif field != "head_dim":  # which all classes ask for
            raise UserError(f"{path} has {field}={fields[field]}, and no {kind.__name__} has that")
    config = kind(**fields, rope_parameters=rope)
    config.name_or_path = str(path)
    return config


def _read(
    path: Path, own: Mapping[str, Any], keys: Mapping[str, str | Only]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return fields of a config, and entries of its `rope_parameters`."""
    fields, rope = dict[str, Any](), dict[str, Any]()
    for key, value in own.items():
        if key not in keys:
            raise UserError(f"{path} has {key!r}, which is not read; put config.json beside it")
        field = keys[key]
        if isinstance(field, Only):
            known = field.value
            if not (isinstance(value, float | int) and math.isclose(value, known, rel_tol=1e-6)):
                raise UserError(f"expected {known} as {key!r} in {path}, got {value}")
        elif field:
            into, field = (rope, field[1:]) if field[0] == "." else (fields, field)
            if into.setdefault(field, value) != value:
                raise UserError(f"{path} has {into[field]} and {value} as {key!r}")
    rope.setdefault("rope_theta", 1e4)  # as in llama.cpp
    return fields, rope


def _put_by_tensors(fields: dict[str, Any], known: Any, tensors: Mapping[str, Any]) -> None:
    """Put in the fields of a config what the tensors of a file tell."""
    parts = {name.split(".", 2)[2]: each for name, each in tensors.items() if name[:4] == "blk."}
    told: dict[str, Any] = {
        field: bool({*each.split()} & {*parts}) for field, each in _TOLD_BY_TENSORS.items()
    }
    for field, part in _SIZES_OF_EXPERTS.items():
        if len(parts.get(part, ())) > 1:
            told[field] = parts[part][-2]
    if known.model_type == "stablelm":  # the key says otherwise in some files
        told[_PARALLEL] = "ffn_norm.weight" not in parts
    told["sliding_window"] = fields.get("sliding_window") or None  # classes have windows by default
    fields |= {field: value for field, value in told.items() if hasattr(known, field)}
    fields["vocab_size"] = tensors["token_embd.weight"][0]


def _scaled(
    path: Path, rope: dict[str, Any], tensors: Any, turned: int, context: Any
) -> dict[str, Any]:
    """Return `rope_parameters` as transformers has them, of entries and angles of a file."""
    freqs, long, short = given = [tensors.get(f"{name}.weight") for name in ANGLES]
    scaling = rope.pop("rope_type", "none" if rope.get("factor", 0) in (0, 1) else "linear")
    scale, made = rope.pop("scale", None), dict[str, Any]()
    kinds = {"none": "default", "linear": "linear", "yarn": "yarn"}
    if freqs is not None:
        both = {"short_factor": freqs.tolist(), "long_factor": freqs.tolist()}
        longrope = {"original_max_position_embeddings": context, "attention_factor": 1.0, **both}
        made = _of_llama3(freqs, rope["rope_theta"]) or longrope
        kinds = {"none": "llama3" if "factor" in made else "longrope"}
    elif long is not None and short is not None:
        made = {"short_factor": short.tolist(), "long_factor": long.tolist()}
        made |= {} if scale is None else {"attention_factor": scale}
        kinds, scale = {"none": "longrope", "longrope": "longrope"}, None
    kind = kinds.get(scaling)
    without = {"default": ("factor", "attention_factor"), "linear": ("attention_factor",)}
    scales = {scale, *(rope.pop(each, 1) for each in without.get(str(kind), ()))}
    sizes = [0 if each is None else 2 * len(each) for each in given]
    is_whole = sizes in (3 * [0], [turned, 0, 0], [0, turned, turned])
    if kind is None or not is_whole or not scales <= {None, 0, 1}:
        raise UserError(
            f"{path} scales angles as {scaling!r}, with keys or tensors that do not fit"
        )
    if "mscale_all_dim" in rope:
        rope["mscale"] = 1.0
    if kind in without:
        rope.pop("original_max_position_embeddings", None)
    return {**rope, **made, "rope_type": kind}


def _of_llama3(factors: Any, theta: float) -> dict[str, Any] | None:
    """Return the scaling of Llama 3 if these are its factors; then angles are equal to the bit."""
    speeds = theta ** (-np.arange(len(factors)) / len(factors))
    most, turns = float(factors.max()), speeds * _LLAMA3["original_max_position_embeddings"]
    share = np.clip((turns / (2 * math.pi) - 1) / (_LLAMA3["high_freq_factor"] - 1), 0, 1)
    if not np.allclose(factors, 1 / ((1 - share) / most + share), rtol=1e-5):
        return None
    return {"factor": most, **_LLAMA3}


def check_angles(path: Path, settings: Mapping[str, Any], tensors: Any, model: Any) -> None:
    """Refuse a model that turns another part of a head than its file says, or scales no angles.

    Raises:
        UserError: so it is.
    """
    parameters = getattr(model.config, "rope_parameters", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
    scales = [name for name in tensors if name.split(".")[0] in ANGLES]
    if scales and all(each.get("rope_type", "default") == "default" for each in nested):
        raise UserError(f"{path} has {scales[0]!r}, and its config.json scales no angles")
    wanted = settings.get(f"{settings['general.architecture']}.{_TURNED_PART}")
    for name, buffer in model.named_buffers():
        if wanted and name.split(".")[-1] == "inv_freq" and 2 * buffer.numel() != wanted:
            raise UserError(
                f"expected {wanted} turned numbers of a head in {path}, got "
                f"{2 * buffer.numel()} of {type(model).__name__}"
            )
