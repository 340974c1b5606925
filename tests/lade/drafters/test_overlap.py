"""An assistant that goes on while the target verifies: exact, no work twice, no thread left."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import lade
from lade.drafters import AssistantModel
from lade.drafters.model_drafter import ModelDrafter
from lade.drafters.overlap import AheadScorer, OverlappedDrafter
from lade.drafting.drafter import DraftingCall, NoDrafter
from lade.errors import DrafterWarning
from tests.lade.shared import shared_model
from tests.lade.tiny import MAMBA2, VOCAB_SIZE, tiny_model

NUM_TOKENS = 5
STRICT = lade.Config(strict_drafter=True)
PROMPT = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
# Families of every way to run drafts.
NEO = {
    "attention_types": [[["global", "local", "local"], 1]],
    "num_layers": 3,
    "num_heads": 4,
    "window_size": 8,
}
ASSISTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tree": ("llama", {}),
    "windows": ("gemma3_text", {}),
    "rows": ("gpt_neo", NEO),
    "snapshot": ("mamba2", MAMBA2),
}


def assistant_of(kind: str, seed: int = 1) -> Any:
    family, options = ASSISTANTS[kind]
    eager = {"attention": "eager"} if kind in ("rows", "snapshot") else {}
    return shared_model(family, seed, **eager, **options)


def logits_of(path: Sequence[int]) -> Tensor:
    """Return logits that tell one text from another."""
    state = 1
    for token_id in path:
        state = (state * 31 + token_id + 1) % 1009
    generator = torch.Generator().manual_seed(state)
    return torch.randn(NUM_TOKENS, generator=generator)


class CountingScorer:
    """A scorer that a text says it all for; it counts what it runs and checks what it is asked."""

    def __init__(self, is_chain: bool = False) -> None:
        self.is_chain = is_chain
        self.num_run = 0
        self.is_closed = False
        self._paths: list[list[int]] = []

    def follow(self, committed: Sequence[int]) -> Tensor:
        self.num_run += 1
        self._paths = [[*committed]]
        return logits_of(committed)

    def grow(self, token_ids: Sequence[int], parents: Sequence[int]) -> Tensor:
        for token_id, parent in zip(token_ids, parents, strict=True):
            path = [*self._paths[parent], token_id]
            assert path not in self._paths
            assert not self.is_chain or parent == len(self._paths) - 1
            self._paths.append(path)
        self.num_run += len(token_ids)
        return torch.stack([*map(logits_of, self._paths[-len(token_ids) :])])

    def close(self) -> None:
        self.is_closed = True


def likeliest(path: list[int], num: int) -> list[int]:
    """Return the likeliest tokens after a text."""
    for _ in range(num):
        path = [*path, int(logits_of(path).argmax())]
    return path[-num:] if num else []


class TestGoingAhead:
    """Nodes that nobody asked for yet."""

    def test_what_was_run_ahead_is_not_run_again(self) -> None:
        inner = CountingScorer()
        scorer = AheadScorer(inner, 100, NUM_TOKENS)
        text = [1, 2, 3]
        scorer.follow(text)
        expected = likeliest(text, 6)
        scorer.grow(expected[:1], [0])
        scorer.expect(expected[:2])
        assert [scorer.go_ahead() for _ in range(4)] == [True] * 4
        assert inner.num_run == 1 + 1 + 4
        text += expected[:3]  # two that were drafted and one that was expected
        assert torch.equal(scorer.follow(text), logits_of(text))
        later = scorer.grow(expected[3:5], [0, 1])
        assert torch.equal(later[1], logits_of(text + expected[3:5]))
        assert inner.num_run == 6
        scorer.grow(expected[5:], [2])
        assert inner.num_run == 7

    def test_a_text_that_goes_elsewhere_is_committed(self) -> None:
        inner = CountingScorer()
        scorer = AheadScorer(inner, 100, NUM_TOKENS)
        scorer.follow([1, 2])
        scorer.expect([])
        scorer.go_ahead()
        other = [1, 2, (likeliest([1, 2], 1)[0] + 1) % NUM_TOKENS]
        assert torch.equal(scorer.follow(other), logits_of(other))
        assert inner.num_run == 3
        assert torch.equal(scorer.follow([4, 4]), logits_of([4, 4]))  # another text

    def test_drafts_that_were_drawn_are_gone_along_first(self) -> None:
        inner = CountingScorer()
        scorer = AheadScorer(inner, 100, NUM_TOKENS)
        scorer.follow([1, 2])
        scorer.expect([4, 4])
        for _ in range(3):
            scorer.go_ahead()
        text = [1, 2, 4, 4]
        assert torch.equal(scorer.follow(text), logits_of(text))
        scorer.grow(likeliest(text, 1), [0])
        assert inner.num_run == 4

    @pytest.mark.parametrize("is_chain", [False, True])
    def test_it_ends(self, is_chain: bool) -> None:
        def num_ahead(max_length: int, ends: frozenset[int]) -> int:
            scorer = AheadScorer(CountingScorer(is_chain), max_length, NUM_TOKENS, ends)
            scorer.follow([1, 2])
            scorer.expect([])
            num = 0
            while scorer.go_ahead():
                num += 1
            return num

        path = likeliest([1, 2], 30)
        assert num_ahead(1000, frozenset()) == 24
        assert num_ahead(8, frozenset()) == 5  # the last token of a text is not run
        assert num_ahead(1000, frozenset([path[0]])) == 0
        assert num_ahead(1000, frozenset([path[-1]])) == path.index(path[-1])

    def test_a_tree_that_is_large_is_committed(self) -> None:
        inner = CountingScorer()
        scorer = AheadScorer(inner, 10_000, NUM_TOKENS)
        text = [1]
        scorer.follow(text)
        for _ in range(40):
            scorer.expect([])
            for _ in range(8):
                scorer.go_ahead()
            text += likeliest(text, 4)
            assert torch.equal(scorer.follow(text), logits_of(text))
            assert len(inner._paths) <= 64

    @given(
        is_chain=st.booleans(),
        steps=st.lists(
            st.tuples(
                st.lists(st.integers(0, NUM_TOKENS - 1), max_size=4),  # drafted
                st.integers(0, 4),  # run ahead
                st.integers(0, 5),  # of drafted and expected tokens, committed
                st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=2),
            ),
            max_size=8,
        ),
    )
    def test_all_logits_are_those_of_their_own_path(
        self, is_chain: bool, steps: list[tuple[list[int], int, int, list[int]]]
    ) -> None:
        scorer = AheadScorer(CountingScorer(is_chain), 1000, NUM_TOKENS)
        text = [1, 2]
        for drafted, num_ahead, num_right, others in steps:
            assert torch.equal(scorer.follow(text), logits_of(text))
            for depth, token_id in enumerate(drafted):
                (logits,) = scorer.grow([token_id], [depth])
                assert torch.equal(logits, logits_of(text + drafted[: depth + 1]))
            if drafted and not is_chain:
                other = (drafted[0] + 1) % NUM_TOKENS
                (logits,) = scorer.grow([other], [0])
                assert torch.equal(logits, logits_of([*text, other]))
            scorer.expect(drafted)
            for _ in range(num_ahead):
                scorer.go_ahead()
            path = drafted + likeliest(text + drafted, num_ahead)
            text = text + path[:num_right] + others
        assert torch.equal(scorer.follow(text), logits_of(text))

    def test_closing_it_closes_the_model(self) -> None:
        inner = CountingScorer()
        scorer = AheadScorer(inner, 100, NUM_TOKENS)
        scorer.follow([1, 2])
        scorer.close()
        assert inner.is_closed


class GatedScorer(CountingScorer):
    """A scorer that the worker can be held in, and that no other thread may use then."""

    def __init__(self, is_open: bool = False) -> None:
        super().__init__()
        self.has_entered = threading.Event()
        self.may_go = threading.Event()
        if is_open:
            self.may_go.set()
        self.failure: Exception | None = None
        self._in_use = threading.Lock()

    def follow(self, committed: Sequence[int]) -> Tensor:
        assert not self._in_use.locked()
        return super().follow(committed)

    def grow(self, token_ids: Sequence[int], parents: Sequence[int]) -> Tensor:
        assert not self._in_use.locked()
        with self._in_use:
            if threading.current_thread() in workers():
                self.has_entered.set()
                assert self.may_go.wait(60)
                if self.failure is not None:
                    raise self.failure
            return super().grow(token_ids, parents)

    def close(self) -> None:
        assert not self._in_use.locked()
        super().close()


def a_call(**options: Any) -> DraftingCall:
    given: dict[str, Any] = {
        "model": None,
        "target": None,
        "vocab_size": NUM_TOKENS,
        "num_rows": 1,
        "max_length": 1000,
        "max_candidates": 1,
        "processors": [],
        "samples": False,
        "rngs": None,
        "make_pool_drafter": NoDrafter,
    }
    return DraftingCall(**{**given, **options})


def overlapped(open_scorer: Callable[[Sequence[int]], Any]) -> OverlappedDrafter:
    from lade.drafters.lengths import Length

    def make(open_: Any) -> ModelDrafter:
        return ModelDrafter(a_call(), "gated", open_, Length(3, 0.4), "chain")

    return OverlappedDrafter(make, open_scorer, 1000, NUM_TOKENS)


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("lade-assistant")]


class TestHandingOver:
    """One thread at a time uses the model."""

    def test_the_next_draft_waits_for_the_forward_that_is_running(self) -> None:
        scorer = GatedScorer()
        drafter = overlapped(lambda _: scorer)
        text = [1, 2, 3]
        sequence = drafter.open(text)
        draft = drafter.draft(sequence, text, 8)
        assert draft.token_ids.tolist() == likeliest(text, 3)
        assert scorer.has_entered.wait(60)  # while the target would verify
        text += [*likeliest(text, 1), 0]
        drafter.observe(sequence, text[-2:])
        drafts = []
        asking = threading.Thread(target=lambda: drafts.append(drafter.draft(sequence, text, 8)))
        asking.start()
        asking.join(0.05)
        assert asking.is_alive()
        scorer.may_go.set()
        asking.join(60)
        assert drafts[0].token_ids.tolist() == likeliest(text, 3)
        drafter.close(sequence)
        assert workers() == []

    def test_what_fits_the_text_is_used(self) -> None:
        scorer = GatedScorer(is_open=True)
        drafter = overlapped(lambda _: scorer)
        text = [1, 2, 3]
        sequence = drafter.open(text)
        drafter.draft(sequence, text, 8)
        assert drafter._ahead is not None
        drafter._ahead.result(60)  # it went as far as it goes
        num_run = scorer.num_run
        text += likeliest(text, 4)
        drafter.observe(sequence, text[-4:])
        scorer.may_go.clear()
        draft = drafter.draft(sequence, text, 8)
        assert draft.token_ids.tolist() == likeliest(text, 3)
        assert scorer.num_run == num_run
        scorer.may_go.set()
        drafter.close(sequence)
        assert scorer.is_closed

    def test_an_error_in_the_thread_is_raised_by_the_next_draft(self) -> None:
        scorer = GatedScorer(is_open=True)
        scorer.failure = MemoryError("no room")
        drafter = overlapped(lambda _: scorer)
        sequence = drafter.open([1, 2])
        drafter.draft(sequence, [1, 2], 8)
        assert scorer.has_entered.wait(60)
        with pytest.raises(MemoryError, match="no room"):
            drafter.draft(sequence, [1, 2, 3], 8)
        drafter.close(sequence)
        assert workers() == []

    def test_closing_waits_and_ends_the_thread(self) -> None:
        scorer = GatedScorer()
        drafter = overlapped(lambda _: scorer)
        sequence = drafter.open([1, 2])
        drafter.draft(sequence, [1, 2], 8)
        assert scorer.has_entered.wait(60)
        closing = threading.Thread(target=drafter.close, args=(sequence,))
        closing.start()
        closing.join(0.05)
        assert closing.is_alive()  # or it would have closed what is in use
        scorer.may_go.set()
        closing.join(60)
        assert scorer.is_closed
        assert workers() == []

    def test_of_several_sequences_all_are_drafted_for_first(self) -> None:
        scorers: list[GatedScorer] = []

        def open_scorer(_: Sequence[int]) -> GatedScorer:
            scorers.append(GatedScorer(is_open=True))
            return scorers[-1]

        drafter = overlapped(open_scorer)
        texts = [[1, 2], [3, 4]]
        sequences = [drafter.open(text) for text in texts]
        drafter.draft(sequences[0], texts[0], 8)
        assert workers() == []
        drafter.draft(sequences[1], texts[1], 8)
        assert all(scorer.has_entered.wait(60) for scorer in scorers)
        drafter.close(sequences[0])
        assert [scorer.is_closed for scorer in scorers] == [True, False]
        text = [*texts[1], *likeliest(texts[1], 1)]
        draft = drafter.draft(sequences[1], text, 8)
        assert draft.token_ids.tolist() == likeliest(text, 3)
        drafter.close(sequences[1])
        assert workers() == []


@pytest.mark.parametrize("kind", ASSISTANTS)
@pytest.mark.parametrize("do_sample", [False, True])
def test_text_is_that_of_plain_decoding(kind: str, do_sample: bool) -> None:
    target = shared_model("llama")
    drafter = AssistantModel(assistant_of(kind), overlap=True, length=3)
    options: dict[str, Any] = {"do_sample": do_sample, "max_new_tokens": 20}
    torch.manual_seed(0)
    expected = target.generate(PROMPT, **options)
    torch.manual_seed(0)
    got = lade.generate(target, PROMPT, drafter=drafter, config=STRICT, **options)
    assert got.tolist() == expected.tolist()
    assert workers() == []


@pytest.mark.parametrize("kind", ASSISTANTS)
def test_drafts_of_the_target_itself_are_all_accepted(kind: str) -> None:
    """So the thread's work is used in each step, and is right for every kind of cache."""
    target = assistant_of(kind, seed=0)
    drafter = AssistantModel(target, overlap=True, length=3, expansion="chain")
    expected = target.generate(PROMPT, do_sample=False, max_new_tokens=24)
    config = lade.Config(strict_drafter=True, max_draft_tokens=3)
    got = lade.generate(
        target,
        PROMPT,
        drafter=drafter,
        config=config,
        do_sample=False,
        max_new_tokens=24,
        return_dict_in_generate=True,
    )
    assert got.sequences.tolist() == expected.tolist()
    source = got.stats.sources["assistant"]
    assert source.num_accepted_tokens > 0.9 * got.stats.num_draft_tokens > 0


def test_batches_and_drawn_drafts() -> None:
    target = shared_model("llama")
    drafter = AssistantModel(target, overlap=True, length=3)
    prompts = torch.tensor([[0, 0, 5, 6, 7, 5], [4, 9, 9, 4, 9, 9]])
    options: dict[str, Any] = {"attention_mask": (prompts != 0).long(), "max_new_tokens": 16}
    expected = target.generate(prompts, do_sample=False, **options)
    got = lade.generate(target, prompts, drafter=drafter, config=STRICT, do_sample=False, **options)
    assert got.tolist() == expected.tolist()
    drawn = lade.Config(strict_drafter=True, acceptance="rejection")
    got = lade.generate(target, prompts, drafter=drafter, config=drawn, do_sample=True, **options)
    assert got.shape == (2, 22)
    assert workers() == []


@pytest.mark.parametrize("mode", ["inference", "autocast", "plain"])
def test_the_thread_computes_as_the_caller_does(mode: str) -> None:
    target = shared_model("llama", dtype=torch.float32)
    modes: dict[str, Callable[[], Any]] = {
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "plain": torch.enable_grad,
    }
    with modes[mode]():
        got = lade.generate(
            target,
            PROMPT,
            drafter=AssistantModel(target, overlap=True, length=3),
            config=STRICT,
            do_sample=False,
            max_new_tokens=12,
        )
    assert got.shape == (1, 19)


def test_it_overlaps_by_itself_on_devices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    target, assistant = shared_model("llama"), shared_model("llama", 1)
    call = a_call(model=target, vocab_size=VOCAB_SIZE)
    assert isinstance(AssistantModel(assistant).for_call(call), ModelDrafter)
    assert isinstance(AssistantModel(assistant, overlap=True).for_call(call), OverlappedDrafter)
    monkeypatch.setattr(
        "lade.drafters.assistant.device_of_inputs",
        lambda model: torch.device("cuda" if model is target else "cpu"),
    )
    assert isinstance(AssistantModel(assistant).for_call(call), OverlappedDrafter)
    assert isinstance(AssistantModel(assistant, overlap=False).for_call(call), ModelDrafter)


def failing_model(is_failing: Callable[[], bool], error: BaseException) -> Any:
    model = tiny_model("llama", 1)
    model.model.register_forward_pre_hook(lambda *_: fail() if is_failing() else None)

    def fail() -> None:
        raise error

    return model


def test_an_assistant_that_fails_in_the_thread_loses_drafts_alone() -> None:
    target = shared_model("llama")
    main = threading.get_ident()
    assistant = failing_model(lambda: threading.get_ident() != main, MemoryError("no room"))
    expected = target.generate(PROMPT, do_sample=False, max_new_tokens=20)
    drafter = AssistantModel(assistant, overlap=True, length=3)
    with pytest.warns(DrafterWarning, match="MemoryError: no room"):
        got = lade.generate(target, PROMPT, drafter=drafter, do_sample=False, max_new_tokens=20)
    assert got.tolist() == expected.tolist()
    assert workers() == []


@pytest.mark.parametrize("when", ["step", "draft"])
def test_no_thread_outlives_an_interrupt(when: str) -> None:
    target = shared_model("llama")
    num_calls = 0
    main = threading.get_ident()

    def is_due() -> bool:
        nonlocal num_calls
        num_calls += threading.get_ident() == main
        return num_calls == 4

    def interrupt(_: Any) -> None:
        if is_due():
            raise KeyboardInterrupt

    never: Callable[[], bool] = lambda: False  # noqa: E731
    assistant = failing_model(is_due if when == "draft" else never, KeyboardInterrupt())
    plan_calls = AssistantModel(assistant, overlap=True, length=3)
    with pytest.raises(KeyboardInterrupt):
        lade.generate(
            target,
            PROMPT,
            drafter=plan_calls,
            do_sample=False,
            max_new_tokens=20,
            on_step=interrupt if when == "step" else None,
        )
    assert workers() == []
