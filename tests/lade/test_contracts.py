"""What users rely on, by public names alone: what no other such test notices of the faults."""

import copy
import runpy
import signal
import sys
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import lade
from lade.drafters import AssistantModel
from ngram_pool import NGramPool, PoolStore
from tests.chi_square import FALSE_ALARM, p_value
from tests.grids import thinned
from tests.lade.both import EIGHT, ONE, THREE, answered, same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import VOCAB_SIZE, byte_tokenizer, tiny_model

MANY_ENDS = [*range(4, VOCAB_SIZE, 8)]  # not what pads
LONG: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None}
# Heads of whole vectors; together they have what decoders have.
FUSED: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "gemma2": {
        "attention": "eager",
        "head_dim": 16,
        "sliding_window": 24,
        "attn_logit_softcapping": 2.0,
    },
}


def are_close(mine: Any, theirs: Any) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_outputs_are_those_of_generate() -> None:
    names = ("scores", "logits")
    options: dict[str, Any] = {f"output_{name}": True for name in names}
    options |= {"do_sample": True, "temperature": 1.5, "repetition_penalty": 1.3}
    for seed in range(3):
        options |= {"seed": seed, "eos_token_id": MANY_ENDS if seed else None}
        model = shared_model("llama", seed=seed)
        both = same_as_generate(model, ONE, accept=0.7, config=EIGHT, **options)
        for name in names:
            are_close(*(getattr(output, name) for output in reversed(both)))


@pytest.mark.parametrize(
    "family", thinned(["llama", "gpt2", "mistral", "gemma3_text"], "llama", "mistral")
)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_rows_of_a_batch_are_those_of_generate(family: str, do_sample: bool) -> None:
    model = shared_model(family)
    assert lade.probe(model, num_rows=3).verification == "tree"
    options: dict[str, Any] = {"do_sample": do_sample, "max_new_tokens": 30, "config": EIGHT}
    options |= {"min_new_tokens": 5, **({"temperature": 0.8, "top_p": 0.9} if do_sample else {})}
    for seed, eos in enumerate((None, MANY_ENDS, MANY_ENDS)):
        same_as_generate(model, THREE, accept=0.7, seed=seed, eos_token_id=eos, **options)


def test_functions_of_the_caller_are_called_as_by_generate() -> None:
    told: list[Any] = []

    class Processor(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            told.append(("process", input_ids.tolist()))
            return scores

    class Criterion(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            told.append(("stop", input_ids.tolist()))
            return torch.full((len(input_ids),), input_ids.shape[1] > 20)

    class Streamer(BaseStreamer):  # type: ignore[misc]
        def put(self, value: Any) -> None:
            told.append(("put", value.tolist()))

        def end(self) -> None:
            told.append(("end",))

    def fresh() -> dict[str, Any]:
        told.append("begin")
        functions = {"logits_processor": [Processor()], "stopping_criteria": [Criterion()]}
        return {**functions, "streamer": Streamer()}

    same_as_generate(shared_model(), ONE, accept=0.8, config=EIGHT, fresh=fresh, **LONG)
    second = told.index("begin", 1)
    assert told[:second] == told[second:]


def test_a_cache_is_filled_as_by_generate_or_left_as_it_was() -> None:
    model = shared_model()
    options: dict[str, Any] = {"eos_token_id": MANY_ENDS, "max_new_tokens": 30}
    theirs, mine = same_as_generate(model, THREE[:1], accept=0.7, config=EIGHT, **options)
    assert mine.past_key_values.get_seq_length() == theirs.past_key_values.get_seq_length()
    for one, other in zip(mine.past_key_values.layers, theirs.past_key_values.layers, strict=True):
        are_close(one.keys[:, :, 2:], other.keys[:, :, 2:])  # the rest may be padding

    class Interrupting(BaseStreamer):  # type: ignore[misc]
        def put(self, value: Any) -> None:
            if value.dim() == 1:
                raise KeyboardInterrupt

        def end(self) -> None: ...

    cache = answered(model, ONE, max_new_tokens=9).past_key_values
    before = copy.deepcopy(cache)
    ids = torch.cat([ONE, torch.tensor([[4] * 12])], dim=1)
    with pytest.raises(KeyboardInterrupt):
        answered(model, ids, past_key_values=cache, streamer=Interrupting(), max_new_tokens=9)
    assert cache.get_seq_length() == before.get_seq_length()
    are_close(cache.layers[0].keys, before.layers[0].keys)


def test_rejection_sampling_has_the_distribution_of_the_model() -> None:
    """Of a first token and the one after it, of 2,400 samples that a pool of noise drafts for."""
    size, prompt = 8, [1, 2, 3, 1, 2]
    model = shared_model(seed=3, vocab_size=size, eos_token_id=None, pad_token_id=0)
    config = lade.Config(acceptance="rejection", max_draft_tokens=6)
    prefixes = torch.tensor([[*prompt, first] for first in range(size)])
    with torch.no_grad():
        probs = model(prefixes).logits[:, -2:].float().softmax(-1)
    expected = probs[0, 0][:, None] * probs[:, 1]
    counts, pool = torch.zeros(size, size, dtype=torch.int64), NGramPool()
    pool.observe(torch.randint(size, (4000,)).tolist())
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "num_return_sequences": 400}
    noise = pool.as_read_only()
    for _ in range(6):
        got = lade.generate(
            model, torch.tensor([prompt]), pool=noise, config=config, **options, max_new_tokens=3
        )
        for first, second in got[:, 5:7].tolist():
            counts[first, second] += 1
    assert p_value(counts.flatten().tolist(), expected.flatten().tolist()) > FALSE_ALARM


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.usefixtures("single_thread")
def test_forwards_run_fused_and_give_the_logits_of_the_model(family: str) -> None:
    """In float32 on a CPU, past blocks of 64 keys: else torch would run each linear layer.

    Which way is faster is measured, so one of several models has to be enough.
    """
    for seed in range(5):
        model = tiny_model(family, seed, dtype=torch.float32, **FUSED[family])
        call = partial(same_as_generate, model, ONE, max_new_tokens=150, eos_token_id=None)
        call(accept=0.7, config=EIGHT)
        call(config=lade.Config(max_draft_tokens=0))
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            got = answered(model, ONE, config=EIGHT, **LONG)
        num_layers = sum(type(each) is torch.nn.Linear for each in model.modules())
        num_run = sum(each.count for each in profiled.key_averages() if each.key == "aten::linear")
        if num_run < num_layers * got.stats.num_steps / 2:
            return
    pytest.fail("no forward ran fused")


@pytest.mark.usefixtures("single_thread")
def test_logits_of_bfloat16_weights_are_as_exact_as_in_float32() -> None:
    model = tiny_model(dtype=torch.bfloat16, head_dim=16, num_hidden_layers=12)
    got = answered(model, ONE, output_logits=True, **LONG)
    with torch.no_grad():
        exact = model.double()(got.sequences[:, :-1]).logits[0, ONE.shape[1] - 1 :]
    assert (torch.cat(got.logits) - exact).std() < 1e-5 * exact.std()


def test_a_wrong_prediction_costs_little() -> None:
    model = shared_model()
    answer = answered(model, ONE, **LONG).sequences[0, ONE.shape[1] :].tolist()
    by = partial(lade.generate, prediction=[*answer[:8], *range(30, 62)])
    _, got = same_as_generate(model, ONE, by=by, config=lade.Config(max_draft_tokens=32), **LONG)
    found = got.stats.sources["prediction"]
    assert found.num_draft_tokens - found.num_accepted_tokens < 80


def test_an_assistant_that_is_the_model_is_always_right() -> None:
    model, steps = tiny_model(), list[lade.Step]()
    assistant = AssistantModel(copy.deepcopy(model), length=4)
    by = partial(lade.generate, on_step=steps.append)
    same_as_generate(model, ONE, by=by, drafter=assistant, config=EIGHT, **LONG)
    assert min(step.num_accepted for step in steps[1:-1]) >= 1


def test_calls_at_once_have_their_own_tokens_and_errors() -> None:
    model = tiny_model()
    prompts = [torch.randint(2, 90, (1, length)) for length in (3, 9, 14, 5)]
    alone = [answered(model, prompt, **LONG).sequences.tolist() for prompt in prompts]
    unknown, told = torch.full((1, 6), 1000), list[lade.Step]()
    with lade.Batcher(model) as batcher:
        submit: Any = partial(batcher.submit, do_sample=False, eos_token_id=None)
        right = [submit(prompt, max_new_tokens=40) for prompt in prompts]
        wrong = [submit(unknown, max_new_tokens=40) for _ in range(4)]
        right += [submit(prompt, max_new_tokens=40) for prompt in prompts]
        for request in wrong:
            with pytest.raises(IndexError, match="out of range"):
                request.result()
        assert [request.result().tolist() for request in right] == 2 * alone
        endless = submit(ONE, max_new_tokens=400, on_step=told.append)
        next(iter(endless))
        assert endless.cancel()
        with pytest.raises(CancelledError):
            endless.result(timeout=30)
    assert sum(len(step.token_ids) for step in told) < 300


def test_a_store_has_what_was_learned_last(tmp_path: Path) -> None:
    for time in range(3):
        with PoolStore(tmp_path) as store, store.open("ann") as pool:
            assert len(pool) == 2 * time
            pool.observe([5 + time, 6 + time])


def test_a_command_prints_the_text_of_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model of bytes; most bytes begin characters that do not go on."""
    tokenizer = byte_tokenizer()
    model = tiny_model(seed=2, dtype=torch.float32, vocab_size=256, eos_token_id=None)
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path)
    ids = tokenizer("abcabc", return_tensors="pt")["input_ids"]
    handler = signal.getsignal(signal.SIGINT)
    for length in range(8, 14):
        options = ["--dtype", "float32", "--max-new-tokens", str(length), "--raw"]
        command = ["lade", "generate", "abcabc", "--model", str(tmp_path), *options]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit):
            runpy.run_module("lade", run_name="__main__")
        signal.signal(signal.SIGINT, handler)
        plain = model.generate(ids, do_sample=False, max_new_tokens=length, pad_token_id=0)
        expected = tokenizer.decode(plain[0, ids.shape[1] :])
        assert capsys.readouterr().out == f"{expected}\n"


def test_a_pool_of_a_larger_vocabulary_draws_nothing_that_the_model_has_not() -> None:
    """A node whose distribution has unknown tokens among others is not run."""
    model, pool = tiny_model(), NGramPool()
    for token_id in (8, 300, 9, 301, 8, 300, 2**31 - 1):
        pool.observe([5, 6, 7, 5, token_id, 10, (token_id + 5) % 2**31], None)
    contexts = [[-1, token_id] for token_id in range(VOCAB_SIZE)]
    pool.harvest(contexts, [[2**31 - 1, 50_000]] * VOCAB_SIZE, [[0.9, 0.05]] * VOCAB_SIZE)
    same_as_generate(model, ONE, pool=pool, config=EIGHT, **LONG)
    config = lade.Config(acceptance="rejection", max_draft_tokens=8)
    for seed in range(12):
        torch.manual_seed(seed)
        got = answered(model, ONE, pool=pool, config=config, do_sample=True, **LONG)
        assert got.sequences.shape[1] == ONE.shape[1] + 40  # and no warning that drafts failed


def test_a_seed_of_zero_is_a_seed() -> None:
    model, options = tiny_model(), {"do_sample": True, "max_new_tokens": 20, "pad_token_id": 0}
    torch.manual_seed(0)
    expected = model.generate(ONE, attention_mask=torch.ones_like(ONE), **options)
    with lade.Batcher(model) as batcher:
        got = batcher.submit(ONE, seed=0, **options).result()
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("num_tokens", [128, 129, 257])
def test_prompts_of_several_pieces_are_answered_as_by_generate(num_tokens: int) -> None:
    model = tiny_model(dtype=torch.float32, head_dim=16)
    prompt = torch.randint(2, 90, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        same_as_generate(model, prompt, accept=0.7, config=EIGHT, max_new_tokens=12)


@pytest.mark.parametrize("family", thinned(["mistral", "gemma3_text"], "gemma3_text"))
def test_prompts_in_chunks_are_answered_so_behind_windows_too(family: str) -> None:
    for num_tokens in (8, 9, 12, 23):
        model = tiny_model(family, dtype=torch.float32, head_dim=16, sliding_window=8)
        prompt = torch.randint(2, 90, (1, num_tokens), generator=torch.Generator().manual_seed(0))
        same_as_generate(model, prompt, config=EIGHT, max_new_tokens=12, prefill_chunk_size=4)


def test_a_server_answers_with_the_text_of_generate() -> None:
    from tests.lade.apps.server import client as clients
    from tests.lade.apps.server import serving

    loaded = serving.loaded_model()
    expected = serving.plain_text(loaded)
    stop = expected[12:15]
    with serving.serving(loaded) as client:
        cut = expected[: expected.index(stop)]
        for stops in (stop, [stop[1:], stop]):  # both end at once; the first to begin cuts
            assert client.text(stop=stops) == clients.text_of(client.stream(stop=stops)) == cut
        for _ in range(2):
            answer = client.ask(user="ann", logprobs=True, top_logprobs=1)
            found, usage = answer["choices"][0]["logprobs"]["content"], answer["usage"]
            assert "".join(each["token"] for each in found) == expected
            assert all(each["logprob"] == each["top_logprobs"][0]["logprob"] for each in found)
            assert [each["top_logprobs"][0]["token"] for each in found] == [*expected]
            assert usage["completion_tokens"] == 40
            assert usage["total_tokens"] == usage["prompt_tokens"] + 40
            assert 0 <= usage["completion_tokens_details"]["accepted_draft_tokens"] < 40
