"""What is called: lade in several of its ways, on models that answer in milliseconds."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import lade
from lade import NGramPool
from tests.lade.tiny import byte_tokenizer, tiny_model
from tests.support.tiny import tiny_model as tiny_architecture

PROMPT = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
BATCH = torch.tensor([[0, 0, 5, 6, 7, 5, 6], [8, 9, 8, 9, 8, 9, 8]])


@dataclass
class Use:
    """A model and a pool, and a call that uses both."""

    model: Any  # that all calls share
    call: Callable[[], Any]  # lade's; returns what can be compared
    plain: Callable[[], Any]  # the same without lade
    pool: NGramPool | None = None  # that all calls share
    keeps_random_state: bool = True  # a call, interrupted or not, draws no random number
    expected: Any = field(init=False)

    def __post_init__(self) -> None:
        self.expected = self.plain()
        for _ in range(3):  # check the model, compile, learn
            got = self.call()
            assert got == self.expected, (got, self.expected)


def _options(prompt: torch.Tensor = PROMPT, **more: Any) -> dict[str, Any]:
    options = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
    return {"attention_mask": (prompt != 0).long(), **options, **more}


def _llama(**options: Any) -> Any:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    return tiny_model("llama", **sizes | options)


def _greedy(model: Any = None, prompt: Any = PROMPT, **config: Any) -> Use:
    model, pool, options = model or _llama(), NGramPool(60, 3), _options(prompt)
    call = partial(lade.generate, model, prompt, pool=pool, config=lade.Config(**config), **options)
    plain = partial(model.generate, prompt, **options)
    return Use(model, lambda: call().tolist(), lambda: plain().tolist(), pool)


def sampled() -> Use:
    """Rows of different lengths, sampled, with a processor and `on_step`."""
    model, pool = _llama(), NGramPool(60, 3)
    options = _options(BATCH, do_sample=True, repetition_penalty=1.2, top_k=20)

    def ours() -> Any:
        said: list[list[int]] = [[], []]

        def on_step(step: lade.Step) -> None:
            said[step.row] += step.token_ids

        torch.manual_seed(3)
        config = lade.Config(max_draft_tokens=4)
        answer = lade.generate(model, BATCH, pool=pool, config=config, on_step=on_step, **options)
        assert said == answer[:, BATCH.shape[1] :].tolist()
        return answer.tolist()

    def plain() -> Any:
        torch.manual_seed(3)
        return model.generate(BATCH, **options).tolist()

    return Use(model, ours, plain, pool, keeps_random_state=False)


def rejecting() -> Use:
    """Drafts drawn at random, accepted or rejected: the text is of what earlier calls have learned.

    So its length is all that can be compared.
    """
    model, options = _llama(), _options(do_sample=True)
    options["config"] = lade.Config(acceptance="rejection", max_draft_tokens=4)

    def call() -> Any:
        answer = lade.generate(model, PROMPT, pool=NGramPool(60, 3), **options)
        assert bool(((answer >= 0) & (answer < model.config.vocab_size)).all())
        return [*answer.shape]

    return Use(model, call, call, keeps_random_state=False)


def _processed(input_ids: Any, scores: Any) -> Any:
    return scores - input_ids.shape[1]


def _asked(input_ids: Any, scores: Any, **_: Any) -> Any:
    return torch.zeros(len(input_ids), dtype=torch.bool)


def strings() -> Use:
    """A wrapped model with stop strings, scores, logits and functions of the caller's."""
    model, pool = _llama(vocab_size=256), NGramPool(60, 3)
    options = _options(tokenizer=byte_tokenizer(), return_dict_in_generate=True)
    options |= {"output_scores": True, "output_logits": True}
    options |= {"logits_processor": [_processed], "stopping_criteria": [_asked]}
    model.generation_config.stop_strings = ["no such text", "neither"]

    def call() -> Any:
        output = model.generate(PROMPT, **options)
        scores = [round(float(each.sum()), 6) for each in (*output.scores, *output.logits)]
        return output.sequences.tolist(), scores, output.past_key_values.get_seq_length()

    plain = call()
    lade.wrap(model, pool=pool, config=lade.Config(max_draft_tokens=4))
    return Use(model, call, lambda: plain, pool)


def first_call() -> Use:
    """A model that lade knows nothing of: it is checked first."""
    use = _greedy(max_draft_tokens=4)
    call = use.call

    def anew() -> Any:
        lade.release(use.model)
        return call()

    use.call = anew
    return use


def _with_steps(target: Any, family: str = "llama", **options: Any) -> Use:
    """Another way of verifying."""
    return _greedy(tiny_model(family, **options), verification=target, max_draft_tokens=4)


def _architecture(name: str, attention: str | None, **config: Any) -> Use:
    model = tiny_architecture(name, seed=0, attention=attention, dtype=torch.float32)
    return _greedy(model, **config)


USES: dict[str, Callable[[], Use]] = {
    "tree": _greedy,
    "sampled": sampled,
    "chain": partial(_with_steps, "chain", num_hidden_layers=1),
    "snapshot": partial(_with_steps, "snapshot", num_hidden_layers=1),
    "strings": strings,
    "rejection": rejecting,
    "sparse": partial(_architecture, "deepseek_v32", None, max_draft_tokens=4),
    "gemma2": partial(_architecture, "gemma2", "eager", max_draft_tokens=7),
    "plain": partial(_greedy, verification="plain"),
    "first call": first_call,
    "kept": partial(_greedy, reuses_prefix=True, max_draft_tokens=4),
}
