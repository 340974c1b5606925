"""vLLM with its n-gram drafts, where it is installed.

It decodes the same model and prompts, which have the answer's tokens in pieces, so that its drafts
are right as often as the replayed ones of lade. Next file: `real.py`.
"""

import gc
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

from lade.bench.baselines import Answer
from lade.bench.gpu.answers import GREEDY, MAX_ROUNDS, NUM_PROMPTS, summary_of
from lade.bench.gpu.shapes import DTYPE, KnownModel, Shape, copying_prompt
from lade.bench.gpu.stage import Stage

NOT_INSTALLED = "vllm is not installed; install it with: pip install vllm"

_MEMORY_SHARE = 0.6  # of the device
# One token decides where drafts are copied from, as each comes once.
_LOOKUP = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def why_not_vllm() -> str | None:
    """Return why vLLM cannot be compared with, or None."""
    return NOT_INSTALLED if find_spec("vllm") is None else None


def measure_vllm(
    make: Callable[[], KnownModel],
    shape: Shape,
    counts: Sequence[int],
    num_nodes: int,
    stage: Stage,
) -> None:
    """Answer the prompts of `measure_answers`; whatever fails in vLLM is left out with the reason.

    Args:
        make: returns the model, of which only a copy on disk is kept.
        shape: has the lengths of prompts and answers.
        counts: how many draft tokens successive steps are to accept.
        num_nodes: draft tokens of a step, and one.
        stage: receives a row.
    """
    with stage.part("vllm", Exception), TemporaryDirectory() as folder:
        known = make()
        prompts = [
            copying_prompt(known, shape, counts, seed)[0].tolist() for seed in range(NUM_PROMPTS)
        ]
        expected = [[known.answer(prompt[-1], shape.max_new_tokens)] for prompt in prompts]
        stage.say(f"{stage.title}: writing the model")
        known.model.save_pretrained(folder)
        del known  # its memory is vLLM's now
        gc.collect()
        torch.cuda.empty_cache()  # does nothing without a GPU
        _measure(folder, shape, num_nodes - 1, prompts, expected, stage)


def _measure(
    folder: str,
    shape: Shape,
    num_draft_tokens: int,
    prompts: Sequence[list[int]],
    expected: Sequence[list[list[int]]],
    stage: Stage,
) -> None:
    stage.say(f"{stage.title}: starting vllm")
    start = perf_counter()
    import vllm

    engine = vllm.LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype=str(DTYPE).removeprefix("torch."),
        max_model_len=shape.prompt_length + shape.max_new_tokens,
        gpu_memory_utilization=_MEMORY_SHARE,
        enable_prefix_caching=False,  # prompts come again
        speculative_config={**_LOOKUP, "num_speculative_tokens": num_draft_tokens},
    )

    def answer(prompt: list[int], num_tokens: int) -> Answer:
        settings = vllm.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        start = perf_counter()
        (output,) = engine.generate({"prompt_token_ids": prompt}, settings, use_tqdm=False)
        text = [*output.outputs[0].token_ids]
        return Answer([text], perf_counter() - start, 0, 0, 0)  # its steps are not told

    answer(prompts[0], shape.max_new_tokens)
    warm_up_sec = perf_counter() - start
    answers: list[Answer] = []
    prefills: list[float] = []
    for number in range(MAX_ROUNDS * NUM_PROMPTS):
        if number >= NUM_PROMPTS and not stage.has_time:
            break
        stage.say(f"{stage.title}: answer {number + 1}")
        prompt = prompts[number % NUM_PROMPTS]
        prefills.append(answer(prompt, 1).sec)
        answers.append(answer(prompt, shape.max_new_tokens))
    stage.add(
        {
            "method": "vllm",
            "decoding": GREEDY.name,
            "prompt_length": shape.prompt_length,
            **summary_of(answers, median(prefills), expected),
            "warm_up_sec": warm_up_sec,
            "execution": f"vllm {vllm.__version__}",
        }
    )
