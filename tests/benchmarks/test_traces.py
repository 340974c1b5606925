"""Traces: recorded, written, checked, replayed as they were decoded, and projected elsewhere."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.numpy import load_file, save_file

import lade
from benchmarks import record as recording
from benchmarks.points import as_json, points, table
from benchmarks.record import record, successors_of
from benchmarks.replay import DRAFTERS, Replay, replay, replay_trace
from benchmarks.traces import Trace, Traces, read_traces, write_traces
from lade.bench.prompts import Prompt
from lade.bench.report import LOOPS, OVERALL, write_json
from lade.bench.settings import BenchSettings
from lade.drafting.drafter import Drafter
from lade.drafting.drafts import chain
from lade.drafting.pool_drafter import PoolDrafter
from lade.drafting.successors import Successors
from lade.errors import UnsupportedModelError
from lade.models.loading import LoadedModel
from lade.stats import Step
from ngram_pool import Draft, NGramPool, SuccessorTable
from tests.grids import thinned
from tests.lade.bench.test_bench import LetterTokenizer
from tests.lade.tiny import EOS_TOKEN_ID, VOCAB_SIZE, ScriptedDrafter, tiny_model

PROMPTS = [
    Prompt(str(i), "ab"[i % 2], text) for i, text in enumerate(["abcabc", "xy", "zzzz", "hello h"])
]
NEW_TOKENS = 40


def loaded_model(eos_token_id: int = EOS_TOKEN_ID) -> LoadedModel:
    model = tiny_model("llama", seed=4)
    model.generation_config.eos_token_id = eos_token_id
    return LoadedModel(model, LetterTokenizer(), "folder/tiny")


def recorded_by(loaded: LoadedModel, settings: BenchSettings, num_successors: int = 8) -> Traces:
    traces: list[Trace] = []
    record(loaded, PROMPTS, settings, num_successors, traces=traces)
    described = {"max_new_tokens": settings.max_new_tokens, "vocab_size": VOCAB_SIZE}
    return Traces(traces, described, {"cpu": "some"})


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return loaded_model()


@pytest.fixture(scope="module")
def recorded(loaded: LoadedModel) -> Traces:
    return recorded_by(loaded, BenchSettings(NEW_TOKENS))


# --- recording ------------------------------------------------------------------------------


def test_traces_hold_the_answers_and_what_the_target_finds_likely(
    loaded: LoadedModel, recorded: Traces
) -> None:
    assert [trace.id for trace in recorded.traces] == ["0", "1", "2", "3"]
    for prompt, trace in zip(PROMPTS, recorded.traces, strict=True):
        ids = LetterTokenizer()(prompt.text, "pt")["input_ids"]
        expected = loaded.model.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS)[0]
        assert trace.token_ids == expected.tolist()
        assert trace.num_prompt_tokens == len(prompt.text)
        probs = loaded.model(expected[None]).logits[0].softmax(-1)
        top = probs.topk(8)
        assert trace.successors.token_ids.tolist() == top.indices.tolist()
        np.testing.assert_allclose(trace.successors.probs, top.values.detach(), rtol=1e-5)
        # Greedy: the likeliest after a token is the one that came.
        assert (
            trace.successors.token_ids[len(prompt.text) - 1 : -1, 0].tolist()
            == (trace.token_ids[len(prompt.text) :])
        )


def test_samples_are_recorded_with_a_seed_for_each_prompt(loaded: LoadedModel) -> None:
    settings = BenchSettings(12, temperature=0.9, seed=3)
    recorded = recorded_by(loaded, settings)
    for number, trace in enumerate(recorded.traces):
        torch.manual_seed(3 + number)
        prompt = torch.tensor([trace.token_ids[: trace.num_prompt_tokens]])
        expected = loaded.model.generate(prompt, **settings.options())[0]
        assert trace.token_ids == expected.tolist()


def test_successors_in_chunks_are_those_of_the_whole(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = torch.randint(2, 90, (50,)).tolist()
    whole = successors_of(loaded.model, token_ids, 3)
    assert whole.token_ids.shape == (50, 3)
    sizes = []
    handle = loaded.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    monkeypatch.setattr(recording, "_MAX_LOGITS", 16 * VOCAB_SIZE + 5)
    chunks = successors_of(loaded.model, token_ids, 3)
    handle.remove()
    assert sizes == [16, 16, 16, 2]
    assert chunks.token_ids.tolist() == whole.token_ids.tolist()
    np.testing.assert_allclose(chunks.probs, whole.probs, rtol=1e-5)
    assert successors_of(loaded.model, [3], 500).token_ids.shape == (1, VOCAB_SIZE)


def test_a_model_without_cache_is_recorded_whole_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model(
        "openai-gpt", attention="eager", n_embd=32, n_layer=1, n_head=4, n_positions=64
    )
    assert successors_of(model, [5, 6, 7], 2).probs.shape == (3, 2)
    monkeypatch.setattr(recording, "_MAX_LOGITS", 2 * VOCAB_SIZE)
    with pytest.raises(UnsupportedModelError, match="more than 2 tokens cannot be recorded; got 3"):
        successors_of(model, [5, 6, 7], 2)


# --- files ----------------------------------------------------------------------------------


def test_traces_survive_their_file(recorded: Traces, tmp_path: Path) -> None:
    path = tmp_path / "traces.safetensors"
    write_traces(path, recorded)
    assert [each.name for each in tmp_path.iterdir()] == ["traces.safetensors"]
    back = read_traces(path)
    assert back.settings == recorded.settings
    assert back.environment == {"cpu": "some"}
    assert (back.max_new_tokens, back.vocab_size, back.num_successors) == (40, VOCAB_SIZE, 8)
    for old, new in zip(recorded.traces, back.traces, strict=True):
        assert new[:5] == old[:5]
        assert new.successors.token_ids.tolist() == old.successors.token_ids.tolist()
        np.testing.assert_allclose(new.successors.probs, old.successors.probs, atol=1e-3)


def test_what_is_no_file_of_traces_is_refused(recorded: Traces, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(FileNotFoundError):
        read_traces(path)
    write_traces(path, recorded)
    arrays = load_file(path)
    for metadata in (None, {"lade_traces": "[1]"}, {"lade_traces": '{"version": 2}'}):
        save_file(arrays, path, metadata)
        with pytest.raises(ValueError, match=r"expected x\.safetensors to hold traces of record"):
            read_traces(path)
    path.write_text("hello")
    with pytest.raises(ValueError, match=r"expected x\.safetensors to hold traces of record"):
        read_traces(path)


# --- replay and live ------------------------------------------------------------------------


def live_steps(
    loaded: LoadedModel, trace: Trace, drafter: Drafter, max_draft_tokens: int
) -> list[Step]:
    steps: list[Step] = []
    output = lade.generate(
        loaded.model,
        torch.tensor([trace.token_ids[: trace.num_prompt_tokens]]),
        drafter=drafter,
        config=lade.Config(max_draft_tokens=max_draft_tokens, verification="tree"),
        on_step=steps.append,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
    )
    assert output[0].tolist() == trace.token_ids
    return steps[1:]  # without the prefill


def replayed_steps(
    recorded: Traces, trace: Trace, drafter: Drafter, max_draft_tokens: int
) -> list[Step]:
    steps: list[Step] = []
    stats = replay_trace(trace, drafter, max_draft_tokens, recorded, steps.append)
    assert stats.num_steps == stats.num_row_steps == len(steps)
    assert stats.num_tokens == trace.num_answer_tokens
    return steps


class Deaf(PoolDrafter):
    """A pool that is told nothing of the target, neither live nor in a replay."""

    num_successors = 0


@pytest.mark.parametrize("max_draft_tokens", thinned([1, 4, 16], 4))
@pytest.mark.parametrize("eos_token_id", [EOS_TOKEN_ID, -1])
def test_a_replay_takes_the_steps_of_live_decoding(
    max_draft_tokens: int, eos_token_id: int
) -> None:
    """Also where answers end in an EOS token, at which live drafts may reach beyond the end."""
    loaded = loaded_model()
    if eos_token_id == -1:
        # A token that comes in the middle of the answers, but not at once.
        answers = recorded_by(loaded, BenchSettings(NEW_TOKENS)).traces
        eos_token_id = answers[0].token_ids[answers[0].num_prompt_tokens + 25]
        loaded = loaded_model(eos_token_id)
    recorded = recorded_by(loaded, BenchSettings(NEW_TOKENS))
    live_pool, replay_pool = NGramPool(), NGramPool()  # each lives on from prompt to prompt
    num_accepted = num_corrected = 0
    for _ in range(2):
        for trace in recorded.traces:
            live = live_steps(loaded, trace, Deaf(live_pool), max_draft_tokens)
            assert live == replayed_steps(recorded, trace, Deaf(replay_pool), max_draft_tokens)
            num_accepted += sum(step.num_accepted for step in live)
            num_corrected += sum(step.is_corrected for step in live)
    assert num_accepted > 20
    assert num_corrected > 0


def test_a_replay_of_a_pool_that_harvests_comes_near_live_decoding(
    loaded: LoadedModel, recorded: Traces
) -> None:
    """It knows less: what the target found likely behind rejected nodes was not recorded."""
    live_pool, replay_pool = NGramPool(), NGramPool()
    num_steps = [0, 0]
    for _ in range(2):
        for trace in recorded.traces:
            num_steps[0] += len(live_steps(loaded, trace, PoolDrafter(live_pool), 8))
            num_steps[1] += len(replayed_steps(recorded, trace, PoolDrafter(replay_pool), 8))
    assert num_steps[1] == pytest.approx(num_steps[0], rel=0.15)


@pytest.mark.parametrize("accept", thinned([0.0, 0.5, 0.9, 1.0], 0.5))
def test_a_replay_takes_the_steps_of_live_decoding_with_drafts_of_any_shape(
    loaded: LoadedModel, recorded: Traces, accept: float
) -> None:
    for seed, trace in enumerate(recorded.traces):
        live, replayed = (
            ScriptedDrafter(trace.token_ids, np.random.default_rng(seed), accept) for _ in range(2)
        )
        expected = live_steps(loaded, trace, live, 12)
        assert replayed_steps(recorded, trace, replayed, 12) == expected
        assert replayed.closed == 1
        assert replayed.observed == live.observed == trace.token_ids


class Harvester(lade.Drafter):
    """Drafts some tokens rightly and one more wrongly, and keeps what it is told."""

    num_successors = 3

    def __init__(self, answer: Sequence[int], num_right: int) -> None:
        self.answer = answer
        self.num_right = num_right
        self.told: list[tuple[list[int], int, int, list[int], list[float]]] = []

    def open(self, prompt_ids: Sequence[int]) -> int:
        return 0

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        right = self.answer[len(committed) : len(committed) + self.num_right]
        return chain([*right, 0][:max_draft_tokens])

    def harvest(
        self,
        sequence: int,
        committed: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        successors: Successors,
    ) -> None:
        assert committed[-1] == token_ids[0]
        assert len(token_ids) == len(parents) == len(successors.token_ids)
        for node, (token_id, parent) in enumerate(zip(token_ids, parents, strict=True)):
            place = (len(committed), parent, token_id)
            found = successors.token_ids[node].tolist(), successors.probs[node].tolist()
            self.told.append(([len(committed), node], *place[1:], *found))

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None: ...

    def close(self, sequence: int) -> None: ...


def test_a_replay_harvests_what_live_decoding_harvests_of_accepted_nodes(
    loaded: LoadedModel, recorded: Traces
) -> None:
    trace = recorded.traces[0]
    live, replayed = (Harvester(trace.token_ids, num_right=2) for _ in range(2))
    live_steps(loaded, trace, live, 8)
    replayed_steps(recorded, trace, replayed, 8)
    rejected = [each for each in live.told if each[2] == 0]
    accepted = [each for each in live.told if each[2] != 0]
    assert len(rejected) > 5
    assert len(accepted) == len(replayed.told) > 30
    for of_live, of_replay in zip(accepted, replayed.told, strict=True):
        assert of_replay[:4] == of_live[:4]
        assert of_replay[4] == pytest.approx(of_live[4], rel=1e-5)


def test_a_step_is_corrected_where_the_target_takes_none_of_the_drafted_tokens(
    loaded: LoadedModel, recorded: Traces
) -> None:
    trace = recorded.traces[0]
    wrong = live_steps(loaded, trace, Harvester(trace.token_ids, num_right=2), 8)
    assert [step.num_accepted for step in wrong[:-1]] == [2] * (len(wrong) - 1)
    assert all(step.is_corrected for step in wrong[:-1])  # the last one ends with the text
    # With two nodes only the right ones are left, and the bonus token takes nobody's place.
    right = live_steps(loaded, trace, Harvester(trace.token_ids, num_right=2), 2)
    assert [step.num_accepted for step in right[:-1]] == [2] * (len(right) - 1)
    assert not any(step.is_corrected for step in right)
    assert not any(step.is_corrected for step in live_steps(loaded, trace, Harvester([], 0), 0))


def test_methods_are_replayed_with_every_node_count_and_pass(
    recorded: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays: list[Replay] = []
    done: list[Replay] = []
    names = ["lade", "lade_fresh"]
    replay(recorded, names, [4, 16], num_passes=2, replays=replays, on_replay=done.append)
    assert len(replays) == len(done) == 2 * 2 * 2 * 4
    mat = {
        (p.method, p.max_draft_tokens, p.num_pass): p.mean_accepted_tokens
        for p in points([each._replace(trace=each.trace._replace(loops=False)) for each in replays])
        if p.group == OVERALL
    }
    for count in (4, 16):
        assert mat["lade", count, 1] > 2 > mat["lade", count, 0]  # it knows the answers now
        assert mat["lade_fresh", count, 1] == mat["lade_fresh", count, 0]  # and this one does not
    monkeypatch.setattr(Harvester, "num_successors", 9)
    harvester = Harvester(recorded.traces[0].token_ids, 1)
    monkeypatch.setitem(DRAFTERS, "harvester", lambda prewarmed: harvester)
    with pytest.raises(ValueError, match="expected traces with 9 successors or more for harvester"):
        replay(recorded, ["harvester"], [4], replays=[])


# --- the report of a replay -----------------------------------------------------------------


def a_replay(
    recorded: Traces, method: str, max_draft_tokens: int, num_pass: int, loops: bool
) -> Replay:
    trace = recorded.traces[0]._replace(loops=loops)
    accept = 1.0 if loops else 0.7
    drafter = ScriptedDrafter(trace.token_ids, np.random.default_rng(max_draft_tokens), accept)
    stats = replay_trace(trace, drafter, max_draft_tokens, recorded)
    return Replay(trace, method, max_draft_tokens, num_pass, stats)


def test_points_add_up_replays_and_keep_loops_apart(recorded: Traces, tmp_path: Path) -> None:
    counts = [(name, count) for name in ("one", "two") for count in (8, 2)]
    replays = [
        a_replay(recorded, *pair, 0, loops) for pair in counts for loops in (False, False, True)
    ]
    made = points(replays)
    assert [point.group for point in made] == ["a"] * 4 + [OVERALL] * 4 + [LOOPS] * 4
    overall, loops = made[4], made[8]
    assert overall[1:5] == ("one", 8, 0, 2)
    assert loops[1:5] == ("one", 8, 0, 1)
    assert overall.num_tokens == 2 * loops.num_tokens == 2 * NEW_TOKENS
    first = replays[0].stats
    assert overall.mean_accepted_tokens == first.mean_accepted_tokens
    assert overall.draft_tokens_per_step == first.draft_tokens_per_step
    assert overall.acceptance_rate == first.acceptance_rate
    assert 0 < overall.correction_rate == first.correction_rate < 1
    assert overall.draft_sec_per_step > 0
    console = Console(width=150)
    with console.capture() as capture:
        console.print(table(made))
    shown = capture.get()
    assert shown.count("one") == 4  # two node counts, and of loops
    assert f"{overall.mean_accepted_tokens:.2f}" in shown
    path = tmp_path / "replay.json"
    write_json(path, as_json(made, {"passes": 1}))
    kept = json.loads(path.read_text())["runs"][4]
    assert kept["mean_accepted_tokens"] == pytest.approx(overall.mean_accepted_tokens, abs=1e-5)
    again = points([each._replace(num_pass=i) for each in replays for i in (0, 1)])
    assert "one, pass 2" in table(again).as_markdown()


def test_a_table_of_the_target_is_for_those_methods_that_use_one(recorded: Traces) -> None:
    prewarmed = SuccessorTable(1000)
    for trace in recorded.traces:  # it knows what follows every pair
        pairs = np.array([trace.token_ids[:-2], trace.token_ids[1:-1]]).T
        following = np.array(trace.token_ids[2:])[:, None]
        prewarmed.put(pairs, following, np.full(following.shape, 0.9))
    replays: list[Replay] = []
    replay(recorded, ["lade", "lade_untabled"], [8], prewarmed=prewarmed, replays=replays)
    mat = {p.method: p.mean_accepted_tokens for p in points(replays) if p.group == OVERALL}
    assert mat["lade"] > 1.2 * mat["lade_untabled"]
