"""What cases are made of: models, processors, criteria, streamer, drafter, pools.

A case is source code over the names of this file, so that what is printed is what was run. Whatever
is called by `generate` writes to a `log`, a dict of lists, and the logs of both runs are compared.
"""

import inspect
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache, lru_cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import lade
from lade.drafters import AssistantModel, CallPool, FirstLayers, Merged
from ngram_pool import Draft
from tests.fuzz.inside import load_gguf
from tests.lade.models import gguf_files
from tests.lade.tiny import byte_tokenizer, tiny_model
from tests.support import tiny

# Imported for the expressions of cases.
__all__ = [
    "AssistantModel",
    "CallPool",
    "FirstLayers",
    "GenerationConfig",
    "LogitsProcessorList",
    "Merged",
    "StoppingCriteriaList",
    "SynthIDTextWatermarkingConfig",
    "WatermarkingConfig",
    "deepcopy",
    "torch",
]

Log = dict[str, list[Any]]

# The families of tests/lade/tiny.py in which every layer sees the whole text.
FAMILIES = (
    *("llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "opt", "phi3", "olmo2", "deepseek_v3"),
)
# Of these, forwards in float32 may be lade's own compiled ones.
SINGLES = tuple(
    f"{name} float32"
    for name in (
        *("llama", "mistral", "qwen2", "qwen3", "phi", "phi3", "granite", "stablelm", "smollm3"),
        *("gemma2", "gemma3_text", "cohere", "cohere2", "olmo2", "olmo3", "glm4", "starcoder2"),
        *("nemotron", "exaone4", "helium", "deepseek_v3", "youtu", "mimo_v2_flash"),
        *("gemma4_text-shared", "gemma4_text-values", "gemma4_unified"),
    )
)
_FORMATS = (*gguf_files.SCALES, "F16", "BF16", "F32")
# Of these, weights stay in blocks of a file, of two formats in turn; each has all families.
PACKED = tuple(
    f"{family} {_FORMATS[i % len(_FORMATS)]}+{_FORMATS[(i + 1 + shift // 4) % len(_FORMATS)]}"
    for number, family in enumerate(gguf_files.ARCHITECTURES)
    for shift in (0, 4, 8)
    for i in (number + shift,)
)
# Every other causal LM, each of one size: with windows, chunks, ALiBi, states, without a cache.
ARCHITECTURES = (*tiny.causal_lm_types(), *tiny.VARIANTS, *SINGLES, *PACKED)

# Their code cannot run in float64.
FLOAT32_ONLY = ("xglm", "xlnet")


def model_of(spec: Mapping[str, Any]) -> Any:
    """Return the model of a case: `spec` has the arguments of one of the two functions below."""
    return architecture(**spec) if "architecture" in spec else fuzz_model(**spec)


@lru_cache(maxsize=2000)
def architecture(architecture: str, seed: int, attention: str | None, dtype: str) -> Any:
    """Return the tiny model of an architecture, made once a process."""
    if "+" in dtype:
        return packed_model(architecture, dtype)
    return tiny.tiny_model(
        architecture, seed=seed, attention=attention, dtype=getattr(torch, dtype)
    )


_WHOLE = WeakKeyDictionary[Any, Any]()


def packed_model(family: str, formats: str) -> Any:
    """Return a model of a GGUF file whose weights stay in their blocks."""
    with TemporaryDirectory() as folder:
        sizes: dict[str, Any] = {"vocab_size": tiny.VOCAB_SIZE, "intermediate_size": 256}
        sizes |= {"sliding_window": 8} if family == "gemma2" else {}
        whole = gguf_files.write(Path(folder), family, *formats.split("+"), **sizes)
        model = load_gguf(Path(folder) / "model.gguf")
    _WHOLE[model] = whole
    return model


def whole_of(model: Any) -> Any:
    """Return a packed model made whole; another one, or a copy that may differ, itself."""
    whole = _WHOLE.get(model)
    if whole is None:
        return model
    whole.generation_config = model.generation_config
    return whole


@cache
def class_of(architecture: str) -> Any:
    """Return the model class of an architecture, without building a model."""
    model_type = tiny.VARIANTS.get(architecture, (architecture,))[0]
    found = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    return found[0] if isinstance(found, (tuple, list)) else found


@cache
def inputs_of(architecture: str) -> frozenset[str]:
    """Return what the forward of an architecture takes."""
    return frozenset(inspect.signature(class_of(architecture).forward).parameters)


@lru_cache(maxsize=400)
def fuzz_model(
    family: str,
    seed: int,
    vocab_size: int,
    hidden_size: int = 16,
    sharpness: float = 1.0,
    attention: str = "sdpa",
    dtype: str = "float64",
) -> Any:
    """Return a model of two layers; a greater `sharpness` makes text predictable."""
    sizes = {
        "vocab_size": vocab_size,
        "eos_token_id": vocab_size - 1,
        "hidden_size": hidden_size,
        "n_embd": hidden_size,
        "word_embed_proj_dim": hidden_size,
        "num_hidden_layers": 2,
        "n_layer": 2,
        "num_attention_heads": 2,
        "n_head": 2,
        "num_key_value_heads": 2 if family == "deepseek_v3" else 1,
        "max_position_embeddings": 128,
        "n_positions": 128,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng():
        model = tiny_model(family, seed, getattr(torch, dtype), attention, **sizes)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(sharpness)
    return model


@lru_cache(maxsize=1)
def fuzz_tokenizer() -> Any:
    """Return the tokenizer of the stop strings: the first ids are the ASCII signs from `!` on."""
    return byte_tokenizer()


# --- logits processors ----------------------------------------------------------------------


class StatelessProcessor(LogitsProcessor):  # type: ignore[misc]
    """Adds the same vector to the scores of every row."""

    def __init__(self, log: Log, seed: int) -> None:
        self.seed = seed

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return scores + torch.randn(scores.shape[-1], generator=generator)


class LastTokenProcessor(LogitsProcessor):  # type: ignore[misc]
    """Prefers the token after each row's last one; writes down all it is given."""

    def __init__(self, log: Log, bias: float) -> None:
        self.log = log.setdefault("LastTokenProcessor", [])
        self.bias = bias

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.log.append(input_ids.tolist())
        if input_ids.shape[1] == 0:
            return scores
        following = (input_ids[:, -1:] + 1) % scores.shape[-1]
        return scores.scatter_add(1, following, torch.full_like(scores[:, :1], self.bias))


class CallsProcessor(LogitsProcessor):  # type: ignore[misc]
    """Counts its calls, and does something else at every third."""

    def __init__(self, log: Log) -> None:
        self.log = log.setdefault("CallsProcessor", [])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.log.append(tuple(input_ids.shape))
        return scores * (0.3 if len(self.log) % 3 == 0 else 1.1)


class RandomProcessor(LogitsProcessor):  # type: ignore[misc]
    """Draws from the global random state that sampling draws from."""

    def __init__(self, log: Log, size: float) -> None:
        self.size = size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.size * torch.randn(scores.shape)


class InPlaceProcessor(LogitsProcessor):  # type: ignore[misc]
    """Changes the tensor it is given, which plain `generate` keeps as the raw logits."""

    def __init__(self, log: Log, token_id: int) -> None:
        self.token_id = token_id

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, self.token_id] -= 2.0
        return scores


class AllowedTokens:
    """A `prefix_allowed_tokens_fn`: which tokens may follow depends on row and last token.

    It is a function of what it is asked, so how often it is asked is not compared.
    """

    def __init__(self, steps: Sequence[int], vocab_size: int) -> None:
        self.steps = steps
        self.vocab_size = vocab_size

    def __call__(self, row: int, input_ids: Tensor) -> list[int]:
        last = int(input_ids[-1]) if len(input_ids) else 0
        return sorted({(last + row % 2 + step) % self.vocab_size for step in self.steps})


# --- stopping criteria ----------------------------------------------------------------------


class StopAtToken(StoppingCriteria):  # type: ignore[misc]
    """Stops each row at a token; writes down all it is given."""

    def __init__(self, log: Log, token_ids: Sequence[int]) -> None:
        self.log = log.setdefault("StopAtToken", [])
        self.token_ids = torch.tensor(token_ids)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.log.append(input_ids.tolist())
        return torch.isin(input_ids[:, -1], self.token_ids)


class StopAfterCalls(StoppingCriteria):  # type: ignore[misc]
    """Counts its calls and stops one row more with each after the first few."""

    def __init__(self, log: Log, num_calls: int) -> None:
        self.log = log.setdefault("StopAfterCalls", [])
        self.num_calls = num_calls

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.log.append(tuple(input_ids.shape))
        return torch.arange(len(input_ids)) < len(self.log) - self.num_calls


class StopAtScore(StoppingCriteria):  # type: ignore[misc]
    """Stops a row whose newest scores are sharp, where `generate` outputs scores."""

    def __init__(self, log: Log, sharpness: float) -> None:
        self.log = log.setdefault("StopAtScore", [])
        self.sharpness = sharpness

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.log.append(None if scores is None else len(scores))
        if not scores:
            return torch.zeros(len(input_ids), dtype=torch.bool)
        return torch.as_tensor(scores[-1].softmax(-1).amax(-1) > self.sharpness)


# --- streamer -------------------------------------------------------------------------------


class Recorder(BaseStreamer):  # type: ignore[misc]
    """A streamer that takes batches too, and writes down every put and the end."""

    def __init__(self, log: Log) -> None:
        self.log = log.setdefault("streamer", [])

    def put(self, value: Tensor) -> None:
        self.log.append((str(value.dtype), value.device.type, value.tolist()))

    def end(self) -> None:
        self.log.append("end")


# --- pools and drafters ---------------------------------------------------------------------


def random_texts(seed: int, vocab_size: int, num_tokens: int) -> list[list[int]]:
    """Return one text in which short patterns repeat."""
    rng = Random(seed)
    text: list[int] = []
    while len(text) < num_tokens:
        pattern = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 5))]
        text += pattern * rng.randint(1, 4)
    return [text[:num_tokens]]


def pool_of(texts: Sequence[Sequence[int]], **sizes: int) -> lade.NGramPool:
    """Return a pool that has seen some texts."""
    pool = lade.NGramPool(**sizes)
    for text in texts:
        sequence = pool.open_sequence()
        pool.observe([token_id for token_id in text if token_id >= 0], sequence)  # beams pad by -1
        pool.close_sequence(sequence)
    return pool


def predicted(answers: Sequence[Sequence[int]], how: str, seed: int) -> list[int]:
    """Return what an answer will probably be: a whole one, or one that was changed."""
    rng = Random(seed)
    tokens = [token_id for token_id in rng.choice(answers or [[]]) if token_id >= 0]
    place = rng.randint(0, len(tokens))
    new = [rng.choice(tokens or [3]) for _ in range(rng.randint(1, 6))]
    return {
        "right": tokens,
        "end": tokens[place:],
        "inserted": [*tokens[:place], *new, *tokens[place:]],
        "deleted": [*tokens[:place], *tokens[place + len(new) :]],
        "replaced": [*tokens[:place], *new, *tokens[place + len(new) :]],
        "shuffled": rng.sample(tokens, len(tokens)),
        "foreign": [*tokens[:place], 10**6, *tokens[place:]],
    }[how]


def used_pool(model: Any, prompts: Sequence[Sequence[int]]) -> lade.NGramPool:
    """Return a pool that has served greedy calls before; the random state stays as it was."""
    pool = lade.NGramPool()
    own_config, model.generation_config = model.generation_config, GenerationConfig(pad_token_id=0)
    try:
        with torch.random.fork_rng():
            for prompt in prompts:
                ids = torch.tensor([prompt])
                options: dict[str, Any] = {
                    "attention_mask": torch.ones_like(ids),
                    "max_new_tokens": 12,
                }
                try:
                    model.generate(ids, **options)
                except Exception:  # transformers' own
                    continue
                lade.generate(model, ids, pool=pool, **options)
    finally:
        model.generation_config = own_config
    return pool


class ScriptDrafter(lade.Drafter):
    """Drafts from the plain answers: each next token is right with probability `accept`.

    Wrong branches stand beside and below. What the `Drafter` protocol promises is asserted.
    """

    def __init__(
        self, answers: Sequence[Sequence[int]], vocab_size: int, accept: float, seed: int
    ) -> None:
        self.answers = answers
        self.vocab_size = vocab_size
        self.accept = accept
        self.rng = Random(seed)
        self.open_texts: dict[int, list[int]] = {}
        self.num_opened = 0

    def open(self, prompt_ids: Sequence[int]) -> int:
        self.num_opened += 1
        self.open_texts[self.num_opened] = list(prompt_ids)
        return self.num_opened

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        text = list(committed)
        known = self.open_texts[sequence]  # what is sure to follow may stand behind it
        assert text[: len(known)] == known, "observe had other tokens than draft"
        spine = self._continuation(text)
        nodes: list[tuple[int, int, int]] = []  # token, parent, depth
        parent = -1
        for depth, token_id in enumerate(spine, start=1):
            if self.rng.random() > self.accept:
                token_id = self.rng.randrange(self.vocab_size)
            children = [token_id]
            if self.rng.random() < 0.4:
                beside = self.rng.randrange(self.vocab_size)
                children = [token_id] if beside == token_id else [beside, token_id]
            nodes += [(child, parent, depth) for child in children]
            parent = len(nodes) - 1
        nodes = nodes[:max_draft_tokens]
        columns = np.array(nodes, np.int32).reshape(-1, 3)
        token_ids, parents, depths = np.ascontiguousarray(columns.T)
        return Draft(token_ids, parents, depths, np.linspace(0.9, 0.1, len(nodes)))

    def _continuation(self, text: list[int]) -> list[int]:
        """Return how some answer, with or without what pads it, goes on after `text`."""
        found = []
        for answer in self.answers:
            for start in range(len(answer) - len(text) + 1):
                if list(answer[start : start + len(text)]) == text:
                    found.append(list(answer[start + len(text) :]))
                    break
        if not found or self.rng.random() < 0.1:
            return [self.rng.randrange(self.vocab_size) for _ in range(3)]
        return self.rng.choice(found)[: self.rng.randint(1, 12)]

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        self.open_texts[sequence] += token_ids

    def close(self, sequence: int) -> None:
        del self.open_texts[sequence]
