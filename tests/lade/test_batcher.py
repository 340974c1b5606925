"""Many calls at once: each has the text that it has alone."""

import random
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import lade
from lade.batcher import Batcher, _most_tokens, _Room
from lade.budget.budget import Budget, MeasuredBudget, PricedBudget
from lade.budget.joint import JointCosts
from lade.compat import CACHE
from lade.drafting.successors import PromptHarvester
from lade.targets import joint as file
from lade.targets.joint import JoinedCall, JointForwards
from lade.turns import Seat, Turns
from tests.lade.batches import num_wrong, random_call
from tests.lade.both import ONE
from tests.lade.tiny import BLOOM, MAMBA2, tiny_model
from tests.support.run import all_names
from tests.support.tiny import tiny_model as model_of

TOGETHER = [
    *("llama", "qwen3", "gpt2", "gpt_neox", "opt", "olmo2", "mistral", "gemma3_text"),
    *("phi3", "qwen2"),
]


@pytest.mark.parametrize("family", TOGETHER)
def test_calls_that_come_and_go_have_their_own_texts(family: str) -> None:
    model = tiny_model(family)
    wrong, batcher = num_wrong(model, 24, seed=7)
    assert wrong == 0
    assert batcher.why_not_joint is None
    assert batcher._joint.num_run > 0


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("bloom", {**BLOOM, "attention": "eager"}),
        ("mamba2", {**MAMBA2, "attention": "eager"}),
        ("llama4_text", {}),
    ],
)
def test_models_that_go_alone_take_turns(family: str, options: dict[str, Any]) -> None:
    model = tiny_model(family, **options)
    wrong, batcher = num_wrong(model, 8, seed=3)
    assert wrong == 0
    assert batcher._joint.num_run == 0


def test_a_model_that_changes_what_its_cache_holds_goes_alone() -> None:
    wrong, batcher = num_wrong(tiny_model("deepseek_v3"), 8, seed=7)
    assert wrong == 0
    assert "keys and values change" in (batcher.why_not_joint or "")


def test_float32_has_the_same_texts() -> None:
    wrong, batcher = num_wrong(tiny_model(dtype=torch.float32), 24, seed=1)
    assert wrong == 0
    assert batcher._joint.num_run > 0


@pytest.mark.filterwarnings("ignore:lade decodes:lade.PlainDecodingWarning")
@pytest.mark.filterwarnings("ignore:lade decodes:lade.VerificationWarning")
def test_code_of_ones_own_in_the_forward_sees_its_call_alone() -> None:
    model = tiny_model()

    def steer(module: Any, args: Any, output: Tensor) -> Tensor:
        return torch.cat([output[:, :-1], output[:, -1:] + 0.5], dim=1)

    with model.model.layers[0].mlp.register_forward_hook(steer):
        wrong, batcher = num_wrong(model, 6, seed=2)
    assert wrong == 0
    assert batcher._joint.num_run == 0


def test_long_prompts_run_in_pieces_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lade.turns._FIRST_PIECE", 4)
    monkeypatch.setattr("lade.turns.Seat.end_piece", lambda *_: None)
    model = tiny_model("gemma3_text")
    wrong, batcher = num_wrong(model, 16, seed=5)
    assert wrong == 0
    assert batcher._joint.num_run > 0


def spied(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[object, int, bool]]]:
    """Return, of each forward, the cache, tokens, and whether it is a prompt, of each call."""
    forwards: list[list[tuple[object, int, bool]]] = []
    run = JointForwards.__call__

    def noted(self: JointForwards, parts: Sequence[JoinedCall]) -> list[Any]:
        forwards.append(
            [(part.inputs[CACHE], part.num_tokens, part.num_logits is not None) for part in parts]
        )
        return run(self, parts)

    monkeypatch.setattr(JointForwards, "__call__", noted)
    return forwards


def test_prompts_run_in_the_forwards_of_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = spied(monkeypatch)
    harvested: list[Tensor] = []
    ranked = PromptHarvester._ranked

    def noted(self: PromptHarvester, logits: Tensor) -> Any:
        harvested.append(logits)
        return ranked(self, logits)

    monkeypatch.setattr(PromptHarvester, "_ranked", noted)
    wrong, batcher = num_wrong(tiny_model(), 16, seed=5)
    assert wrong == 0
    assert harvested
    assert batcher.why_not_joint is None
    kinds = [{is_prompt for _, _, is_prompt in forward} for forward in forwards]
    assert {True, False} in kinds


def test_prompts_share_what_a_step_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lade.turns._FIRST_PIECE", 20)
    monkeypatch.setattr("lade.turns.Turns._learn", lambda *_: None)
    forwards = spied(monkeypatch)
    model = tiny_model()
    options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False}
    prompts = [torch.full((1, length), 5) for length in (1, 90, 90, 8)]
    with Batcher(model) as batcher:
        requests = [
            batcher.submit(ids, attention_mask=torch.ones_like(ids), **options) for ids in prompts
        ]
        texts = [request.result() for request in requests]
    for ids, text in zip(prompts, texts, strict=True):
        assert torch.equal(text, model.generate(ids, **options))
    pieces = [[(of, num) for of, num, is_prompt in each if is_prompt] for each in forwards]
    assert max(sum(num for _, num in each) for each in pieces) == 20
    ends: dict[object, int] = {}
    for at, each in enumerate(pieces):
        ends |= {id(of): at for of, _ in each}
    *_, last, very_last = sorted(ends.values())
    assert very_last - last <= 2  # two long prompts take turns


def test_short_prompts_pass_a_long_one_by_no_more_tokens_than_it_has() -> None:
    turns = Turns(JointForwards(), torch.device("cpu"))
    turns.piece = turns._room = 100
    long = Seat(turns)
    long._num_left = 1000
    turns._later.append(long)
    passed = own = 0
    while own < 1000:
        short = Seat(turns)
        short._num_left = 50
        turns._later.append(short)
        seat = turns._next()
        assert seat is not None
        num = min(seat._num_left, 100)
        turns._room = 100
        seat._take_room(num)
        if seat is long:
            own += num
            long._num_left -= num
            turns._later.append(long)
        else:
            passed += num
    assert 900 <= passed <= 1000


def test_a_forward_without_memory_for_all_is_run_call_by_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 0
    run = file._run_as_one

    def failing(parts: Sequence[JoinedCall]) -> list[Any]:
        nonlocal count
        count += 1
        output = run(parts)
        if count % 3 == 0:  # after keys and values were written
            raise torch.OutOfMemoryError
        return output

    monkeypatch.setattr(file, "_run_as_one", failing)
    wrong, batcher = num_wrong(tiny_model(), 16, seed=5)
    assert wrong == 0
    assert count > 3
    assert batcher.why_not_joint is None


def test_tokens_come_one_by_one_and_cancelling_ends_them() -> None:
    model = tiny_model()
    asked = random_call(random.Random(0))
    asked.options.update(max_new_tokens=400, min_new_tokens=400, do_sample=False)
    asked.options.pop("eos_token_id", None)
    with Batcher(model) as batcher:
        request = asked.submitted(batcher)
        tokens = iter(request)
        first = [next(tokens) for _ in range(5)]
        assert request.cancel()
        with pytest.raises(CancelledError):
            list(tokens)
        whole = asked.submitted(batcher, return_dict_in_generate=True)
        streamed = [*whole]
    assert streamed[:5] == first
    output = whole.result()
    assert output.sequences[0, asked.input_ids.shape[1] :].tolist() == streamed
    assert output.stats.num_tokens == 400
    assert not request.cancel()


def test_a_closed_batcher_refuses_calls() -> None:
    batcher = Batcher(tiny_model())
    batcher.close()
    with pytest.raises(RuntimeError, match="closed"):
        batcher.submit(torch.tensor([[1, 2]]))


@pytest.mark.parametrize("options", [{"max_batch_size": 0}, {"max_batch_tokens": 0}])
def test_limits_below_one_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"expected {next(iter(options))} of at least 1, got 0"):
        lade.Batcher(tiny_model(), **options)


class Queue:
    """Has calls wait for room, one after the other, and notes the order in which they begin."""

    def __init__(self, num_tokens: int) -> None:
        self.room, self.order = _Room(num_tokens), list[str]()
        self._threads: list[threading.Thread] = []

    def add(self, name: str, num_tokens: int, owner: str = "") -> None:
        """Wait until a call waits or has begun."""

        def take() -> None:
            with self.room.taken(num_tokens, owner=owner):
                self.order.append(name)

        num_before = len(self.room._waiting)
        self._threads.append(threading.Thread(target=take))
        self._threads[-1].start()
        while name not in self.order and len(self.room._waiting) == num_before:
            pass

    def end(self) -> None:
        for thread in self._threads:
            thread.join()


def test_calls_that_fit_pass_one_that_does_not() -> None:
    queue = Queue(10)
    with queue.room.taken(8):
        queue.add("large", 1000)
        queue.add("small", 2)
        queue.add("too large", 3)
        assert queue.order == ["small"]
    queue.end()
    assert queue.order == ["small", "large", "too large"]


@pytest.mark.parametrize("owners", ["aaaa", "abcd"])
def test_a_large_call_is_passed_by_only_so_many(owners: str) -> None:
    queue = Queue(10)
    with queue.room.taken(5, owner="another"):
        queue.add("large", 10)
        for number, owner in enumerate(owners):
            queue.add(str(number), 4, owner)
        assert queue.order == ["0", "1"]
    queue.end()
    assert queue.order[:3] == ["0", "1", "large"]


@pytest.mark.parametrize("num_tokens", [10, 6])
def test_many_calls_of_one_owner_delay_another_by_what_is_under_way(num_tokens: int) -> None:
    queue = Queue(10)
    with queue.room.taken(4, owner="one"):
        with queue.room.taken(6, owner="one"):
            for number in range(3):
                queue.add(str(number), num_tokens, "one")
            queue.add("other", 5, "two")
        while "other" not in queue.order:
            pass
    queue.end()
    assert queue.order == ["other", "0", "1", "2"]


def test_a_call_that_waits_for_room_can_be_cancelled() -> None:
    model, ids = tiny_model(), torch.tensor([[1, 2]])
    is_held = threading.Event()

    def hold() -> None:
        with room.taken(100):
            is_held.wait()

    with Batcher(model, max_batch_tokens=100) as batcher:
        room = batcher._room
        holder = threading.Thread(target=hold)
        holder.start()
        try:
            request = batcher.submit(ids, max_new_tokens=5)
            while not room._waiting:
                pass
            assert request.cancel()
            with pytest.raises(CancelledError):
                request.result(timeout=30)
            assert not room._waiting
        finally:
            is_held.set()
            holder.join()


class Recorded:
    """Gives back what is asked for, or raises."""

    price: float | None = None
    is_check_due = False

    def __init__(self, error: type[BaseException] | None = None) -> None:
        self.sizes: list[int] = []
        self._error = error

    def __call__(self, asked: Sequence[Any], /) -> Sequence[Any]:
        self.sizes.append(len(asked))
        if self._error is not None:
            raise self._error
        return asked


def test_random_numbers_of_a_call_are_its_own() -> None:
    turns = Turns(Recorded(), torch.device("cpu"))
    drawn: dict[int, list[float]] = {}

    def draw(seed: int) -> None:
        with turns.seat() as seat:
            torch.manual_seed(seed)
            drawn[seed] = []
            for _ in range(20):
                drawn[seed].append(torch.rand(()).item())
                assert seat.run(seed) == seed

    torch.manual_seed(99)
    before = torch.get_rng_state()
    threads = [threading.Thread(target=draw, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(torch.get_rng_state(), before)
    for seed, numbers in drawn.items():
        torch.manual_seed(seed)
        assert numbers == [torch.rand(()).item() for _ in range(20)]


def test_a_piece_that_may_run_twice_has_half_the_tokens() -> None:
    recorded = Recorded()
    turns = Turns(recorded, torch.device("cpu"))
    turns.piece = 100
    with turns.seat() as seat:
        for recorded.is_check_due, num in ((True, 50), (False, 100)):
            seat.run(1)
            assert seat.allot(1000) == num
            turns._num_allotted = 0  # from which nothing is to be learned


def test_forwards_wait_for_each_other_and_run_as_one() -> None:
    recorded = Recorded()
    sizes, turns = recorded.sizes, Turns(recorded, torch.device("cpu"))

    def step(number: int) -> None:
        with turns.seat() as seat:
            while not sizes and len(turns._ready) + len(turns._asking) < 3:
                pass
            for _ in range(10):
                seat.run(number)

    threads = [threading.Thread(target=step, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == [4] * 10


def test_an_interrupt_of_a_forward_ends_every_call_that_waits_for_it() -> None:
    turns = Turns(Recorded(KeyboardInterrupt), torch.device("cpu"))
    with turns.seat() as seat, pytest.raises(KeyboardInterrupt):
        seat.run(1)


class _Model:
    """A model whose logits depend on what else is in a forward."""

    dtype = torch.float32

    def __init__(self, error: float) -> None:
        self._error = error

    def __call__(self, **inputs: Any) -> Any:
        ids = inputs["input_ids"]
        if isinstance(inputs[CACHE], str):
            logits = torch.eye(8)[ids]
        else:
            logits = torch.eye(8)[ids] + self._error * torch.rand(8)
        return type("Output", (), {"logits": logits})


@pytest.mark.parametrize(("error", "is_found"), [(0.0, False), (1e-2, True)])
def test_a_model_whose_calls_disturb_each_other_runs_them_alone(
    monkeypatch: pytest.MonkeyPatch, error: float, is_found: bool
) -> None:
    monkeypatch.setattr("lade.targets.joint.JointCache", lambda *_: None)
    monkeypatch.setattr("lade.targets.joint.limit_of", lambda _: 1e-3)
    monkeypatch.setattr("lade.targets.joint.is_exact_in", lambda _: True)
    forwards, undone = JointForwards(), list[int]()

    def part(ids: list[int]) -> JoinedCall:
        inputs = {
            "input_ids": torch.tensor([ids]),
            "position_ids": torch.tensor([ids]),
            "attention_mask": None,
            CACHE: "own",
        }
        return JoinedCall("any", _Model(error), inputs, lambda: undone.append(1), 1.0)

    for _ in range(3):
        parts = [part([1, 2]), part([3])]
        outputs = forwards(parts)
        assert [output.logits.shape[1] for output in outputs] == [2, 1]
        assert torch.equal(outputs[1].logits, torch.eye(8)[torch.tensor([[3]])])
    assert (forwards.why_not is not None) == is_found
    assert len(undone) == (3 if is_found else 2)
    assert [part.was_joint for part in parts] == [not is_found] * 2
    assert (forwards.price is None) == is_found
    assert forwards.is_check_due is not is_found  # of the fourth, unless they run alone for good


def test_the_price_of_a_token_follows_what_joint_forwards_cost() -> None:
    costs = JointCosts()
    assert 0 < costs.price(8, 8.0) < 1  # a guess, before anything is measured
    for num_tokens in [8, 40, 12, 32, 20] * 8:
        costs.record(num_tokens, 0.1 + 0.005 * num_tokens)
    assert costs.price(8, 8.0) == pytest.approx(8 * 0.005 / 0.14, rel=0.2)
    for num_tokens in [8, 40, 12, 32, 20] * 40:  # another machine, or another program beside it
        costs.record(num_tokens, 0.14)
    assert costs.price(8, 8.0) < 0.02


def test_joint_drafts_have_the_tokens_that_are_worth_their_price() -> None:
    budget = MeasuredBudget()
    probs = [[0.9, 0.6, 0.3, 0.05]]
    sizes = [budget.num_nodes_at(price, probs) for price in (0.01, 0.2, 0.5, 0.95)]
    assert sizes == [4, 3, 2, 0]
    assert PricedBudget({1: 1.0, 8: 1.0}).num_nodes_at(0.95, probs) == 4
    assert Budget(16).num_nodes_at(0.95, probs) == 4


class Interrupted(threading.Semaphore):
    """A semaphore whose waiting is interrupted."""

    def acquire(self, *_: Any, **__: Any) -> bool:
        raise KeyboardInterrupt


@pytest.mark.parametrize("is_asking", [False, True])
def test_an_interrupt_of_a_call_that_waits_lets_the_others_go_on(is_asking: bool) -> None:
    turns, may_end, done = Turns(Recorded(), torch.device("cpu")), threading.Event(), list[int]()

    def hold() -> None:
        with turns.seat() as seat:
            may_end.wait()
            done.extend(seat.run(number) for number in (1, 2))

    def interrupted() -> None:
        with turns.seat() as seat:
            other.start()
            while not turns._ready:
                pass
            seat._woken = Interrupted()
            may_end.set()
            seat.run(0)

    def interrupted_at_once() -> None:
        other.start()
        while turns._holder is None:
            pass
        seat = Seat(turns)
        seat._woken = Interrupted()
        seat._wait_in(turns._ready)

    other = threading.Thread(target=hold)
    with pytest.raises(KeyboardInterrupt):
        (interrupted if is_asking else interrupted_at_once)()
    may_end.set()
    other.join(timeout=30)
    assert done == [1, 2]
    assert turns._holder is None


def test_calls_with_other_inputs_or_of_another_model_run_apart() -> None:
    model, other = tiny_model("gpt2"), tiny_model("gpt2", seed=1)
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    types = torch.full_like(ids, 9)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 30}
    options["do_sample"] = False
    expected = [
        model.generate(ids, **options),
        model.generate(ids, token_type_ids=types, **options),
        other.generate(ids, **options),
    ]
    with Batcher(model) as batcher:
        requests = [batcher.submit(ids, **options) for _ in range(3)]
        typed = batcher.submit(ids, token_type_ids=types, **options)
        of_other = batcher.run(lambda: lade.generate(other, ids, **options))
        for request in requests:
            assert torch.equal(request.result(), expected[0])
        assert torch.equal(typed.result(), expected[1])
        assert torch.equal(of_other, expected[2])
    assert batcher.why_not_joint is None


def test_a_new_call_begins_while_a_long_prompt_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lade.turns._FIRST_PIECE", 4)
    monkeypatch.setattr("lade.turns.Seat.end_piece", lambda *_: None)
    model = tiny_model()
    order: list[str] = []
    has_begun = threading.Event()
    pause = Seat.pause

    def paused(seat: Seat) -> None:
        has_begun.set()
        pause(seat)

    monkeypatch.setattr(Seat, "pause", paused)
    options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False}
    with Batcher(model) as batcher:
        for name, length in (("long", 400), ("short", 4)):
            ids = torch.full((1, length), 5)
            mask = torch.ones_like(ids)
            note = partial(lambda name, _: order.append(name), name)
            batcher.submit(ids, attention_mask=mask, on_step=note, **options)
            has_begun.wait()
    assert order[0] == "short"


def test_a_batcher_that_was_closed_still_runs_functions() -> None:
    model = tiny_model()
    batcher = Batcher(model)
    batcher.close()
    ids = torch.tensor([[5, 6, 7]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8}
    tokens = batcher.run(lambda: lade.generate(model, ids, do_sample=False, **options))
    assert torch.equal(tokens, model.generate(ids, do_sample=False, **options))


def test_autocast_is_of_its_call_alone() -> None:
    model = tiny_model(dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
    with Batcher(model) as batcher, torch.autocast("cpu", torch.bfloat16):
        tokens = batcher.run(lambda: lade.generate(model, ids, do_sample=False, **options))
        alone = lade.generate(model, ids, do_sample=False, **options)
    assert torch.equal(tokens, alone)


def test_room_is_for_all_rows_of_a_call() -> None:
    model = tiny_model()
    call = {"input_ids": torch.ones(2, 5, dtype=torch.long), "max_new_tokens": 10}
    assert _most_tokens(model, call) == 30
    assert _most_tokens(model, {**call, "num_return_sequences": 3}) == 90


def test_a_call_runs_in_the_modes_of_the_thread_that_submits_it() -> None:
    model = tiny_model(dtype=torch.float32, hidden_size=64)
    seen: set[tuple[bool, bool]] = set()
    model.register_forward_hook(
        lambda *_: seen.add((torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()))
    )
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 30, "pad_token_id": 0}
    modes = torch.autocast("cpu", torch.bfloat16), torch.inference_mode()
    with modes[0], modes[1], lade.Batcher(model) as batcher:
        batcher.submit(ONE, **options).result()
    assert seen == {(True, True)}


@pytest.mark.parametrize("has_positions", [False, True], ids=["counted", "positions"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_a_call_may_go_on_from_a_cache_beside_others(family: str, has_positions: bool) -> None:
    model = tiny_model(family, seed=1)
    past, new = torch.tensor([[5, 6, 7, 8, 5, 6, 7]]), torch.tensor([[31, 5, 6, 7, 8, 40, 5, 6, 7]])
    num_past, num_new = past.shape[1], new.shape[1]
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    options["attention_mask"] = torch.ones(1, num_past + num_new, dtype=torch.long)
    if has_positions:
        options["position_ids"] = torch.arange(num_past, num_past + num_new)[None]

    def filled() -> DynamicCache:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(past, **{CACHE: cache})
        return cache

    expected = model.generate(new, **{CACHE: filled()}, **options).tolist()
    with Batcher(model) as batcher:
        other = batcher.submit(past, do_sample=True, max_new_tokens=200, eos_token_id=None)
        requests = [batcher.submit(new, **{CACHE: filled()}, **options) for _ in range(3)]
        assert [request.result().tolist() for request in requests] == [expected] * 3
        other.result()
    assert batcher.why_not_joint is None


@pytest.mark.parametrize("length", [1, 9], ids=["one token", "prompt"])
def test_a_token_that_does_not_exist_fails_its_own_call(length: int) -> None:
    model, ids = tiny_model(), torch.tensor([[5, 6, 7, 5, 6]])
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options).tolist()
    unknown = torch.full((1, length), 1000)
    with Batcher(model) as batcher:
        requests = [batcher.submit(ids, **options) for _ in range(3)]
        wrong = [batcher.submit(unknown, **options) for _ in range(3)]
        requests += [batcher.submit(ids, **options) for _ in range(3)]
        for request in wrong:
            with pytest.raises(IndexError, match="out of range"):
                request.result()
        assert [request.result().tolist() for request in requests] == [expected] * 6
        num_before = batcher._joint.num_run
        later = [batcher.submit(ids, **options) for _ in range(3)]
        assert [request.result().tolist() for request in later] == [expected] * 3
    assert batcher.why_not_joint is None
    assert batcher._joint.num_run > num_before


@pytest.mark.parametrize(
    "given", ["hello", [5, 6], [[5, 6]], {"input_ids": 1}, torch.tensor([5, 6, 7])]
)
def test_what_is_no_prompt_is_refused_as_by_generate(given: Any) -> None:
    model, ids = tiny_model(), torch.tensor([[5, 6, 7]])
    with pytest.raises(Exception, match=r".") as alone:
        lade.generate(model, given, max_new_tokens=3)
    with Batcher(model) as batcher:
        if torch.is_tensor(given):
            request = batcher.submit(given, max_new_tokens=3)
            with pytest.raises(alone.type) as beside:
                request.result()
        else:
            with pytest.raises(TypeError) as beside:
                batcher.submit(given, max_new_tokens=3)
        assert str(beside.value) == str(alone.value)
        assert batcher.submit(ids, max_new_tokens=3).result().shape == (1, 6)


def test_a_call_that_was_cancelled_as_it_ran_says_so() -> None:
    ids = torch.tensor([[5, 6, 7]])
    with Batcher(tiny_model()) as batcher:
        request = batcher.submit(ids, max_new_tokens=400, do_sample=False, eos_token_id=None)
        next(iter(request))
        assert request.running()
        assert request.cancel()
        with pytest.raises(CancelledError):
            request.result(timeout=30)
        assert request.cancelled()
        assert request.done()
        assert not request.cancel()
        whole = batcher.submit(ids, max_new_tokens=3)
        assert whole.result().shape == (1, 6)
        assert not whole.cancelled()


@pytest.mark.parametrize("name", ["gemma4_text", "dots3_note"])
def test_a_model_whose_layers_differ_has_calls_beside_each_other(name: str) -> None:
    if name not in all_names():
        pytest.skip("this transformers does not have it")
    model = model_of(name, seed=1, dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options).tolist()
    with Batcher(model) as batcher:
        requests = [batcher.submit(ids, **options) for _ in range(3)]
        assert [request.result().tolist() for request in requests] == [expected] * 3
        assert (batcher._room._limit or 1) >= 1
