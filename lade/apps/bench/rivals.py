"""llama.cpp and OpenVINO GenAI, which read the same GGUF file: `lade bench --rivals`.

They take and give token ids. Next file: `report.py`.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from lade.apps.bench.methods import Answer, Method, timed
from lade.compat import end_tokens
from lade.errors import UserError
from lade.models.loading import LoadedModel, gguf_of
from lade.stats import DecodeStats

_LLAMA_CPP_TOKENS = 2  # to draft: what llama-cpp-python's page advises on CPUs
_OPENVINO_TOKENS, _OPENVINO_NGRAM = 5, 3  # those of OpenVINO's sample of prompt lookup


class Start(NamedTuple):
    """What an engine is started with."""

    path: str  # of the GGUF file
    dtype: str  # to compute in, and of keys and values; llama.cpp keeps float16 beside bfloat16
    threads: int
    num_tokens: int  # of the longest prompt and its answer
    eos: tuple[int, ...]
    drafts: bool  # by its own prompt lookup


#: Answers a prompt with so many tokens at most; tells of tokens as they come, by their number.
Ask = Callable[[list[int], int, Callable[[int], object]], list[int]]


def openvino(start: Start) -> Ask:
    """Start OpenVINO GenAI."""
    import numpy as np

    tensor = import_module("openvino").Tensor
    genai: Any = import_module("openvino_genai")

    class Streamer(genai.StreamerBase):  # type: ignore[misc]
        def __init__(self, tell: Callable[[int], object]) -> None:
            super().__init__()
            self._tell = tell

        def write(self, token: int | list[int]) -> Any:
            self._tell(1 if isinstance(token, int) else len(token))
            return genai.StreamingStatus.RUNNING

        def end(self) -> None: ...

    dtype = {"float32": "f32", "bfloat16": "bf16"}[start.dtype]
    properties: dict[str, Any] = {"INFERENCE_PRECISION_HINT": dtype, "KV_CACHE_PRECISION": dtype}
    properties |= {"INFERENCE_NUM_THREADS": start.threads}
    config = genai.GenerationConfig()
    config.do_sample, config.stop_token_ids = False, {*start.eos}
    if start.drafts:
        properties["prompt_lookup"] = True
        config.num_assistant_tokens, config.max_ngram_size = _OPENVINO_TOKENS, _OPENVINO_NGRAM
    pipeline = genai.LLMPipeline(start.path, "CPU", **properties)

    def ask(token_ids: list[int], most: int, tell: Callable[[int], object]) -> list[int]:
        config.max_new_tokens = most
        found = pipeline.generate(tensor(np.array([token_ids])), config, Streamer(tell))
        return [*found.tokens[0]]

    return ask


def llama_cpp(start: Start) -> Ask:
    """Start llama.cpp, by llama-cpp-python."""
    package = import_module("llama_cpp")
    options: dict[str, Any] = {"n_ctx": start.num_tokens + 64, "verbose": False}
    options |= {"n_threads": start.threads, "n_threads_batch": start.threads}
    if start.dtype == "float32":
        options |= dict.fromkeys(("type_k", "type_v"), package.GGML_TYPE_F32)
    if start.drafts:
        lookup = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding
        options["draft_model"] = lookup(num_pred_tokens=_LLAMA_CPP_TOKENS)
        options["logits_all"] = True  # else it fails where a prompt has more than 512 tokens
    model = package.Llama(start.path, **options)

    def ask(token_ids: list[int], most: int, tell: Callable[[int], object]) -> list[int]:
        model.reset()  # else it would keep what it has run of the prompt
        answer: list[int] = []
        for token_id in model.generate(token_ids, temp=0.0):
            tell(1)
            answer.append(token_id)
            if token_id in start.eos or len(answer) == most:
                break
        return answer

    return ask


class GgufEngine(NamedTuple):
    """An engine that may be installed."""

    start: Callable[[Start], Ask]
    module: str
    package: str
    dtype: str | None = None  # of a file that is written for it; None for that of the comparison


RIVALS = {
    "openvino": GgufEngine(openvino, "openvino_genai", "openvino-genai", "float16"),
    "llama_cpp": GgufEngine(llama_cpp, "llama_cpp", "llama-cpp-python"),
}


def installed() -> dict[str, GgufEngine]:
    """Return the engines that are installed, by name.

    Raises:
        UserError: there is none.
    """
    found = {name: each for name, each in RIVALS.items() if find_spec(each.module) is not None}
    if not found:
        packages = " ".join(each.package for each in RIVALS.values())
        raise UserError(f"--rivals needs another engine: pip install {packages}")
    return found


def beside_rivals(loaded: LoadedModel, num_tokens: int) -> dict[str, Callable[[], Method]]:
    """Return makers of methods for the engines that are installed, each without and with lookup.

    An engine starts at its first answer, and decodes greedily. Its drafts are not counted.

    Args:
        loaded: a model that was loaded from a GGUF file.
        num_tokens: of the longest prompt and its answer.

    Raises:
        UserError: the model is of no GGUF file, or no engine is installed.
    """
    path = gguf_of(loaded)
    if path is None:
        raise UserError(f"--rivals needs a GGUF file, which all engines read, got {loaded.name}")
    eos = end_tokens(loaded.model.generation_config)
    begin = Start(str(path), "float32", torch.get_num_threads(), num_tokens, eos, drafts=False)
    methods: dict[str, Callable[[], Method]] = {}
    for name, rival in installed().items():
        for drafts in (False, True):
            started = cache(partial(rival.start, begin._replace(drafts=drafts)))
            methods[f"{name}_lookup" if drafts else name] = partial(_method, started)
    return methods


def _method(started: Callable[[], Ask]) -> Method:
    def answer(model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> Answer:
        ask, token_ids = started(), inputs["input_ids"][0].tolist()

        def run(model: Any) -> list[int]:
            return ask(token_ids, options["max_new_tokens"], lambda num: None)

        row, (sec, cpu_sec) = timed(run, model, {})
        return Answer([row], sec, DecodeStats(), cpu_sec)

    return answer
