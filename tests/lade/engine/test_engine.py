"""Whatever happens to one call, to its thread or its process, the other calls have their texts."""

import asyncio
import os
import pickle
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextvars import copy_context
from functools import partial
from queue import Queue
from typing import Any

import pytest
import torch
from greenlet import greenlet
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import lade
from tests.grids import thinned
from tests.lade.both import ONE
from tests.lade.shared import shared_model
from tests.lade.tiny import BLOOM

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 12}
SAMPLED: dict[str, Any] = {"do_sample": True, "eos_token_id": None, "max_new_tokens": 12}
LONG: dict[str, Any] = {**SAMPLED, "max_new_tokens": 120}
SEC = 60  # that nothing here takes


def once(call: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function that makes a call the first time that it is called, given anything."""
    calls = [call]
    return lambda *_: calls.pop()() if calls else None


class Streamer(BaseStreamer):  # type: ignore[misc]
    def __init__(self, put: Callable[..., Any]) -> None:
        self.put = put

    def end(self) -> None:
        pass


def passing(note: Callable[..., Any], result: Any = None) -> Callable[..., Any]:
    """Return a function of a prefix and scores that returns the scores, or a given result."""

    def called(input_ids: Any, scores: Any, **_: Any) -> Any:
        note()
        return scores if result is None else result

    return called


#: Options by which a call has a function called, in the batcher's thread.
CODE: dict[str, Callable[[Callable[..., Any]], dict[str, Any]]] = {
    "on_step": lambda note: {"on_step": note},
    "streamer": lambda note: {"streamer": Streamer(note)},
    "processor": lambda note: {"logits_processor": LogitsProcessorList([passing(note)])},
    "criterion": lambda note: {
        "stopping_criteria": StoppingCriteriaList([passing(note, torch.tensor([False]))])
    },
}


def expected(model: Any, seed: int | None = None, **options: Any) -> list[list[int]]:
    if seed is not None:
        torch.manual_seed(seed)
    tokens: list[list[int]] = model.generate(ONE, **{**GREEDY, **options}).tolist()
    return tokens


def texts(*requests: Any) -> list[list[list[int]]]:
    return [request.result(SEC).tolist() for request in requests]


# --- whose code runs --------------------------------------------------------------------------


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


def in_thread(call: Callable[[], Any], found: Queue[Any]) -> None:
    context = copy_context()
    threading.Thread(target=lambda: found.put(context.run(call))).start()


def in_task(call: Callable[[], Any], found: Queue[Any], loop: Any, *, moves: bool) -> None:
    async def follow_up() -> None:
        found.put(await asyncio.to_thread(call) if moves else call())

    asyncio.run_coroutine_threadsafe(follow_up(), loop)


def in_own_loop(call: Callable[[], Any], found: Queue[Any]) -> None:
    async def follow_up() -> None:
        found.put(call())

    asyncio.run(follow_up())


@pytest.mark.parametrize("of_other_model", thinned([True, False], True), ids=["other", "same"])
@pytest.mark.parametrize(
    "way",
    thinned(["thread", "task", "to_thread", "greenlet", "loop"], "thread", "to_thread", "greenlet"),
)
def test_what_a_callback_starts_is_no_part_of_its_call(
    way: str, of_other_model: bool, loop: Any
) -> None:
    model, other = shared_model(), shared_model(seed=3 if of_other_model else 0)
    want, of_other = expected(model), expected(other)
    found: Queue[Any] = Queue()
    ways: dict[str, Callable[..., Any]] = {
        "thread": in_thread,
        "task": partial(in_task, loop=loop, moves=False),
        "to_thread": partial(in_task, loop=loop, moves=True),
        "greenlet": lambda call, found: greenlet(lambda: found.put(call())).switch(),
        "loop": in_own_loop,
    }
    with lade.Batcher(model) as batcher:
        call = partial(lade.generate, other, ONE, **GREEDY)
        note = [once(partial(ways[way], call, found)) for _ in range(2)]
        requests = [batcher.submit(ONE, on_step=each, **GREEDY) for each in note]
        requests.append(batcher.submit(ONE, **GREEDY))
        assert texts(*requests) == [want] * 3
        assert [found.get(timeout=SEC).tolist() for _ in note] == [of_other] * 2
        assert texts(batcher.submit(ONE, **GREEDY)) == [want]


# --- what one call raises ---------------------------------------------------------------------


@pytest.mark.parametrize("where", thinned([*CODE, "function"], "processor", "function"))
@pytest.mark.parametrize(
    "kind", thinned([SystemExit, KeyboardInterrupt, GeneratorExit], SystemExit, KeyboardInterrupt)
)
def test_what_ends_one_call_is_told_to_whoever_waits_for_it(
    where: str, kind: type[BaseException]
) -> None:
    model = shared_model()
    want = expected(model)

    def fail(*_: Any) -> None:
        raise kind("of one call")

    with lade.Batcher(model) as batcher:
        before = batcher.submit(ONE, **GREEDY)
        if where == "function":
            with pytest.raises(kind, match="of one call"):
                batcher.run(fail)
        else:
            request = batcher.submit(ONE, **GREEDY, **CODE[where](fail))
            with pytest.raises(kind, match="of one call"):
                request.result(SEC)
        after = batcher.submit(ONE, **GREEDY)
        assert texts(before, after) == [want] * 2


@pytest.mark.parametrize("kind", [SystemExit, ValueError])
def test_a_done_callback_can_fail_nobodys_call(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    model = shared_model()
    told: Queue[Any] = Queue()

    def fail(_: Any) -> None:
        raise kind("of a callback")

    with lade.Batcher(model) as batcher:
        requests = [batcher.submit(ONE, **GREEDY) for _ in range(3)]
        requests[1].add_done_callback(fail)
        requests[1].add_done_callback(told.put)
        assert texts(*requests, batcher.submit(ONE, **GREEDY)) == [expected(model)] * 4
        assert told.get(timeout=SEC) is requests[1]
    assert "exception calling callback" in caplog.text
    with pytest.raises(SystemExit):  # in a thread of the caller's own
        requests[0].add_done_callback(lambda _: (_ for _ in ()).throw(SystemExit))


def test_a_thread_that_cannot_start_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model()
    with lade.Batcher(model) as batcher:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", lambda _: dict[str, None]()["no thread"])
            with pytest.raises(KeyError, match="no thread"):
                batcher.submit(ONE, **GREEDY)
        assert texts(batcher.submit(ONE, **GREEDY)) == [expected(model)]


def test_a_request_that_somebody_else_answers_ends_no_other() -> None:
    model = shared_model()
    with lade.Batcher(model, max_batch_size=2) as batcher:
        requests = [batcher.submit(ONE, **LONG) for _ in range(2)]
        next(iter(requests[0]))
        requests += [batcher.submit(ONE, **GREEDY) for _ in range(2)]
        for request in requests[1:3]:  # one that runs, and one that waits
            request.set_result(3)
        assert texts(requests[3]) == [expected(model)]
        assert [request.result() for request in requests[1:3]] == [3, 3]


# --- random states ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::lade.PlainDecodingWarning")
@pytest.mark.parametrize(
    "families",
    thinned([("llama", "llama"), ("bloom", "llama"), ("bloom",) * 2], ("bloom", "llama")),
)
@pytest.mark.parametrize("code", thinned([None, "on_step", "processor"], "on_step"))
def test_two_batchers_keep_their_seeds(families: tuple[str, str], code: str | None) -> None:
    options = {"bloom": {**BLOOM, "attention": "eager"}}
    models = [
        shared_model(name, seed=s, **options.get(name, {})) for s, name in enumerate(families)
    ]
    want = [expected(model, seed, **SAMPLED) for model in models for seed in range(6)]
    given = {} if code is None else CODE[code](lambda *_: threading.Event().wait(1e-4))
    before = torch.get_rng_state()
    with lade.Batcher(models[0]) as first, lade.Batcher(models[1]) as second:
        requests = [
            each.submit(ONE, seed=seed, **SAMPLED, **given)
            for each in (first, second)
            for seed in range(6)
        ]
        assert texts(*requests) == want
    assert torch.equal(torch.get_rng_state(), before)


def test_a_callback_may_wait_for_another_batcher() -> None:
    models = [shared_model(), shared_model(seed=3)]
    want = [expected(model, 1, **SAMPLED) for model in models]
    tokens: Queue[Any] = Queue()
    with lade.Batcher(models[0]) as first, lade.Batcher(models[1]) as second:
        # Through a queue, by its result, and with code of its own running in it. The two calls
        # may have different numbers of steps, as drafts are accepted in one or the other.
        told = once(lambda: tokens.get(timeout=SEC))
        slow = first.submit(ONE, seed=1, **SAMPLED, on_step=told)
        fast = second.submit(ONE, seed=1, **SAMPLED, on_step=tokens.put)
        inner = partial(second.submit, ONE, seed=1, **SAMPLED)
        by_processor = CODE["processor"](once(lambda: inner().result(SEC)))
        waiting = first.submit(ONE, seed=1, **SAMPLED, **by_processor)
        assert texts(slow, fast, waiting) == [want[0], want[1], want[0]]
        assert first.run(lambda: inner().result(SEC)).tolist() == want[1]


def unseeded(run: Callable[[Callable[[], Any]], Any], call: Callable[[], Any]) -> Any:
    torch.manual_seed(5)
    return [run(call).tolist() for _ in range(3)], torch.rand(1)


@pytest.mark.parametrize("way", thinned(["lade", "model", "rows"], "lade"))
def test_functions_of_a_batcher_go_on_from_the_callers_random_state(way: str) -> None:
    model, ids = shared_model(), torch.cat([ONE] * 3) if way == "rows" else ONE
    plain = partial(model.generate, ids, **SAMPLED)
    ours = plain if way == "model" else partial(lade.generate, model, ids, **SAMPLED)
    want = unseeded(lambda call: call(), plain)
    assert want[0][0] != want[0][1]
    with lade.Batcher(model) as batcher, lade.Batcher(shared_model(seed=3)) as other:
        assert unseeded(batcher.run, ours) == want
        # Of a call of another batcher they go on from that call's.
        after = torch.get_rng_state()
        torch.manual_seed(9)
        assert other.run(partial(unseeded, batcher.run, ours)) == want
        assert torch.equal(torch.get_rng_state(), after)
        # Beside others, those that are seeded keep their seeds.
        seeded = batcher.submit(ONE, seed=3, **LONG)
        assert batcher.run(partial(unseeded, lambda call: call(), ours)) == want
        assert texts(seeded) == [expected(model, 3, **LONG)]


def test_functions_that_run_at_once_draw_differently() -> None:
    model, drawn = shared_model(), Queue[Any]()
    begun = threading.Barrier(4)

    def draw(batcher: Any) -> None:
        begun.wait(SEC)
        drawn.put(batcher.run(partial(lade.generate, model, ONE, **SAMPLED)).tolist())

    with lade.Batcher(model) as batcher:
        threads = [threading.Thread(target=draw, args=(batcher,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = [drawn.get() for _ in threads]
    assert all(found.count(each) == 1 for each in found)


# --- the end of a batcher ---------------------------------------------------------------------


@pytest.mark.parametrize("where", thinned([*CODE, "done"], "on_step", "processor", "done"))
def test_a_batcher_may_be_closed_in_its_own_thread(where: str) -> None:
    model = shared_model()
    batcher = lade.Batcher(model)
    close = once(batcher.close)
    request = batcher.submit(ONE, **GREEDY, **(CODE[where](close) if where in CODE else {}))
    beside = batcher.submit(ONE, **GREEDY)
    request.add_done_callback(close)
    assert texts(request, beside) == [expected(model)] * 2
    with pytest.raises(RuntimeError, match="closed"):
        batcher.submit(ONE, **GREEDY)
    batcher.close()


@pytest.mark.parametrize("wait", [lambda each: each.result(), lambda each: each.exception(), list])
def test_a_batchers_own_thread_waits_for_no_result(wait: Callable[[Any], Any]) -> None:
    model = shared_model()
    with lade.Batcher(model) as batcher:
        later = batcher.submit(ONE, **LONG)
        request = batcher.submit(ONE, **GREEDY, on_step=lambda _: wait(later))
        with pytest.raises(lade.LadeError, match="add_done_callback"):
            request.result(SEC)
        later.cancel()
        assert batcher.run(lambda: batcher.run(lambda: 3)) == 3
        found: Queue[Any] = Queue()
        done = batcher.submit(ONE, **GREEDY)
        run = partial(batcher.run, partial(lade.generate, model, ONE, **GREEDY))
        done.add_done_callback(lambda _: found.put(run()))
        assert found.get(timeout=SEC).tolist() == expected(model)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_an_interrupt_of_its_block_ends_the_calls_of_a_batcher(kind: type[BaseException]) -> None:
    requests: list[Any] = []

    def leave() -> None:
        with lade.Batcher(shared_model(), max_batch_size=2) as batcher:
            requests.extend(batcher.submit(ONE, **LONG) for _ in range(4))
            next(iter(requests[0]))
            raise kind

    with pytest.raises(kind):
        leave()
    assert [request.cancelled() for request in requests] == [kind is not ValueError] * 4


# --- forks ------------------------------------------------------------------------------------


def forked(call: Callable[[], Any]) -> Any:
    """Return what a function returns in a forked child, or raise what it raises there."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            told = pickle.dumps((call(), None))
        except BaseException as error:
            told = pickle.dumps((None, error))
        os.write(writing, told)
        os._exit(0)
    os.close(writing)
    try:
        if not select.select([reading], [], [], SEC)[0]:
            os.kill(child, signal.SIGKILL)
            raise TimeoutError("the child hangs")
        result, failure = pickle.loads(os.read(reading, 1 << 20))
    finally:
        os.close(reading)
        os.waitpid(child, 0)
    if failure is not None:
        raise failure
    return result


def needs_fork(test: Any) -> Any:
    """Mark a test that forks, which newer versions of Python warn of where there are threads."""
    warning = "ignore:.*multi-threaded, use of fork:DeprecationWarning"
    test = pytest.mark.filterwarnings(warning)(test)
    return pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")(test)


@needs_fork
@pytest.mark.parametrize("num_running", thinned([0, 1, 5], 5))
def test_a_child_has_a_batcher_that_works(num_running: int, single_thread: None) -> None:
    model = shared_model(dtype=torch.float32, hidden_size=64)
    want = [expected(model), expected(model, 7, **SAMPLED)]
    with lade.Batcher(model, max_batch_size=3) as batcher:
        answers = partial(
            lambda: texts(batcher.submit(ONE, **GREEDY), batcher.submit(ONE, seed=7, **SAMPLED))
        )
        assert answers() == want
        forks_are_done = threading.Event()  # until then each step takes a while
        slowly = {"on_step": lambda _: forks_are_done.wait(0.1)}
        running = [batcher.submit(ONE, seed=3, **LONG, **slowly) for _ in range(num_running)]
        for each in running[:1]:
            next(iter(each))
        assert forked(answers) == want
        for wait in (lambda each: each.result(), list):
            if running:
                with pytest.raises(lade.LadeError, match="forked while the call ran"):
                    forked(partial(wait, running[-1]))
        assert forked(batcher.close) is None
        forks_are_done.set()
        assert texts(*running) == [expected(model, 3, **LONG)] * num_running
