"""Exceptions to the rules of `tiny.py` for single model types, each with the reason.

A type that is not here is built by those rules alone.
"""

from typing import Any


def _layers(*kinds: str) -> dict[str, Any]:
    return {"num_hidden_layers": 2 * len(kinds), "layer_types": [*kinds] * 2}


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_QSA = {  # one key head; the budget is a multiple of the ratio
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 512,
    "indexer_compress_ratio": 4,
}
#: Corrections of what the rules get wrong, by model type.
OVERRIDES: dict[str, dict[str, Any]] = {
    # No attention layer by default, without which `generate` does not know the length.
    "bamba": {"attn_layer_indices": [1]},
    # Tests write longer texts than its 128 positions.
    "blenderbot": {"max_position_embeddings": 512},
    # No rotary parameters for any layer type by default.
    "cohere_compass_text": {
        **_layers("sliding_attention", "full_attention"),
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    # Its default lacks numbers that the class reads.
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    # Numbers of experts are empty by default.
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    # A table of compression rates by layer type.
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    },
    # The head size of its sliding layers is the sum of two parts; their window is empty by default.
    "dots3_note_text": {"head_dim": 20, "sliding_window": 8},
    # Kinds of layers with a repeat count.
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    # No attention layer by default, as for bamba.
    "granitemoehybrid": _layers("mamba", "attention"),
    # It runs all of its layers eight times, each time with separate keys and values.
    "hrm_text": {"num_hidden_layers": 2},
    # Layer types are empty by default.
    "lfm2": _layers("conv", "full_attention"),
    "lfm2_moe": {**_layers("conv", "full_attention"), "num_dense_layers": 1},
    # Here, heads are the recurrence's: heads times head size is expand * width.
    "mamba2": {"num_heads": 8, "head_dim": 16},
    # Heads of values are smaller than those of keys.
    "mimo_v2_flash": {"head_dim": 32, "v_head_dim": 16},
    # As for zamba2.
    "nemotron_h": {"time_step_min": 1e-12},
    # The indexer is empty by default, though all attention layers need one.
    "qwen4_exp_text": _QSA,
    # The two parts must add up to the width.
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 32]},
    # It predicts at a mask token behind the text: its default is the padding token of these models.
    "xlm": {"mask_token_id": 4},
    # The width of a cached state is a multiple of 64.
    "xlstm": {"hidden_size": 128},
    # No language, and so no adapter, by default.
    "xmod": {"default_language": "en_XX"},
    # Forwards over several tokens raise time steps to this floor, those over one token do not: then
    # only one token at a time is plain decoding. Trained weights seldom reach the floor (the check
    # decides for real ones), random ones do; the variants below keep it.
    "zamba2": {"time_step_min": 1e-12},
}
#: Types that do not continue a text, with the reason.
NOT_TEXT = {
    "blt": "it reads bytes in patches",
    "gemma4_assistant": "it drafts from the keys and values of another model",
    "gemma4_unified_assistant": "it drafts from the keys and values of another model",
    "moshi": "it reads and writes audio codes",
    "musicgen": "it writes audio codes",
    "musicgen_melody": "it writes audio codes",
}

_WINDOW = {"use_sliding_window": True, "sliding_window": 8}
_TOPK = {"index_topk": 6}
#: Variants: name -> (model type, what its default configuration leaves off).
MORE_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v4-topk": ("deepseek_v4", {"index_topk": 2}),
    "dots1-window": ("dots1", {"max_window_layers": 1}),
    "falcon-alibi": ("falcon", {"alibi": True}),
    "gemma4_text-shared": ("gemma4_text", {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "gemma4_text-values": ("gemma4_text", {"attention_k_eq_v": True}),
    "gpt_bigcode-mha": ("gpt_bigcode", {"multi_query": False}),
    "laguna-window": ("laguna", _layers("sliding_attention", "full_attention")),
    "mellum-window": ("mellum", _layers("sliding_attention", "full_attention")),
    "minimax_m3_vl_text-sparse": (
        "minimax_m3_vl_text",
        _layers("minimax_m3_sparse", "full_attention"),
    ),
    "nemotron_h-floor": ("nemotron_h", {"time_step_min": 0.001}),
    "qwen4_exp_text-topk8": ("qwen4_exp_text", {**_QSA, "indexer_budget": 8, "head_dim": 16}),
    "zamba2-floor": ("zamba2", {"time_step_min": 0.001}),
    "zaya-window": ("zaya", {**_layers("hybrid_sliding", "hybrid"), "sliding_window": 8}),
}
for _type in ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"):
    MORE_ROWS[f"{_type}-topk6"] = (_type, _TOPK)
for _type in ("doge", "ministral3", "mixtral", "phi3", "phimoe", "starcoder2"):
    MORE_ROWS[f"{_type}-window"] = (_type, {"sliding_window": 8})
for _type in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"):
    MORE_ROWS[f"{_type}-window"] = (_type, _WINDOW)
