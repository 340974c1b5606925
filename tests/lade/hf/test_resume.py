"""A call whose drafts cannot be verified any more goes on plainly, and loses nothing."""

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import lade
from lade.errors import VerificationWarning
from lade.gpu.fixed import FixedTarget
from lade.targets.paths import ChainTarget
from lade.targets.trees import TreeTarget
from tests.grids import thinned, thinned_rows
from tests.lade.both import ONE, THREE, ListStreamer, same_as_generate
from tests.lade.tiny import tiny_model
from tests.support.tiny import tiny_model as tiny_architecture


class CallsProcessor(LogitsProcessor):  # type: ignore[misc]
    """Counts its calls, and does something else at every third."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return scores * (0.3 if len(self.lengths) % 3 == 0 else 1.1)


def failing(
    monkeypatch: pytest.MonkeyPatch, method: str, after: int, error: type[Exception] = RuntimeError
) -> None:
    """Let a method of every target raise at one of its calls."""
    for kind in (TreeTarget, ChainTarget, FixedTarget):
        if method not in vars(kind):
            continue
        own, num_calls = getattr(kind, method), [0]

        def fail(
            self: Any, *args: Any, own: Any = own, num_calls: Any = num_calls, **kwargs: Any
        ) -> Any:
            num_calls[0] += 1
            if num_calls[0] == after:
                raise error("what no check has seen")
            return own(self, *args, **kwargs)

        monkeypatch.setattr(kind, method, fail)


def compared(
    model: Any, prompt: torch.Tensor, config: lade.Config, joint: bool = False, **options: Any
) -> Any:
    """Run plain and lade, whose target fails on the way; compare all that can be seen."""
    streamers = [ListStreamer(), ListStreamer()]
    processors = [CallsProcessor(), CallsProcessor()]
    made: list[dict[str, Any]] = [{"streamer": each} for each in streamers]
    if joint:
        for each, processor in zip(made, processors, strict=True):
            each["logits_processor"] = LogitsProcessorList([processor])
    told: dict[int, list[int]] = {}

    def on_step(step: Any) -> None:
        told.setdefault(step.row, []).extend(step.token_ids)

    by = partial(lade.generate, on_step=on_step)
    options = {"max_new_tokens": 20, "do_sample": None, **options}
    with pytest.warns(VerificationWarning, match="what no check has seen"):
        expected, got = same_as_generate(
            model,
            prompt,
            accept=0.7,
            config=config,
            may_fail=True,
            fresh=partial(next, iter(made)),
            by=by,
            **options,
        )
    assert streamers[1].events == streamers[0].events
    assert processors[1].lengths == processors[0].lengths
    for row, answer in enumerate(expected.sequences.tolist()):
        new = answer[prompt.shape[1] :]
        assert new[: len(told[row])] == told[row]
        assert all(token in (0, 96) for token in new[len(told[row]) :])  # padding alone is not told
    for name in ("scores", "logits", "hidden_states", "attentions"):
        of_plain, of_lade = expected.get(name), got.get(name)
        assert (of_plain is None) == (of_lade is None)
        for a, b in zip(_flat(of_plain), _flat(of_lade), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    return expected, got


def _flat(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values or () if value is not None for tensor in _flat(value)]


@pytest.mark.parametrize("method", ["prefill", "inputs", "forward", "commit"])
@pytest.mark.parametrize("after", thinned([1, 3], 3))
@pytest.mark.parametrize("verification", thinned(["tree", "chain"], "tree"))
def test_a_target_that_fails_on_the_way_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, method: str, after: int, verification: Any
) -> None:
    config = lade.Config(max_draft_tokens=8, verification=verification)
    for prompt in (ONE, THREE):
        model = tiny_model("llama", seed=2)
        lade.probe(model, num_rows=len(prompt))
        lade.generate(model, prompt, config=config, max_new_tokens=2, pad_token_id=0)
        with monkeypatch.context() as patch:
            failing(patch, method, 1 if method == "prefill" else after)
            compared(model, prompt, config, do_sample=True)


EARLY_ENDS = {"repetition_penalty": 1.3, "eos_token_id": [*range(30, 50)]}
ASKED: list[dict[str, Any]] = [
    {"do_sample": True, "joint": True},
    {"do_sample": True, "eos_token_id": [50, 51]},
    {"do_sample": True, "output_scores": True, "output_logits": True},
    {"do_sample": False, "output_hidden_states": True},
    # Of rows that ended before, too.
    {"output_scores": True, "output_logits": True, **EARLY_ENDS},
    {"output_hidden_states": True, **EARLY_ENDS},
]
RESTS = [("llama", options) for options in ASKED]
RESTS += [
    (family, options) for family in ("mistral", "gpt2", "gemma3_text") for options in ASKED[3:5]
]
QUICK = (*RESTS[:5:4], ("mistral", ASKED[3]))


@pytest.mark.parametrize(("family", "options"), thinned_rows(RESTS, *QUICK))
def test_the_rest_has_all_that_the_call_asked_for(
    monkeypatch: pytest.MonkeyPatch, family: str, options: dict[str, Any]
) -> None:
    config = lade.Config(max_draft_tokens=8)
    for prompt in (ONE, THREE):
        model = tiny_model(family, seed=1)
        lade.generate(model, prompt, config=config, max_new_tokens=2, pad_token_id=0)
        with monkeypatch.context() as patch:
            failing(patch, "commit", 2)
            compared(model, prompt, config, **options)


@pytest.mark.parametrize(
    "name", thinned(["mamba2", "bamba", "rwkv", "lfm2", "bloom"], "bamba", "bloom")
)
def test_other_architectures_go_on_plainly_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = tiny_architecture(name, seed=0, attention=None, dtype=torch.float64)
    config = lade.Config(max_draft_tokens=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.PlainDecodingWarning)
        lade.generate(model, ONE, config=config, max_new_tokens=2, pad_token_id=0)
    failing(monkeypatch, "commit", 2)
    compared(model, ONE, config, do_sample=True)


def test_a_chat_goes_on_in_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", seed=1)
    first = model.generate(
        ONE, attention_mask=torch.ones_like(ONE), max_new_tokens=5, return_dict_in_generate=True
    )
    longer = torch.cat([first.sequences, ONE], dim=1)
    for verification in ("tree", "chain"):
        model = tiny_model("llama", seed=1)
        config = lade.Config(max_draft_tokens=4, verification=verification)
        lade.generate(model, ONE, config=config, max_new_tokens=2)
        caches = [{"past_key_values": copy.deepcopy(first.past_key_values)} for _ in range(2)]
        with monkeypatch.context() as patch:
            failing(patch, "commit", 2)
            with pytest.warns(VerificationWarning):
                _, got = same_as_generate(
                    model, longer, fresh=partial(next, iter(caches)), config=config
                )
        assert got.past_key_values is caches[1]["past_key_values"]
        assert got.past_key_values.get_seq_length() == got.sequences.shape[1] - 1


def test_embeddings_go_on_as_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", seed=1)
    embeds = model.get_input_embeddings()(ONE) * 0.9
    config = lade.Config(max_draft_tokens=4)
    lade.generate(model, ONE, config=config, max_new_tokens=2)
    failing(monkeypatch, "commit", 3)
    with pytest.warns(VerificationWarning):
        same_as_generate(
            model, inputs_embeds=embeds, attention_mask=torch.ones_like(ONE), config=config
        )


def test_what_plain_raises_too_is_raised() -> None:
    model = tiny_model("llama", seed=1)
    lade.probe(model)

    def fail(module: Any, args: Any, output: Any) -> None:
        if output.shape[1] == 1 or armed:
            raise KeyError("the user's own")

    armed: list[int] = []
    model.lm_head.register_forward_hook(fail)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.PlainDecodingWarning)
        with pytest.raises(KeyError, match="the user's own"):
            lade.generate(model, ONE, max_new_tokens=8)


def test_what_a_callback_raises_is_raised() -> None:
    model = tiny_model("llama", seed=1)

    def fail(step: Any) -> None:
        raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        lade.generate(model, ONE, on_step=fail, max_new_tokens=8)


@pytest.mark.parametrize(("error", "num_times"), [(RuntimeError, 2), (torch.OutOfMemoryError, 3)])
def test_a_way_that_fails_twice_is_not_taken_again_unless_memory_ran_out(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], num_times: int
) -> None:
    model = tiny_model("llama", seed=1)
    config = lade.Config(max_draft_tokens=4)
    lade.generate(model, ONE, config=config, max_new_tokens=2)
    for _ in range(num_times):
        with monkeypatch.context() as patch:
            failing(patch, "forward", 3, error)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", VerificationWarning)
                lade.generate(model, ONE, config=config, max_new_tokens=12)
        found = lade.probe(model)
    if error is torch.OutOfMemoryError:
        assert found.verification == "tree"
    else:
        assert "what no check has seen" in found.reasons["tree"]


def test_a_check_that_breaks_is_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", seed=1)

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a config like no other")

    monkeypatch.setattr("lade.hf.generation.requirements_of", broken)
    same_as_generate(model, ONE, plainly="a config like no other")
