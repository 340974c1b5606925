"""What is called: lade in several of its ways, on models that answer in milliseconds."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

import lade
from lade.probing.profile import Profiles
from ngram_pool import NGramPool
from tests.lade.tiny import byte_tokenizer, tiny_model
from tests.support.tiny import tiny_model as tiny_architecture

PROMPT = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
BATCH = torch.tensor([[0, 0, 5, 6, 7, 5, 6], [8, 9, 8, 9, 8, 9, 8]])
NUM_NEW = 6
STEADY = lade.Config(max_draft_tokens=4)


class Heard(BaseStreamer):  # type: ignore[misc]
    """A streamer that remembers."""

    def __init__(self) -> None:
        self.columns: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.columns.append(value.tolist())

    def end(self) -> None:
        self.columns.append("end")


@dataclass
class Use:
    """A model and a pool, and a call that uses both.

    Attributes:
        model: that all calls share.
        call: lade's; returns what can be told of the answer.
        plain: the same without lade.
        pool: that all calls share; None where none is.
        keeps_random_state: whether a call, interrupted or not, draws no random number.
    """

    model: Any
    call: Callable[[], Any]
    plain: Callable[[], Any]
    pool: NGramPool | None = None
    keeps_random_state: bool = True
    expected: Any = field(init=False)

    def __post_init__(self) -> None:
        self.expected = self.plain()
        for _ in range(3):  # check the model, compile, learn
            got = self.call()
            assert got == self.expected, (got, self.expected)


def _llama(**options: Any) -> Any:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    model = tiny_model("llama", **sizes | options)
    model.generation_config.eos_token_id = None
    return model


def _options(prompt: torch.Tensor = PROMPT, **more: Any) -> dict[str, Any]:
    return {
        "attention_mask": (prompt != 0).long(),
        "do_sample": False,
        "max_new_tokens": NUM_NEW,
        "pad_token_id": 0,
        **more,
    }


def _pool() -> NGramPool:
    return NGramPool(60, 3)


def _greedy(config: lade.Config | None, model: Any = None, prompt: Any = PROMPT) -> Use:
    model, pool, options = model or _llama(), _pool(), _options(prompt)
    return Use(
        model,
        lambda: lade.generate(model, prompt, pool=pool, config=config, **options).tolist(),
        lambda: model.generate(prompt, **options).tolist(),
        pool,
    )


def sampled() -> Use:
    """Rows of different lengths, sampled, with processors, a streamer and `on_step`."""
    model, pool = _llama(), _pool()
    options = _options(BATCH, do_sample=True, repetition_penalty=1.2, top_k=20)

    def call(generate: Callable[..., Any], **more: Any) -> Any:
        heard = Heard()
        torch.manual_seed(3)
        return generate(BATCH, streamer=heard, **options, **more).tolist(), heard.columns

    def ours() -> Any:
        told: list[list[int]] = [[], []]

        def on_step(step: lade.Step) -> None:
            told[step.row] += step.token_ids

        answer = call(
            lambda *args, **kwargs: lade.generate(model, *args, **kwargs),
            pool=pool,
            on_step=on_step,
            config=STEADY,
        )
        assert told == [row[BATCH.shape[1] :] for row in answer[0]]
        return answer

    return Use(model, ours, lambda: call(model.generate), pool, keeps_random_state=False)


def rejecting() -> Use:
    """Drafts drawn at random, accepted or rejected; of a pool that knows nothing, for the text."""
    model, options = _llama(), _options(do_sample=True)
    config = lade.Config(acceptance="rejection", max_draft_tokens=4)

    def call() -> Any:
        torch.manual_seed(3)
        return lade.generate(model, PROMPT, pool=_pool(), config=config, **options).tolist()

    return Use(model, call, call, keeps_random_state=False)


def strings() -> Use:
    """A wrapped model whose own config has stop strings, and all the outputs there are."""
    model = _llama(vocab_size=256)
    options = _options(tokenizer=byte_tokenizer(), return_dict_in_generate=True)
    options |= {"output_scores": True, "output_hidden_states": True, "output_logits": True}
    model.generation_config.stop_strings = ["no such text", "neither"]
    pool = _pool()

    def call(generate: Callable[..., Any], **more: Any) -> Any:
        output = generate(PROMPT, **options, **more)
        states = [float(layer.sum()) for step in output.hidden_states[:1] for layer in step]
        return (
            output.sequences.tolist(),
            [round(float(scores.sum()), 6) for scores in output.scores],
            [round(each, 6) for each in states],
            output.past_key_values.get_seq_length(),
        )

    plain = call(model.generate)
    lade.wrap(model, pool=pool, config=STEADY)
    return Use(model, lambda: call(model.generate), lambda: plain, pool)


def first_call() -> Use:
    """A model that lade knows nothing of: it is checked first."""
    model, pool, options = _llama(), _pool(), _options()

    def call() -> Any:
        Profiles.of(model).forget()
        return lade.generate(model, PROMPT, pool=pool, config=STEADY, **options).tolist()

    return Use(model, call, lambda: model.generate(PROMPT, **options).tolist(), pool)


def sparse() -> Use:
    """Attention that may choose its keys."""
    model = tiny_architecture("deepseek_v32", seed=0, attention=None, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return _greedy(STEADY, model)


def with_steps(target: Any, family: str = "llama", **options: Any) -> Use:
    """Another way of verifying."""
    model = tiny_model(family, **options)
    model.generation_config.eos_token_id = None
    return _greedy(lade.Config(verification=target, max_draft_tokens=4), model)


def kept() -> Use:
    """A prompt whose keys and values were kept by the calls before."""
    return _greedy(lade.Config(reuses_prefix=True, max_draft_tokens=4))


USES: dict[str, Callable[[], Use]] = {
    "tree": lambda: _greedy(None),
    "sampled": sampled,
    "chain": lambda: with_steps("chain", num_hidden_layers=1),
    "snapshot": lambda: with_steps("snapshot", num_hidden_layers=1),
    "fixed": lambda: _greedy(lade.Config(execution="fixed", max_draft_tokens=4), prompt=BATCH),
    "stable": lambda: _greedy(lade.Config(stable_text=True, max_draft_tokens=3)),
    "lookahead": lambda: _greedy(lade.Config(lookahead=lade.Lookahead(2, 3), max_draft_tokens=4)),
    "strings": strings,
    "rejection": rejecting,
    "sparse": sparse,
    "plain": lambda: _greedy(lade.Config(verification="plain")),
    "first call": first_call,
    "kept": kept,
}
