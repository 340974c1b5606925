"""`PoolProposer`, in what a vLLM worker does with it."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lade.engines.vllm import PoolProposer
from ngram_pool import NGramPool, PoolFileError
from tests.lade.engines.fake_engine import FakeEngine, Request, config, cycling


def engine_of(**options: Any) -> FakeEngine:
    vllm_config = config(**options)
    return FakeEngine(PoolProposer(vllm_config), vllm_config)


def prompts(num: int, length: int = 30) -> list[list[int]]:
    rng = np.random.default_rng(num)
    return [rng.integers(0, 900, length).tolist() for _ in range(num)]


@pytest.mark.parametrize("sharing", ["none", "all"])
def test_drafts_follow_each_request_wherever_its_row_moves(sharing: str) -> None:
    engine = engine_of(sharing=sharing, max_rows=12)
    requests = [Request(prompt, 20 + 7 * i, cycling(5 + i)) for i, prompt in enumerate(prompts(12))]
    waiting = list(requests)
    rng = np.random.default_rng(0)
    preempted: list[Request] = []
    while waiting or preempted or any(len(r.text) < r.length for r in engine.rows):
        if waiting and rng.random() < 0.5:
            engine.add(waiting.pop(), int(rng.integers(1, 4)))
        elif preempted and rng.random() < 0.3:
            engine.add(preempted.pop(0), 2)
        elif len(engine.rows) > 1 and rng.random() < 0.3:
            preempted.append(engine.take_out(engine.rows[int(rng.integers(len(engine.rows)))]))
        elif len(engine.rows) > 1:
            engine.swap(0, len(engine.rows) - 1)
        engine.step()
        assert engine.num_steps < 500
    for i, request in enumerate(requests):
        plain = list(request.text[: request.num_prompt])
        while len(plain) < request.length:
            plain.append(cycling(5 + i)(plain))
        assert request.text == plain
    stats = engine.proposer.stats()
    assert (stats["failures"], stats["requests"]) == (0, len(requests))
    # Every token once, but for those of the last step of a request, which was not drafted for.
    observed = sum(len(request.text) for request in requests)
    assert stats["observed_tokens"] <= observed <= stats["observed_tokens"] + 5 * len(requests)
    assert engine.num_accepted > 0.5 * sum(len(request.answer) for request in requests)
    assert stats["draft_tokens"] >= engine.num_drafted >= engine.num_accepted


def test_a_pool_of_all_requests_knows_what_others_said() -> None:
    answers: dict[str, int] = {}
    answer = prompts(1, 40)[0]
    for sharing in ("none", "all"):
        engine = engine_of(sharing=sharing)
        for prompt in ([1, 2], [3, 4], [5, 6]):
            engine.add(Request(prompt, 40, lambda text: answer[(len(text) - 2) % 40]))
            engine.run()
        answers[sharing] = engine.num_accepted
    assert answers["none"] == 0
    assert answers["all"] > 50


def test_what_one_request_said_is_never_drafted_for_another() -> None:
    secret = list(range(500, 540))
    engine = engine_of(sharing="none", min_probability=0.0)
    engine.add(Request([7, 7, 7, *secret], 180, lambda text: secret[len(text) % 40]))
    other = engine.add(Request([7, 7, 7, *secret[:3]], 180, lambda text: secret[0]))
    for _ in range(20):
        engine.step()
    engine.take_out(engine.rows[0])
    engine.add(Request([7, 7, 7, *secret[:5]], 9, lambda text: 3))
    engine.run()
    own = {7, 3, *secret[:5]}
    assert all(set(ids) <= own for drafts in engine.drafts[-5:] for ids in drafts)
    assert set(other.text) <= own


def test_a_next_turn_goes_on_where_the_conversation_stopped() -> None:
    engine = engine_of(sharing="none")
    request = engine.add(Request(prompts(1)[0], 30, cycling(6)))
    engine.run()
    observed = engine.proposer.stats()["observed_tokens"]
    engine.add(Request([*request.text, 1, 2, 3], 10, cycling(6)))
    engine.run()
    stats = engine.proposer.stats()
    assert stats["requests"] == 1
    assert stats["observed_tokens"] - observed <= 3 + 10 + 5


def test_long_prompts_are_observed_over_several_steps_and_in_order() -> None:
    engine = engine_of(sharing="all", max_step_tokens=32)
    prompt = prompts(1, 150)[0]
    engine.add(Request(prompt, 60, cycling(9)))
    observed = []
    for _ in range(6):
        engine.step()
        observed.append(engine.proposer.stats()["observed_tokens"])
    assert observed[:4] == [32, 64, 96, 128]
    engine.run()
    (text,) = engine.proposer._pool.texts()
    assert text.tolist()[:150] == prompt


def test_more_requests_get_shorter_drafts() -> None:
    engine = engine_of(sharing="all", max_step_tokens=8, max_rows=8, min_probability=0.0)
    for prompt in prompts(4, 12):
        engine.add(Request(prompt * 3, 30, cycling(12)))
    engine.run()
    longest = {len(drafts): max(map(len, drafts)) for drafts in engine.drafts[2:]}
    assert longest[4] == 2
    assert longest[1] == 4


def test_drafts_stay_below_the_models_length() -> None:
    engine = engine_of(max_model_len=64, min_probability=0.0)
    engine.add(Request([1, 2, 3] * 10, 34, cycling(3)))
    engine.run()  # which asserts it
    assert engine.num_accepted > 15


def test_memory_stays_within_bounds_however_many_requests_come() -> None:
    engine = engine_of(sharing="none", max_rows=4)
    for i in range(40):
        engine.add(Request([i, i + 1, i + 2], 5, cycling(2)))
        engine.run()
    proposer = engine.proposer
    assert proposer._is_text.sum() == 8
    assert len({id(pool) for pool in proposer._pools}) == 8 + 1
    shared = engine_of(sharing="all", max_rows=4, capacity_tokens=100)
    for i in range(40):
        shared.add(Request([i, i + 1, i + 2], 5, cycling(2)))
        shared.run()
    assert len(shared.proposer._pool) == 100
    assert shared.proposer._pool.num_open_sequences == 8


def test_nothing_that_fails_reaches_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(sharing="all")
    engine.add(Request([1, 2, 3] * 4, 200, cycling(3)))
    engine.step()
    failing = True
    draft_chains = NGramPool.draft_chains

    def broken(*args: Any, **kwargs: Any) -> Any:
        if failing:
            raise RuntimeError("broken on purpose")
        return draft_chains(*args, **kwargs)

    monkeypatch.setattr(NGramPool, "draft_chains", broken)
    with caplog.at_level(logging.WARNING):
        assert [engine.step() for _ in range(2)] == [[[]], [[]]]
    assert engine.proposer.stats()["failures"] == 2
    assert len(caplog.records) == 1  # not one for each step
    failing = False
    assert engine.step() != [[]]
    failing = True
    with caplog.at_level(logging.WARNING):
        assert [engine.step() for _ in range(3)] == [[[]]] * 3
    stats = engine.proposer.stats()
    assert (stats["is_off"], stats["failures"]) == (True, 5)
    assert "stops drafting" in caplog.text
    failing = False
    assert engine.step() == [[]]
    engine.run()
    assert engine.proposer.stats()["failures"] == stats["failures"]


@pytest.mark.parametrize(
    "arguments",
    [
        ([[1]], np.array([3]), np.zeros((1, 8), np.int64)),
        ([[1]], np.array([9], np.int32), np.zeros((1, 8), np.int32)),
        ([[1]], np.array([-2], np.int32), np.zeros((1, 8), np.int32)),
        ([[1]] * 9, np.full(9, 3, np.int32), np.zeros((9, 8), np.int32)),
        ([[1], [1]], np.array([3], np.int32), np.zeros((1, 8), np.int32)),
        ([[1, 2, 3, 4]], np.array([3], np.int32), np.zeros((1, 8), np.int32)),
        ([None], np.array([3], np.int32), np.zeros((1, 8), np.int32)),
    ],
)
def test_arguments_of_another_kind_are_drafted_nothing_for(arguments: Any) -> None:
    proposer = PoolProposer(config())
    drafts = proposer.propose(*arguments)
    assert drafts == [[] for _ in arguments[0]]
    assert proposer.stats()["failures"] == (arguments[0] != [[1, 2, 3, 4]])


def test_no_rows_and_placeholders_are_passed_over() -> None:
    proposer = PoolProposer(config(min_probability=0.0))
    ids = np.array([[5, 6, 5, 6, 5], [5, -1, 5, 6, 5]], np.int32)
    lengths = np.array([5, 5], np.int32)
    assert proposer.propose([], lengths, ids) == []
    first = proposer.propose([[5], [5]], lengths, ids)
    assert (first[0][:2], first[1]) == ([6, 5], [])
    assert proposer.stats()["failures"] == 0


def test_a_pool_from_a_file_drafts_from_the_start(tmp_path: Path) -> None:
    pool = NGramPool()
    pool.observe([10, 11, 12, 13, 14, 5000, 15])
    pool.save(tmp_path / "docs.pool")
    for sharing in ("none", "all"):
        options: Any = {
            "sharing": sharing,
            "pool": str(tmp_path / "docs.pool"),
            "min_probability": 0.0,
        }
        proposer = PoolProposer(config(max_draft_tokens=8, **options))
        ids = np.array([[1, 10, 11, 12]], np.int32)
        # What the model has no token for is not drafted.
        assert proposer.propose([[12]], np.array([4], np.int32), ids) == [[13, 14]]
    assert [text.tolist() for text in NGramPool.load(tmp_path / "docs.pool").texts()] == [
        text.tolist() for text in pool.texts()
    ]
    with pytest.raises(OSError, match="missing"):
        PoolProposer(config(pool=str(tmp_path / "missing.pool")))


def test_the_shared_pool_can_be_told_of_texts_before() -> None:
    proposer = PoolProposer(config(sharing="all"))
    proposer.observe([1, 2, 3, 4])
    ids = np.array([[9, 1, 2]], np.int32)
    assert proposer.propose([[2]], np.array([3], np.int32), ids)[0][:1] == [3]
    with pytest.raises(ValueError, match="sharing='all'"):
        PoolProposer(config()).observe([1])
    assert PoolProposer(config()).load_model(object(), 1, a=2) is None  # type: ignore[func-returns-value]


def test_what_many_prompts_begin_with_is_observed_once() -> None:
    engine = engine_of(sharing="all", max_rows=4)
    system = prompts(1, 150)[0]
    for i in range(6):
        engine.add(Request([*system, 950 + i, 960 + i], 6, cycling(4)))
        engine.run()
    texts = [text.tolist() for text in engine.proposer._pool.texts()]
    assert sum(text.count(system[20]) for text in texts) == 1
    assert engine.proposer.stats()["known_tokens"] == 5 * (128 - engine.proposer._pool.max_match)
    assert engine.proposer.stats()["failures"] == 0
    assert sum(map(len, texts)) < 2 * 150 + 5 * 40 + 6 * 12


@pytest.mark.parametrize("sharing", ["none", "all"])
def test_a_prewarmed_table_drafts_what_no_text_says(sharing: str, tmp_path: Path) -> None:
    table, path = NGramPool(), tmp_path / "model.safetensors"
    table.harvest([[-1, 5], [-1, 6]], [[6, 7], [8, 9]], [[0.9, 0.05], [0.9, 0.05]])
    table.save(path)
    ids = np.array([[1, 5]], np.int32)
    for prewarmed, expected in ((None, []), (str(path), [6, 8])):
        options: Any = {"sharing": sharing, "prewarmed": prewarmed, "min_probability": 0.0}
        proposer = PoolProposer(config(**options))
        assert proposer.propose([[5]], np.array([2], np.int32), ids) == [expected]
    proposer = PoolProposer(config(prewarmed=str(path), vocab_size=7, min_probability=0.0))
    assert proposer.propose([[5]], np.array([2], np.int32), ids) == [[6]]
    path.write_bytes(b"of an older version")
    with pytest.raises(PoolFileError, match=r"it is not a pool file"):
        PoolProposer(config(prewarmed=str(path)))
