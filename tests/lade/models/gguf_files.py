"""GGUF files of tiny models, with blocks of any format, and these models made whole."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

from tests.lade.tiny import byte_tokenizer, tiny_model

# By the type of a model: what the file calls it, and what llama.cpp does to its tensors.
ARCHITECTURES = dict.fromkeys(("llama", "mistral", "mixtral"), "llama")
ARCHITECTURES |= {name: name for name in ("qwen2", "qwen3", "phi3", "gemma", "gemma2", "granite")}
ARCHITECTURES |= {name: name for name in ("olmo2", "starcoder2", "glm4", "lfm2", "olmo", "arcee")}
ARCHITECTURES |= {name: name for name in ("smollm3", "stablelm", "nemotron", "cohere2")}
ARCHITECTURES |= {"gemma3_text": "gemma3", "gemma4_text": "gemma4", "cohere": "command-r"}
ARCHITECTURES |= {"qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "gpt_oss": "gpt-oss"}
ARCHITECTURES |= {"ministral3": "mistral3", "gpt_neox": "gptneox", "phi": "phi2"}
TURNED = ("llama", "granite", "smollm3", "arcee", "mistral3", "olmo")
RAISED = ("gemma", "gemma2", "gemma3", "nemotron")
#: Whose files do not tell all of the config of these small models.
WITH_CONFIG = {"gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "mistral", "smollm3"}
# Fields of configs, and their keys in a file.
_PAIRS = """
    max_position_embeddings=context_length hidden_size=embedding_length vocab_size=vocab_size
    num_hidden_layers=block_count intermediate_size=feed_forward_length clip_qkv=attention.clamp_kqv
    num_attention_heads=attention.head_count rms_norm_eps=attention.layer_norm_rms_epsilon
    layer_norm_eps=attention.layer_norm_epsilon norm_epsilon=attention.layer_norm_epsilon
    num_experts=expert_count num_local_experts=expert_count num_experts_per_tok=expert_used_count
    attn_logit_softcapping=attn_logit_softcapping final_logit_softcapping=final_logit_softcapping
    attention_multiplier=attention.scale embedding_multiplier=embedding_scale
    residual_multiplier=residual_scale logits_scaling=logit_scale logit_scale=logit_scale
    use_parallel_residual=use_parallel_residual conv_L_cache=shortconv.l_cache
"""
FIELDS = dict(pair.split("=") for pair in _PAIRS.split())
SCALES = {  # where a block has float16, and about how large they are
    "Q5_0": {0: 0.005},
    "Q5_1": {0: 0.005, 2: 0.1},
    "IQ4_NL": {0: 0.001},
    "Q4_K": {0: 2e-4, 2: 1.5e-3},
    "Q5_K": {0: 1e-4, 2: 1.5e-3},
    "Q6_K": {208: 5e-5},
    "Q4_0": {0: 0.01},
    "Q4_1": {0: 0.01, 2: 0.1},
    "Q8_0": {0: 5e-4},
    "IQ4_XS": {0: 1e-4},
}


def blocks(name: str, num_rows: int, num_columns: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return rows of random blocks of a format, uint8 [num_rows, bytes of a row]."""
    rng = np.random.default_rng(seed)
    if name in ("F16", "BF16"):
        numbers = rng.standard_normal((num_rows, num_columns)).astype(np.float32) / 20
        packed: np.ndarray[Any, Any] = gguf.quantize(numbers, GGMLQuantizationType[name])
        return packed.view(np.uint8)
    size, num_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    made = rng.integers(0, 256, (num_rows, num_columns // size, num_bytes), dtype=np.uint8)
    if name == "MXFP4":
        made[:, :, 0] = rng.integers(119, 123, made.shape[:2])  # exponents
    for place, scale in SCALES.get(name, {}).items():
        halves = (scale * rng.uniform(0.5, 1.5, made.shape[:2])).astype(np.float16)
        if place == 2 and not name.endswith("K"):
            halves = -halves  # so that numbers are about zero
        made[:, :, place : place + 2] = halves[..., None].view(np.uint8)
    rows: np.ndarray[Any, Any] = made.reshape(num_rows, -1)
    return rows


def whole(packed: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """Return packed rows as GGML's own package makes them whole, float32."""
    return np.asarray(gguf.dequantize(packed, GGMLQuantizationType[name]), np.float32)


def write(
    folder: Path,
    family: str = "llama",
    *formats: str,
    keys: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Write a file of a tiny model; return the model with the very weights of the file.

    Args:
        folder: for the file, and its config where a file alone does not tell it.
        family: of `ARCHITECTURES`.
        formats: of the matrices, in turn; by default Q8_0.
        keys: of the file, as they are instead; None leaves one out.
        options: of the config.
    """
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 260, **options}
    if family in ("qwen3_moe", "qwen2_moe", "mixtral"):
        sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": 256, "intermediate_size": 256}
        sizes |= {"num_local_experts" if family == "mixtral" else "num_experts": 4}
        sizes |= {"shared_expert_intermediate_size": 512, "norm_topk_prob": family == "qwen3_moe"}
    elif family == "lfm2":
        sizes |= {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
        sizes |= {"block_auto_adjust_ff_dim": False, "norm_eps": 1e-5}
    elif family == "gemma4_text":
        sizes |= {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 260}
        sizes |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "global_head_dim": 128}
        sizes["layer_types"] = ["sliding_attention", "full_attention"] * 2
    elif family == "gpt_oss":
        sizes |= {"num_experts_per_tok": 2, "num_local_experts": 4, "intermediate_size": 256}
    attention = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"
    model = tiny_model(family, seed=3, dtype=torch.float32, attention=attention, **sizes)
    config, architecture = model.config, ARCHITECTURES[family]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    for key, each in {**_keys(model, architecture), **(keys or {})}.items():
        if each is not None:
            add = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
            getattr(writer, f"add_{add.get(type(each), 'tensor')}")(key, each)
    known = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], config.num_hidden_layers)
    number = 0
    for full_name, buffer in model.named_buffers():
        if full_name.endswith("layer_scalar"):
            buffer.fill_(0.75)
            writer.add_tensor(f"{names.get_name(full_name)}.weight", buffer.numpy())
    for full_name, weight in model.named_parameters():
        stored_as = names.get_name(full_name, (".weight", ".bias"))
        if full_name.endswith("sinks"):
            stored_as += ".weight"
        value = weight.detach()
        if value.dim() == 3 and value.shape[1] == 1:  # of a short convolution
            writer.add_tensor(stored_as, np.ascontiguousarray(value[:, 0].numpy()))
            continue
        if ".experts." in full_name:
            number = _write_experts(writer, names, full_name, weight, formats or ("Q8_0",), number)
            continue
        part, order = full_name.split(".")[-2], torch.arange(len(value))
        if part in heads and architecture in TURNED:  # the rows of two halves in turns
            order = order.view(heads[part], 2, -1).transpose(1, 2).flatten()
        elif part == "query_key_value":  # those of q, of k and of v together
            order = order.view(config.num_attention_heads, 3, -1).transpose(0, 1).flatten()
        if value.dim() == 2:
            kind = (formats or ("Q8_0",))[number % len(formats or (0,))]
            number += 1
            scale, kind = float(value.std()), "F32" if "ffn_gate_inp" in stored_as else kind
            if kind == "F32":
                packed = value[order].numpy()
                packed = packed[0] if len(packed) == 1 else packed  # the gate of a shared expert
                writer.add_tensor(stored_as, packed)
                continue
            packed = blocks(kind, len(value), value.shape[1], number)
            writer.add_tensor(stored_as, packed, raw_dtype=GGMLQuantizationType[kind])
            made = torch.from_numpy(whole(packed, kind))
            assert 0.1 < float(made.std()) / scale < 10
            with torch.no_grad():
                weight.copy_(made[order.argsort()])
        else:
            raised = float(architecture in RAISED and stored_as.endswith("norm.weight"))
            stored = value[order] + raised
            writer.add_tensor(stored_as, stored.numpy())
            with torch.no_grad():
                weight.copy_(stored[order.argsort()] - raised)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    if family in WITH_CONFIG:
        config.save_pretrained(folder)
    return model


def _write_experts(
    writer: Any, names: Any, full_name: str, weight: Any, formats: Sequence[str], number: int
) -> int:
    """Write the stacked weights of experts, as llama.cpp has them; return the next number."""
    prefix, _, name = full_name.rpartition(".")
    value, is_bias, is_gpt = weight.detach(), name.endswith("_bias"), writer.arch == "gpt-oss"
    if is_gpt and not is_bias:
        value = value.transpose(1, 2)
    parts = {"down_proj": value}
    if "gate_up" in name:
        gate, up = (value[:, ::2], value[:, 1::2]) if is_gpt else value.chunk(2, dim=1)
        parts = {"gate_proj": gate, "up_proj": up}
    for part, rows in parts.items():
        stored_as, shape = names.get_name(f"{prefix}.{part}"), rows.shape
        if is_bias:
            writer.add_tensor(f"{stored_as}.bias", np.ascontiguousarray(rows.numpy()))
            continue
        kind, number = formats[number % len(formats)], number + 1
        if kind == "F32":
            writer.add_tensor(f"{stored_as}.weight", np.ascontiguousarray(rows.numpy()))
            continue
        packed = blocks(kind, shape[0] * shape[1], shape[2], number).reshape(*shape[:2], -1)
        writer.add_tensor(f"{stored_as}.weight", packed, raw_dtype=GGMLQuantizationType[kind])
        rows.copy_(torch.from_numpy(whole(packed, kind)))
    return number


def _keys(model: Any, architecture: str) -> dict[str, Any]:
    """Return what the converter writes: the keys of a model's file, and tensors of angles."""
    config, tokenizer, held = model.config, byte_tokenizer(), vars(model.config)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    usual = config.hidden_size // config.num_attention_heads
    size, kind = held.get("head_dim") or usual, rope["rope_type"]
    own = {key: held[name] for name, key in FIELDS.items() if name in held}
    own["rope.dimension_count"] = int(size * rope.get("partial_rotary_factor", 1))
    if architecture != "gptneox":
        own["attention.head_count_kv"] = held["num_key_value_heads"]
        own["rope.freq_base"] = rope["rope_theta"]
    if "head_dim" in held:
        own["attention.key_length"] = own["attention.value_length"] = size
    if architecture in ("gemma2", "gemma3", "phi3", "cohere2", "gpt-oss"):
        own["attention.sliding_window"] = config.sliding_window or 0
    if architecture in ("nemotron", "lfm2", "olmo"):
        name = "rms_epsilon" if architecture == "lfm2" else "epsilon"
        own[f"attention.layer_norm_{name}"] = held.get("norm_eps", 1e-5)
    if architecture == "lfm2":
        kinds, num = config.layer_types, config.num_key_value_heads
        own["attention.head_count_kv"] = [num * (each != "conv") for each in kinds]
    if kind in ("yarn", "longrope"):
        context = rope["original_max_position_embeddings"]
        own["rope.scaling.original_context_length"] = context
    if kind in ("linear", "yarn"):
        own |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        names = {"attention_factor": "yarn_attn_factor", "mscale_all_dim": "yarn_log_multiplier"}
        names |= {name: f"yarn_{name}" for name in ("beta_fast", "beta_slow")}
        own |= {f"rope.scaling.{name}": rope.get(field) for field, name in names.items()}
        own["attention.temperature_scale"] = rope.get("llama_4_scaling_beta")
    fields = {f"{architecture}.{key}": each for key, each in own.items()}
    if kind == "longrope":
        scale = float(model.model.rotary_emb.attention_scaling)
        fields[f"{architecture}.rope.scaling.attn_factor"] = scale
        for name in ("long", "short"):
            fields[f"rope_factors_{name}.weight"] = np.float32(rope[f"{name}_factor"])
    elif kind == "llama3":
        speeds = rope["rope_theta"] ** (-np.arange(0, size, 2) / size)
        fields["rope_freqs.weight"] = np.float32(speeds / model.model.rotary_emb.inv_freq.numpy())
    tokens = [*tokenizer.convert_ids_to_tokens(range(256)), "ab", "cd", "<3>", "<4>"]
    fields |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}
    fields["tokenizer.ggml.pre"] = "gpt-2"
    fields |= {"tokenizer.ggml.token_type": [1] * 260, "tokenizer.ggml.merges": ["a b", "c d"]}
    ends = {"bos": config.bos_token_id, "eos": config.eos_token_id, "padding": 0}
    return fields | {f"tokenizer.ggml.{name}_token_id": each for name, each in ends.items()}
