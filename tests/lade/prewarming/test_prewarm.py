"""Tables of a model's own successors: what they hold, how they grow, and what is left untouched."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

import lade
from lade.drafting.tables import path_of_table
from ngram_pool import NGramPool
from tests.grids import thinned
from tests.lade.both import ONE, same_as_generate
from tests.lade.tiny import MAMBA2, by_last_token, tiny_model


def prewarm(model: Any, folder: Path | None = None, max_tokens: int = 3000, **options: Any) -> Any:
    return lade.prewarm(model, 60, max_tokens=max_tokens, folder=folder, **options)


def contents(path: Path) -> dict[tuple[int, ...], tuple[list[int], list[float]]]:
    """The successors of each context in a table, and their probabilities."""
    assert len(NGramPool.load(path)) == 0  # it holds no text
    arrays = safetensors.numpy.load_file(path)
    keys, ids, costs = (arrays[f"harvested.{name}"] for name in ("keys", "token_ids", "costs"))
    previous, last = np.divmod(keys[keys >= 0], 2**31)
    contexts = zip((previous - 1).tolist(), last.tolist(), strict=True)
    probs = np.exp(costs[keys >= 0] / -4096).tolist()
    return dict(zip(contexts, zip(ids[keys >= 0].tolist(), probs, strict=True), strict=True))


# --- what is in a table, and what for -----------------------------------------------------------


@pytest.mark.parametrize(
    "family", thinned(["llama", "gpt2", "mistral", "bloom", "mamba2"], "mistral", "mamba2")
)
def test_a_pair_has_the_successors_that_the_model_tells(family: str, tmp_path: Path) -> None:
    """In texts of two tokens behind the start, all that come before a pair is the same."""
    options: Any = {"n_layer": 2, "n_head": 4} if family == "bloom" else {}
    options |= MAMBA2 if family == "mamba2" else {}
    model = tiny_model(family, attention="eager", **options)
    model.config.max_position_embeddings = 4
    table = contents(prewarm(model, tmp_path).path)
    pairs = [pair for pair in table if pair[0] >= 0]
    assert len(pairs) > 50
    for previous, last in pairs[::10]:
        with torch.no_grad():
            probs = model(torch.tensor([[1, previous, last]])).logits[0, -1].softmax(-1)
        top = probs.topk(8)
        row_ids, row_probs = table[previous, last]
        assert row_ids == top.indices.tolist()
        np.testing.assert_allclose(row_probs, top.values.tolist(), rtol=0.03)  # estimated
    assert (-1, pairs[0][1]) in table  # what follows a single token, too


def test_the_next_call_drafts_from_it_and_says_the_same() -> None:
    model = by_last_token(tiny_model("llama", seed=1))

    def mean_accepted(pool: lade.NGramPool | None = None) -> float:
        config = lade.Config(max_draft_tokens=4)
        _, got = same_as_generate(model, ONE, config=config, pool=pool)
        return float(got.stats.mean_accepted_tokens)

    before = mean_accepted()
    made = prewarm(model)
    assert min(mean_accepted(), mean_accepted(lade.NGramPool().as_read_only())) > 1.1 * before
    assert made.num_contexts == len(contents(made.path))
    made.path.unlink()
    model = by_last_token(tiny_model("llama", seed=1))
    assert mean_accepted() <= 1.1 * before


def test_a_run_adds_to_the_one_before_and_ends_after_so_many_tokens(tmp_path: Path) -> None:
    model = tiny_model("llama")
    told: list[Any] = []
    first = prewarm(model, tmp_path, 500, progress=told.append)
    assert 500 <= first.num_tokens < 700  # a batch in progress is finished
    assert 0 < first.seconds < 30
    assert told[-1].num_tokens == first.num_tokens
    assert told[-1].num_contexts == pytest.approx(first.num_contexts, rel=0.1)
    second = prewarm(model, tmp_path, 1500)
    assert second.path == first.path
    assert second.num_tokens >= 1500
    assert second.num_contexts > first.num_contexts
    assert second.seconds > first.seconds
    quick = lade.prewarm(model, 0.2, folder=tmp_path)
    assert quick.seconds == pytest.approx(second.seconds + 0.2, abs=0.5)


def test_an_interruption_keeps_what_was_done(tmp_path: Path) -> None:
    model = tiny_model("llama").train()

    def interrupt(made: Any) -> None:
        if made.num_tokens > 700:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prewarm(model, tmp_path, progress=interrupt)
    assert model.training
    again = prewarm(model, tmp_path, 1)
    assert again.num_contexts > 50
    assert again.seconds > 0


def test_a_second_run_at_once_is_refused_and_costs_the_first_nothing(tmp_path: Path) -> None:
    refused: list[BaseException] = []

    def interpose(made: Any) -> None:
        if not refused:
            with pytest.raises(BlockingIOError, match="another process prewarms this model") as it:
                prewarm(tiny_model("llama"), tmp_path, 1000)
            refused.append(it.value)

    made = prewarm(tiny_model("llama"), tmp_path, 1000, progress=interpose)
    assert made.num_contexts == len(contents(made.path)) > 50
    assert prewarm(tiny_model("llama"), tmp_path, 1).seconds > made.seconds


def test_batches_are_halved_where_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, most = tiny_model("llama"), 10
    forward = type(model).forward

    def limited(self: Any, input_ids: Any = None, **inputs: Any) -> Any:
        if len(input_ids) > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, input_ids=input_ids, **inputs)

    monkeypatch.setattr(type(model), "forward", limited)
    assert prewarm(model, tmp_path, 100).num_tokens >= 100
    most = 0
    with pytest.raises(torch.OutOfMemoryError):
        prewarm(model, tmp_path, 100)


# --- which model a table is of ------------------------------------------------------------------


def test_a_checkpoint_has_one_table_in_all_formats() -> None:
    model = tiny_model("llama", dtype=torch.float32).to(torch.bfloat16)
    paths = {prewarm(each, max_tokens=1).path for each in (model, model.float(), model.double())}
    assert len(paths) == 1
    others = [tiny_model("mistral"), tiny_model("mistral", sliding_window=16)]
    for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"):
        others.append(tiny_model("llama", dtype=torch.float32))
        others[-1].get_parameter(name).data *= 1.02
    assert len(paths | {prewarm(each, max_tokens=1).path for each in others}) == 6


def test_models_that_would_not_use_a_table_are_refused(tmp_path: Path) -> None:
    encoder_decoder = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True))
    with pytest.raises(lade.UnsupportedModelError, match="SimpleNamespace is an encoder-decoder"):
        prewarm(encoder_decoder, tmp_path)
    with pytest.raises(lade.UnsupportedModelError, match="has no weights in memory"):
        prewarm(tiny_model("llama").to("meta"), tmp_path)
    with pytest.raises(lade.UnsupportedModelError, match="would not use a table: it falls back"):
        prewarm(tiny_model("mamba", attention="eager", state_size=8), tmp_path)
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="expected seconds to be above 0, got"):
            lade.prewarm(tiny_model("llama"), seconds, folder=tmp_path)
    with pytest.raises(ValueError, match="expected max_tokens to be above 0, got 0"):
        prewarm(tiny_model("llama"), tmp_path, 0)
    assert [*tmp_path.iterdir()] == []


# --- files: none that is damaged raises in a call ------------------------------------------------

BAD_FILES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[:-9],
    "empty": lambda content: b"",
    "of an older version": lambda content: safetensors.numpy.save(
        {"keys": np.zeros(3)}, {"lade_table": '{"format": 2}'}
    ),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_ignored_with_one_warning_by_decoding_and_replaced_by_prewarm(
    kind: str,
) -> None:
    model = tiny_model("llama")
    path = prewarm(model, max_tokens=200).path  # in the user's folder
    bad = BAD_FILES[kind](path.read_bytes())
    path.write_bytes(bad)
    lade.release(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lade.generate(tiny_model("llama"), ONE, do_sample=False, max_new_tokens=2)
    said = [str(each.message) for each in caught]
    assert ["does not use its table for LlamaForCausalLM" in each for each in said] == [True]
    assert path.read_bytes() == bad
    with pytest.warns(UserWarning, match="begins anew, as its file cannot be used"):
        prewarm(model, max_tokens=200)
    assert contents(path)


def test_a_pool_that_is_no_table_is_not_added_to(tmp_path: Path) -> None:
    pool, model = lade.NGramPool(), tiny_model("llama")
    pool.observe([5, 6, 7])
    pool.save(path_of_table(model, tmp_path))
    with pytest.raises(ValueError, match="of lade prewarm, got a pool of 3 tokens"):
        prewarm(model, tmp_path)


def test_a_table_of_another_tool_is_refused_and_left_to_others(tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = prewarm(model, tmp_path, 100).path
    pool = lade.NGramPool.load(path)
    pool.note = "mine"
    pool.save(path)
    with pytest.raises(ValueError, match="got a file with the note 'mine'"):
        prewarm(model, tmp_path)
    path.unlink()
    assert prewarm(model, tmp_path, 100).path == path


def test_a_disk_that_is_full_is_an_error_and_leaves_the_old_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    path = prewarm(model, tmp_path, 100).path
    content = path.read_bytes()
    left = tmp_path / f"{path.stem}.making-{'0' * 16}"  # of a process that was killed
    left.write_bytes(b"half")
    os.utime(left, (0, 0))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            prewarm(model, tmp_path, 100)
    assert {*tmp_path.iterdir()} == {path, path.with_suffix(".lock")}
    assert path.read_bytes() == content
