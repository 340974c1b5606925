"""Tables of a model's own successors: what they hold, how they go on, what is left untouched."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lade.prewarming.prompter import Prompter, prompting
from typer.testing import CliRunner

import lade
from lade.cli.app import app
from lade.drafting.successors import Successors
from lade.errors import UnsupportedModelError
from lade.prewarming import run as prewarming
from lade.prewarming import tables
from lade.prewarming.fingerprint import fingerprint_of
from lade.prewarming.run import PrewarmProgress, Run
from lade.prewarming.tables import (
    Effort,
    StoredTable,
    read_table,
    table_for,
    tables_folder,
)
from ngram_pool import SuccessorTable
from tests.lade.tiny import VOCAB_SIZE, byte_tokenizer, tiny_model


class Ticks:
    """A clock that goes on by one second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def run_on(
    model: Any, stored: StoredTable, seconds: float, **options: Any
) -> tuple[Run, list[PrewarmProgress]]:
    """Work for so many readings of a clock, in batches of four rows."""
    told: list[PrewarmProgress] = []
    with prompting(model, stored.table.num_successors) as prompter:
        prompter.num_rows, prompter._num_slow = 4, 3
        run = Run(
            prompter,
            stored,
            Path("nowhere"),
            seconds,
            **{"save": in_memory(stored)} | options,
            progress=told.append,
            clock=Ticks(),
        )
        run._rng = np.random.default_rng(0)
        run.work()
    return run, told


def in_memory(stored: StoredTable) -> Callable[[StoredTable], StoredTable]:
    """Save to no file; what is stored has everything already but the effort."""

    def save(added: StoredTable) -> StoredTable:
        stored.effort.add(added.effort)
        return stored

    return save


def new() -> StoredTable:
    return StoredTable(SuccessorTable(2**12), Effort())


@torch.no_grad()
def likeliest(model: Any, *token_ids: int) -> tuple[list[int], list[float]]:
    """Return what follows a text, by a forward of it alone."""
    top = model(torch.tensor([token_ids])).logits[0, -1].softmax(-1).topk(8)
    return top.indices.tolist(), top.values.tolist()


@pytest.mark.parametrize("is_direct", [None, False])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "mamba", "rwkv", "openai-gpt"])
def test_successors_of_lone_tokens_are_those_of_a_forward_behind_the_prefix(
    family: str, is_direct: bool | None
) -> None:
    """By the model's forward where that tells the same, and by `generate`."""
    model = tiny_model(family, attention="eager")
    token_ids = np.arange(2, 13)
    with prompting(model, 8) as prompter:
        prompter.num_rows, prompter._is_direct = 4, is_direct
        ids, probs = prompter.successors_of(7, token_ids)
    for token_id, row_ids, row_probs in zip(token_ids.tolist(), ids, probs, strict=True):
        expected_ids, expected_probs = likeliest(model, 7, token_id)
        assert row_ids.tolist() == expected_ids
        np.testing.assert_allclose(row_probs, expected_probs, rtol=0.03)  # estimated


@pytest.mark.parametrize("is_direct", [None, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "bloom", "mamba"])
def test_texts_tell_the_successors_at_every_place(family: str, is_direct: bool | None) -> None:
    model = tiny_model(family, attention="eager")
    columns: list[Any] = []
    told: list[Any] = []

    def go_on(tokens: Any, successors: Any) -> Any:
        columns.append(tokens[:, -1])
        told.append(successors)
        return successors.token_ids[[0, 1, 2], [0, 1, 2]].astype(np.int64)

    with prompting(model, 8) as prompter:
        prompter._is_direct = is_direct
        assert prompter.write(np.full(3, 1), 12, go_on)
    texts = np.stack(columns, axis=1)
    assert texts.shape == (3, 12)
    assert texts[:, 0].tolist() == [1, 1, 1]
    for place in range(12):
        ids, probs = told[place]
        if place < 11:
            assert texts[:, place + 1].tolist() == ids[[0, 1, 2], [0, 1, 2]].tolist()
        for row in range(3):
            expected_ids, expected_probs = likeliest(model, *texts[row, : place + 1].tolist())
            assert ids[row].tolist() == expected_ids
            np.testing.assert_allclose(probs[row], expected_probs, rtol=0.03)


@pytest.mark.parametrize(
    ("family", "can_step"), [("llama", True), ("bloom", True), ("openai-gpt", False)]
)
def test_the_model_itself_is_called_where_that_tells_the_same(family: str, can_step: bool) -> None:
    with prompting(tiny_model(family, attention="eager"), 8) as prompter:
        assert prompter._can_step() == can_step


@pytest.mark.parametrize("is_direct", [None, False])
def test_texts_behind_a_prefix_show_all_but_the_prefix(is_direct: bool | None) -> None:
    model = tiny_model("llama")
    columns: list[Any] = []
    told: list[Any] = []

    def go_on(tokens: Any, successors: Any) -> Any:
        columns.append(tokens.tolist())
        told.append(successors)
        return np.array([20, 21])

    with prompting(model, 8) as prompter:
        prompter._is_direct = is_direct
        assert prompter.write(np.array([5, 6]), 3, go_on, prefix_token_id=7)
    assert columns == [[[5], [6]], [[5, 20], [6, 21]], [[20, 20], [21, 21]]]
    for place, text in enumerate([(7, 6), (7, 6, 21), (7, 6, 21, 21)]):
        assert told[place].token_ids[1].tolist() == likeliest(model, *text)[0]


@pytest.mark.parametrize("fault", ["forgets", "raises"])
def test_where_forwards_alone_tell_other_things_generate_is_asked(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A model whose forward is right only with the arguments that `generate` prepares."""
    model = tiny_model("llama")
    forward = type(model).forward

    def forward_of_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("attention_mask") is None:
            if fault == "raises":
                raise ValueError("expected an attention mask")
            kwargs["position_ids"] = torch.zeros_like(kwargs["input_ids"])
        return forward(self, *args, **kwargs)

    with prompting(model, 8) as prompter:
        expected = prompter.successors_of(7, np.arange(40))
        assert prompter._can_step()
    monkeypatch.setattr(type(model), "forward", forward_of_generate)
    with prompting(model, 8) as prompter:
        found = prompter.successors_of(7, np.arange(40))
        assert not prompter._can_step()
    assert (found.token_ids == expected.token_ids).all()


def test_batches_grow_while_larger_ones_are_faster() -> None:
    with prompting(tiny_model("llama"), 8) as prompter:
        for num_rows, seconds, expected in [
            (64, 1.0, 128),
            (128, 9.0, 128),  # slow by chance
            (128, 1.5, 256),
            (100, 0.1, 256),  # a part of a batch tells nothing
            (256, 2.9, 256),
            (256, 2.8, 256),
            (256, 2.9, 256),  # the third that is hardly faster
            (256, 0.1, 256),
        ]:
            prompter._see_speed(num_rows, seconds)
            assert prompter.num_rows == expected
        prompter.num_rows, prompter._speed, prompter._num_slow = 1024, 0.0, 0
        prompter._see_speed(1024, 0.1)
        assert prompter.num_rows == 1024


def test_next_tokens_are_drawn_by_probability() -> None:
    """A chi-square beyond 30 at 7 degrees has a chance of 1e-4."""
    run, _ = run_on(tiny_model("llama"), new(), 1)
    probs = np.array([0.4, 0.2, 0.1, 0.1, 0.05, 0.05, 0.02, 0.01], np.float32)
    token_ids = np.tile(np.arange(20, 28, dtype=np.int32), (4000, 1))
    drawn = run._drawn(Successors(token_ids, np.tile(probs, (4000, 1))))
    counts = np.bincount(drawn, minlength=28)[20:]
    due = 4000 * probs / probs.sum()
    assert ((counts - due) ** 2 / due).sum() < 30


def test_a_run_asks_for_every_token_first_and_then_writes_texts() -> None:
    model = tiny_model("llama")
    stored = new()
    run, told = run_on(model, stored, 700)
    made = run.made()
    assert [*dict.fromkeys(step.stage for step in told)] == [
        *("first words", "lone tokens", "own texts"),
    ]
    assert made.vocab_size == VOCAB_SIZE
    assert made.num_lone_tokens >= VOCAB_SIZE - 3  # a bucket may be full
    prefix = stored.effort.prefix_token_id
    assert prefix is not None
    assert made.num_contexts > VOCAB_SIZE  # pairs, too
    missing = [each for each in range(VOCAB_SIZE) if stored.table.get(-1, each) is None]
    assert len(missing) <= 3
    assert told[-1].made == made
    assert made.num_tokens == run.num_new_tokens > 0


def test_a_table_holds_the_successors_of_pairs_met_many_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Texts of a prefix and two more tokens: every meeting of such a pair tells the same.
    monkeypatch.setattr(prewarming, "_PREFIX_TEXT_LENGTH", 2)
    monkeypatch.setattr(prewarming, "_TEXT_LENGTH", 2)
    model, stored = tiny_model("llama"), new()
    run, _ = run_on(model, stored, 1200)
    prefix, start = run._prefix_token_id, 1  # BOS of tiny models
    assert prefix is not None
    pairs = [pair for pair in stored.table.contexts().tolist() if pair[0] not in (-1, start)]
    assert len(pairs) > 100
    for previous, last in pairs:
        row_ids, row_probs = stored.table.get(previous, last) or ((), ())
        expected_ids, expected_probs = likeliest(model, prefix, previous, last)
        assert [*row_ids] == expected_ids
        np.testing.assert_allclose(row_probs, expected_probs, rtol=2e-3)


def test_lone_tokens_take_a_third_of_a_run_at_most() -> None:
    model = tiny_model("llama", vocab_size=4000)
    _, told = run_on(model, new(), 400)
    ends = {step.stage: step.passed_sec for step in told}
    starts = {step.stage: step.passed_sec for step in reversed(told)}
    assert 0 < told[-1].made.num_lone_tokens < 4000
    asked_sec = ends["lone tokens"] - ends["first words"]
    assert asked_sec <= (400 - starts["first words"]) / 3 + 8
    assert ends["own texts"] >= 395


def test_another_run_goes_on_where_the_last_one_ended() -> None:
    model = tiny_model("llama", vocab_size=1000)
    stored = new()
    first = run_on(model, stored, 300)[0].made()
    before = Effort(**{name: getattr(stored.effort, name) for name in Effort.__slots__})
    second_run, told = run_on(model, stored, 300)
    second = second_run.made()
    assert "first words" not in {step.stage for step in told}
    assert stored.effort.prefix_token_id == before.prefix_token_id
    assert second.num_lone_tokens > first.num_lone_tokens > 0
    assert second.num_contexts > first.num_contexts
    assert second.num_tokens == first.num_tokens + second_run.num_new_tokens
    assert second.seconds > first.seconds


def test_tokens_named_most_often_are_asked_for_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model, stored = tiny_model("llama", vocab_size=1000), new()
    asked: list[tuple[Any, float]] = []
    successors_of = Prompter.successors_of

    def noted(self: Prompter, prefix: int, token_ids: Any) -> Successors:
        if run._stage == "lone tokens":
            asked.append((run._mentions[token_ids].copy(), run._mentions[~run._is_known].max()))
        return successors_of(self, prefix, token_ids)

    monkeypatch.setattr(Prompter, "successors_of", noted)
    with prompting(model, 8) as prompter:
        prompter.num_rows, prompter._num_slow = 4, 3
        run = Run(prompter, stored, Path("x"), 300, save=in_memory(stored), clock=Ticks())
        run.work()
    assert len(asked) > 5
    for mentions, most in asked:
        assert mentions[0] == most
        assert (np.diff(mentions) <= 0).all()


def test_a_run_saves_every_thirty_seconds() -> None:
    saved: list[StoredTable] = []
    stored = new()

    def save(added: StoredTable) -> StoredTable:
        saved.append(added)
        return in_memory(stored)(added)

    run, _ = run_on(tiny_model("llama"), stored, 400, save=save)
    run.save()
    assert 6 <= len(saved) <= 400 // 30 + 1
    assert sum(added.effort.num_tokens for added in saved) == run.num_new_tokens
    merged = SuccessorTable(2**12)
    for added in saved:  # each only what is new since the last one
        merged.update(added.table)
    held = {*map(tuple, merged.contexts().tolist())}
    assert held <= {*map(tuple, stored.table.contexts().tolist())}
    assert len(held) > 0.99 * len(stored.table)  # a bucket may be full
    assert sum(len(added.table) for added in saved) < 3 * len(merged)


@pytest.mark.exhaustive
def test_a_table_never_holds_more_than_it_may(tmp_path: Path) -> None:
    stored = StoredTable(SuccessorTable(64), Effort())
    run_on(tiny_model("llama"), stored, 1500)
    assert len(stored.table) <= 64
    assert stored.table.nbytes < 64 * 80


def test_prewarm_writes_a_table_that_is_found_for_the_model(tmp_path: Path) -> None:
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    made = lade.prewarm(model, 0.5, folder=tmp_path / "tables")
    assert made.path.parent == tmp_path / "tables"
    lock = made.path.with_suffix(".lock")
    assert {*made.path.parent.iterdir()} == {made.path, lock}  # nothing half-made
    table = table_for(model, tmp_path / "tables")
    assert table is not None
    assert len(table) == made.num_contexts > 0
    assert table_for(other, tmp_path / "tables") is None
    again = lade.prewarm(model, 0.2, folder=tmp_path / "tables")
    assert again.num_tokens > made.num_tokens
    assert again.seconds == pytest.approx(made.seconds + 0.2, abs=0.15)


def test_an_interruption_keeps_what_was_done(tmp_path: Path) -> None:
    model = tiny_model("llama").train()

    def interrupt(step: PrewarmProgress) -> None:
        if step.made.num_tokens > 700:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lade.prewarm(model, 60, folder=tmp_path, progress=interrupt)
    (path,) = tmp_path.glob("*.safetensors")
    stored = read_table(path, model)
    assert stored.effort.num_tokens > 700
    assert len(stored.table) > 0
    assert model.training


def test_model_and_random_state_are_left_as_they_were(tmp_path: Path) -> None:
    model = tiny_model("opt", dropout=0.5, attention_dropout=0.5).train()
    model.model.decoder.layers[0].eval()
    model.generation_config.do_sample = True
    lade.wrap(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    modes = {name: module.training for name, module in model.named_modules()}
    attributes = {*vars(model)}
    generation_config = model.generation_config.to_dict()
    torch.manual_seed(4)
    before = torch.get_rng_state()
    lade.prewarm(model, 0.3, folder=tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert {*vars(model)} == attributes
    assert model.generation_config.to_dict() == generation_config
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_memory_running_out_halves_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    forward = type(model).forward

    def small(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if len(input_ids) > 8:
            raise torch.OutOfMemoryError("no memory for so many rows")
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", small)
    with prompting(model, 8) as prompter:
        prompter.num_rows = 32
        ids, _ = prompter.successors_of(7, np.arange(40))
        assert ids.shape == (40, 8)
        assert prompter.num_rows == 8
        prompter.num_rows = 32
        stored = new()
        run = Run(prompter, stored, Path("x"), 1500, save=in_memory(stored), clock=Ticks())
        run.work()
        assert prompter.num_rows == 8
    assert run.made().num_lone_tokens >= VOCAB_SIZE - 3  # a bucket may be full
    monkeypatch.setattr(type(model), "forward", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError), prompting(model, 8) as prompter:
        prompter.successors_of(7, np.arange(40))


def out_of_memory(*args: Any, **kwargs: Any) -> Any:
    raise torch.OutOfMemoryError("no memory at all")


# --- fingerprints ---------------------------------------------------------------------------


def test_a_checkpoint_has_one_fingerprint_in_all_formats() -> None:
    model = tiny_model("llama", dtype=torch.float32).to(torch.bfloat16)
    expected = fingerprint_of(model)
    assert expected is not None
    assert len(expected) == 64
    assert fingerprint_of(model.float()) == expected
    assert fingerprint_of(model.double()) == expected
    model.set_attn_implementation("eager")
    model.config.name_or_path = "elsewhere"
    assert fingerprint_of(model.train()) == expected


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]
)
def test_other_weights_have_another_fingerprint(name: str) -> None:
    model = tiny_model("llama")
    before = fingerprint_of(model)
    with torch.no_grad():
        weight = model.get_parameter(name)
        weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    assert fingerprint_of(model) != before


def test_another_shape_of_the_text_has_another_fingerprint() -> None:
    assert fingerprint_of(tiny_model("mistral")) != fingerprint_of(
        tiny_model("mistral", sliding_window=16)
    )


def test_weights_out_of_memory_are_left_out_of_a_fingerprint() -> None:
    model = tiny_model("llama")
    model.model.embed_tokens.to("meta")
    assert fingerprint_of(model) is not None
    model.to("meta")
    assert fingerprint_of(model) is None
    with pytest.raises(UnsupportedModelError, match="has no weights in memory"):
        lade.prewarm(model, 1)


def test_quantized_weights_have_a_fingerprint() -> None:
    model = tiny_model("llama")
    before = fingerprint_of(model)
    weights = torch.arange(64, dtype=torch.uint8).reshape(8, 8)
    model.lm_head.register_buffer("qweight", weights)
    first = fingerprint_of(model)
    model.lm_head.qweight = weights + 1
    assert len({before, first, fingerprint_of(model)}) == 3


# --- files ----------------------------------------------------------------------------------


def test_a_table_comes_back_from_its_file(written: SimpleNamespace) -> None:
    stored = read_table(written.path, written.model, 128)
    assert stored.effort == written.effort
    assert stored.table.capacity == 128
    token_ids, probs = stored.table.get(4, 5) or ((), ())
    assert [*token_ids] == [8, 9]
    np.testing.assert_allclose(probs, [0.75, 0.125], rtol=1e-3)


def test_where_there_are_no_tables_nothing_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "fingerprint_of", out_of_memory)
    assert table_for(tiny_model("llama"), tmp_path / "missing") is None


def test_tables_are_in_the_cache_of_the_user() -> None:
    assert tables_folder().name == "tables"
    assert tables_folder().parent.name.lower() == "lade"


# --- errors and the command line ------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_the_time_has_to_be_above_zero(seconds: float) -> None:
    with pytest.raises(ValueError, match="expected seconds to be above 0, got"):
        lade.prewarm(tiny_model("llama"), seconds)


def test_a_run_ends_after_so_many_tokens(tmp_path: Path) -> None:
    made = lade.prewarm(tiny_model("llama"), 60, max_tokens=500, folder=tmp_path)
    assert 500 <= made.num_tokens < 700  # a batch in progress is finished
    assert made.seconds < 30
    with pytest.raises(ValueError, match="expected max_tokens to be above 0, got 0"):
        lade.prewarm(tiny_model("llama"), 60, max_tokens=0)


def test_an_encoder_decoder_is_refused_by_name() -> None:
    config = SimpleNamespace(is_encoder_decoder=True)
    with pytest.raises(UnsupportedModelError, match="SimpleNamespace is an encoder-decoder"):
        lade.prewarm(SimpleNamespace(config=config), 1)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line, on a saved tiny model; its tables are in the folder `tables`."""
    model = tiny_model("llama", dtype=torch.float32, vocab_size=256)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(tables, "tables_folder", lambda: tmp_path / "tables")
    return ["prewarm", "--model", str(tmp_path / "model"), "--dtype", "float32", "--seconds", "1"]


def test_the_command_says_what_there_is(command: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    assert "of 256 single tokens) from " in done.stdout
    (path,) = (tmp_path / "tables").glob("*.safetensors")
    assert path.name in done.stderr.replace("\n", "")
    assert "run this again to add to it" in done.stderr


def test_the_command_says_what_is_kept_when_interrupted(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Run.work

    def interrupted(self: Run) -> None:
        work(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "work", interrupted)
    done = CliRunner().invoke(app, command)
    assert done.exit_code != 0
    assert "of 256 single tokens) from " in done.stdout
