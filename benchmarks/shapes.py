"""Models with real shapes and random weights, whose text is known.

Random weights alone give logits that nearly tie, so in half precision the text would depend on the
size of a forward. Here the residual stream is mostly the embedding of the last token, since the
layers add little to it, and the output layer's row for the token after a token is that token's
embedding. The model then goes from token to token on one long cycle, by a wide margin, and does all
the work of a dense model on the way.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from lade.compat import Model

DTYPE = torch.bfloat16
_SEED = 0


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama model, and what to measure with it."""

    name: str
    config: Mapping[str, Any]  # of LlamaConfig
    prompt_length: int = 2048
    max_new_tokens: int = 256
    #: Rotary parameters, as Llama 3 scales positions.
    rope: Mapping[str, Any] = field(default_factory=dict)


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_LLAMA = {
    "vocab_size": 128_256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}
_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
_8B = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "head_dim": 128}

#: By name. Llama-3.2-1B shares its embeddings with its output layer and "1b" does not, which takes
#: more memory; a step reads the same bytes.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("1b", {**_LLAMA, **_1B}, rope=_llama3(32.0)),
        Shape("8b", {**_LLAMA, **_8B}, rope=_llama3(8.0)),
        # To try the command out, also on a CPU.
        Shape(
            "tiny",
            {
                "vocab_size": 512,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "max_position_embeddings": 512,
            },
            prompt_length=96,
            max_new_tokens=64,
        ),
    )
}


class KnownModel(NamedTuple):
    """A model whose greedy text is known."""

    model: Model
    successors: list[int]  # [vocab_size]: the token that greedy decoding puts after each

    def answer(self, last_token_id: int, num_tokens: int) -> list[int]:
        """Return the tokens that greedy decoding puts after a token."""
        token_ids = [last_token_id]
        for _ in range(num_tokens):
            token_ids.append(self.successors[token_ids[-1]])
        return token_ids[1:]


def make_model(shape: Shape, device: torch.device) -> KnownModel:
    """Make a model directly on a device; no weight is ever anywhere else.

    torch's own random state is left unchanged.

    Raises:
        torch.OutOfMemoryError: the device has no room for it.
    """
    # No token ends the text: every answer has the requested length.
    config = LlamaConfig(
        **shape.config,
        **({"rope_parameters": dict(shape.rope)} if shape.rope else {}),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    forked = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(forked), torch.device(device), torch.no_grad():
        torch.manual_seed(_SEED)
        # Its weights are drawn twice, by torch and by transformers: half a second on a GPU.
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
        successors = _one_cycle(config.vocab_size)
        _make_known(model, successors)
    model.generation_config = GenerationConfig()
    return KnownModel(model, successors.tolist())


def random_prompt(shape: Shape, num_tokens: int, seed: int) -> Tensor:
    """Return a prompt of random tokens, int64 [1, num_tokens], on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.config["vocab_size"], (1, num_tokens), generator=generator)


def _one_cycle(num_tokens: int) -> Tensor:
    """Return a random permutation that is a single cycle."""
    order = torch.randperm(num_tokens)
    successors = torch.empty_like(order)
    successors[order] = order.roll(-1)
    return successors


def _make_known(model: Model, successors: Tensor) -> None:
    """Make the last token decide the next one."""
    config = model.config
    embeddings = model.get_input_embeddings().weight
    embeddings.normal_()
    # Two additions to the residual stream per layer, scaled as in GPT-2.
    scale = (2 * config.num_hidden_layers) ** -0.5
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(scale)
        layer.mlp.down_proj.weight.mul_(scale)
    # Logits of variance 1, and of sqrt(hidden_size) at the right token.
    scaled = embeddings * config.hidden_size**-0.5
    model.get_output_embeddings().weight.index_copy_(0, successors, scaled)
