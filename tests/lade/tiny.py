"""Tiny models with random weights, made in code: no download, exact in float64."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from packaging import version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutputWithPast

from lade import Draft, Drafter

# Whether transformers is new enough for all that lade does.
IS_NEWEST = version.parse(transformers.__version__) >= version.parse("5.23")
# What models and `generate` call the cache.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"

VOCAB_SIZE = 97
EOS_TOKEN_ID = 96

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
}
_GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512}
# Of models that cannot be verified by trees.
BLOOM: dict[str, Any] = {"n_layer": 3, "n_head": 4}
MAMBA2: dict[str, Any] = {
    "num_heads": 4,
    "head_dim": 16,
    "n_groups": 1,
    "state_size": 8,
    "chunk_size": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gpt2": _GPT2,
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "phi3": {"original_max_position_embeddings": 512},
    "olmo2": {},
    "mistral": {"sliding_window": 8},
    "gemma3_text": {
        "sliding_window": 8,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "llama4_text": {
        "attention_chunk_size": 8,
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
    },
    "deepseek_v3": {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 3,  # grouped experts have no float64
    },
}


def tiny_model(
    family: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    attention: str = "sdpa",
    **options: Any,
) -> Any:
    """Return a model whose logits vary: every matrix keeps the size of what passes through it.

    The same one whatever was drawn before; torch's own random state is left unchanged.
    """
    config = CONFIG_MAPPING[family](**{**COMMON, **FAMILIES.get(family, {}), **options})
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # some vectors are drawn
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                gain = 1.5 * parameter.shape[-1] ** -0.5
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(gain * noise)
    model.generation_config.pad_token_id = 0
    return model.eval()


def random_prompt(rng: np.random.Generator, max_length: int = 20) -> torch.Tensor:
    """Return a prompt [1, 1 to max_length] of a few different tokens, so that n-grams repeat."""
    length = int(rng.integers(1, max_length + 1))
    alphabet = rng.choice(np.arange(2, VOCAB_SIZE - 1), int(rng.integers(1, 8)), replace=False)
    return torch.from_numpy(rng.choice(alphabet, length)[None])


def draft_of(token_ids: Sequence[int], parents: Sequence[int], probs: Any = 1.0) -> Draft:
    """Return a draft of nodes; each node comes after its parent."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    ids, places, depth = (np.array(each, np.int32) for each in (token_ids, parents, depths))
    return Draft(ids, places, depth, np.full(len(depths), probs, np.float64))


def chain(token_ids: Sequence[int], probs: Any = 1.0) -> Draft:
    """Return a draft of one path."""
    return draft_of(token_ids, range(-1, len(token_ids) - 1), probs)


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    """Return the tokens from the root to each node, the root left out."""
    paths: list[tuple[int, ...]] = []
    for token_id, parent in zip(draft.token_ids.tolist(), draft.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
    return paths


class ScriptedDrafter(Drafter):
    """Drafts from known answers, one of each row in the order in which rows are opened.

    Drafts are right up to a depth, with wrong branches beside and behind it.
    """

    def __init__(
        self, answers: Sequence[Sequence[int]], rng: np.random.Generator, accept: float
    ) -> None:
        self.answers = [*map(list, answers)]  # prompts included
        self.rng = rng
        self.accept = accept  # probability that each next node on the spine is right
        self.observed: list[list[int]] = []
        self.closed = 0

    def open(self, prompt_ids: Sequence[int]) -> int:
        self.observed.append([*prompt_ids])
        return len(self.observed) - 1

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        answer = self.answers[sequence]
        assert self.observed[sequence] == list(committed)
        assert answer[: len(committed)] == list(committed)
        token_ids: list[int] = []
        parents: list[int] = []
        spine, depth = -1, 0
        while len(token_ids) < max_draft_tokens and self.rng.random() < 0.9:
            position = len(committed) + depth
            right = answer[position] if position < len(answer) else 3
            wrong = (right + 1 + int(self.rng.integers(VOCAB_SIZE - 1))) % VOCAB_SIZE
            is_right = self.rng.random() < self.accept
            first = right if is_right else wrong
            beside = (first + 1 + int(self.rng.integers(VOCAB_SIZE - 1))) % VOCAB_SIZE
            branches = [beside, first] if self.rng.random() < 0.5 else [first, beside]
            for token_id in branches[: max_draft_tokens - len(token_ids)]:
                token_ids.append(token_id)
                parents.append(spine)
            if first not in branches[:max_draft_tokens] or first not in token_ids[-2:]:
                break
            spine = len(token_ids) - (2 if token_ids[-2:-1] == [first] else 1)
            depth += 1
        return draft_of(token_ids, parents, np.linspace(0.9, 0.1, len(token_ids)))

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        self.observed[sequence] += token_ids

    def close(self, sequence: int) -> None:
        self.closed += 1


def byte_tokenizer() -> Any:
    """Return a tokenizer with one token for each of the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def by_last_token(model: Any) -> Any:
    """Let a model choose by the last token alone, so that a table knows what follows."""
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model
