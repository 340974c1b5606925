"""Answers of the engines of `lade bench --rivals`, and files for them: for `cpu-engines`.

Each engine answers in a process of its own. Its file has the weights as they are: llama.cpp's in
the dtype of the comparison, OpenVINO's in float16, the only one that it reads besides quantised
ones. Next file: `cpu_engines.py`.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

from lade.apps.bench.rivals import RIVALS, Ask, Start


class Continuation(NamedTuple):
    """An answer, and when it came."""

    token_ids: list[int]  # up to and including EOS
    num_first: int  # tokens that came at once, as the first ones: a draft may run with the prompt
    first_sec: float  # until then
    rest_sec: float  # from then to the end of the call
    rest_cpu_sec: float  # meanwhile, of all threads of the process


class Clock:
    """Begins with a call, and receives tokens as they come."""

    def __init__(self) -> None:
        self._start, self._first = perf_counter(), (0, 0.0, 0.0)

    def tell(self, num_tokens: int = 1) -> None:
        """Note when the first tokens came."""
        if self._first[0] == 0:
            self._first = num_tokens, perf_counter(), process_time()

    def reply(self, token_ids: Sequence[int]) -> Continuation:
        """End, with the whole answer."""
        num_first, sec, cpu_sec = self._first
        rest = perf_counter() - sec, process_time() - cpu_sec
        return Continuation([*token_ids], num_first, sec - self._start, *rest)


@cache
def _started(name: str, start: Start) -> Ask:
    return RIVALS[name].start(start)


def ask(name: str, start: Start, token_ids: list[int], max_new_tokens: int) -> Continuation:
    """Answer a prompt in this process, in which the engine is started once."""
    answer, clock = _started(name, start), Clock()
    return clock.reply(answer(token_ids, max_new_tokens, clock.tell))


def write_gguf(model: Any, tokenizer: Any, path: Path, dtype: str) -> None:
    """Write a model of the kind of Llama, with its vocabulary, as llama.cpp's converter does.

    Raises:
        ValueError: a weight is not the same in that dtype.
    """
    import gguf
    import torch

    kinds = gguf.GGMLQuantizationType
    kind = {"float32": kinds.F32, "float16": kinds.F16, "bfloat16": kinds.BF16}[dtype]
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())
    control = {each["content"] for each in vocabulary["added_tokens"]}
    tokens = tokenizer.convert_ids_to_tokens(range(config.vocab_size))
    fields = {
        "file_type": gguf.LlamaFileType[f"{'ALL' if dtype == 'float32' else 'MOSTLY'}_{kind.name}"],
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": heads["q_proj"],
        "head_count_kv": heads["k_proj"],
        "rope_freq_base": config.rope_parameters["rope_theta"],
        "rope_dimension_count": config.head_dim,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm",
        "token_list": tokens,
        "token_types": [3 if token in control else 1 for token in tokens],  # control, normal
        "token_merges": [" ".join(pair) for pair in vocabulary["model"]["merges"]],
        "eos_token_id": config.eos_token_id,
    }
    writer = gguf.GGUFWriter(path, "llama")
    for field, value in fields.items():
        getattr(writer, f"add_{field}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = weight.float()
        if not torch.equal(value.to(getattr(torch, dtype)).float(), value):
            raise ValueError(f"expected weights that are the same in {dtype}, got {name}")
        if (num_heads := heads.get(name.split(".")[-2])) is not None:
            # Rotary pairs stand beside each other there, and half a head apart here.
            halves = value.view(num_heads, 2, -1, *value.shape[1:])
            value = halves.transpose(1, 2).reshape(value.shape)
        stored = kind if value.ndim > 1 else kinds.F32
        given = gguf.quantize(value.numpy(), stored)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), given, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
