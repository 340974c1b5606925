"""GGUF files of tiny models, with blocks of any format, and these models made whole."""

from collections.abc import Sequence
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
ARCHITECTURES |= {name: name for name in ("olmo2", "starcoder2", "glm4", "lfm2")}
ARCHITECTURES |= {"gemma3_text": "gemma3", "gemma4_text": "gemma4", "cohere": "command-r"}
ARCHITECTURES |= {"qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "gpt_oss": "gpt-oss"}
TURNED, RAISED = ("llama", "granite"), ("gemma", "gemma2", "gemma3")
#: Those whose config transformers' reader does not make of a file alone.
WITH_CONFIG = {"gemma", "gemma3_text", "gemma4_text", "granite", "olmo2", "cohere", "glm4"}
WITH_CONFIG |= {"mistral", "mixtral", "gpt_oss"}
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
    folder: Path, family: str = "llama", *formats: str, without: Sequence[str] = (), **options: Any
) -> Any:
    """Write a file of a tiny model; return the model with the very weights of the file.

    Args:
        folder: for the file, and its config where transformers does not make one of the file alone.
        family: of `ARCHITECTURES`.
        formats: of the matrices, in turn; by default Q8_0.
        without: fields that are left out.
        options: of the config.
    """
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
    sizes["num_attention_heads"] = 4
    sizes |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 260, **options}
    if family == "qwen3":  # transformers reads no other of a file
        sizes["head_dim"] = 128
    elif family in ("starcoder2", "phi3", "qwen2", "cohere", "olmo2"):
        del sizes["head_dim"]
    elif family in ("qwen3_moe", "qwen2_moe", "mixtral"):
        sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": 256, "intermediate_size": 256}
        sizes |= {"num_local_experts" if family == "mixtral" else "num_experts": 4}
        sizes |= {"shared_expert_intermediate_size": 512, "norm_topk_prob": family == "qwen3_moe"}
    elif family == "lfm2":
        del sizes["head_dim"]
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
    for field, field_value in _fields(config, family).items():
        if field not in without:
            getattr(writer, f"add_{field}")(field_value)
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
        turned = full_name.split(".")[-2] in heads and architecture in TURNED
        num_heads = heads.get(full_name.split(".")[-2], 1)
        if value.dim() == 2:
            kind = (formats or ("Q8_0",))[number % len(formats or (0,))]
            number += 1
            scale, kind = float(value.std()), "F32" if "ffn_gate_inp" in stored_as else kind
            if kind == "F32":
                packed = _turned(value, num_heads).numpy() if turned else value.numpy()
                packed = packed[0] if len(packed) == 1 else packed  # the gate of a shared expert
                writer.add_tensor(stored_as, np.ascontiguousarray(packed))
                continue
            packed = blocks(kind, len(value), value.shape[1], number)
            writer.add_tensor(stored_as, packed, raw_dtype=GGMLQuantizationType[kind])
            made = torch.from_numpy(whole(packed, kind))
            assert 0.1 < float(made.std()) / scale < 10
            with torch.no_grad():
                weight.copy_(_straight(made, num_heads) if turned else made)
        else:
            raised = architecture in RAISED and stored_as.endswith("norm.weight")
            stored = value + 1 if raised else _turned(value, num_heads) if turned else value
            writer.add_tensor(stored_as, np.ascontiguousarray(stored.numpy()))
            if raised:
                with torch.no_grad():
                    weight.copy_(stored - 1)
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


def _turned(value: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return rows as llama.cpp keeps them: those of the halves of a head in turns."""
    halves = value.view(num_heads, 2, -1, *value.shape[1:])
    return halves.transpose(1, 2).reshape(value.shape)


def _straight(value: torch.Tensor, num_heads: int) -> torch.Tensor:
    pairs = value.view(num_heads, -1, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)


def _fields(config: Any, family: str) -> dict[str, Any]:
    tokenizer = byte_tokenizer()
    fields: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "rope_freq_base": config.rope_parameters.get("rope_theta", 1e4),
        "vocab_size": config.vocab_size,
        "tokenizer_model": "gpt2",
        "token_list": [*tokenizer.convert_ids_to_tokens(range(256)), "ab", "cd", "<3>", "<4>"],
        "token_types": [1] * 260,
        "token_merges": ["a b", "c d"],
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": 0,
    }
    if family in ("qwen2_moe", "qwen3_moe"):
        fields["expert_count"], fields["expert_used_count"] = config.num_experts, 2
        if family == "qwen3_moe":
            fields["key_length"] = config.head_dim
    if hasattr(config, "rms_norm_eps"):
        fields["layer_norm_rms_eps"] = config.rms_norm_eps
    if family == "lfm2":
        fields["layer_norm_rms_eps"], fields["shortconv_l_cache"] = config.norm_eps, 3
        num = config.num_key_value_heads
        fields["head_count_kv"] = [num * (each != "conv") for each in config.layer_types]
    if hasattr(config, "norm_epsilon"):
        fields["layer_norm_eps"] = config.norm_epsilon
    if family in ("llama", "gemma2", "gemma3_text"):
        fields["rope_dimension_count"] = config.head_dim
        fields["key_length"] = config.head_dim
    if getattr(config, "sliding_window", None):
        fields["sliding_window"] = config.sliding_window
    return fields
