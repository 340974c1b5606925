"""Forwards by a job: the numbers of the model, whatever it is at the moment; else the job rests."""

import copy
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lade
from lade.compat import CACHE
from lade.compat.closeness import distance
from lade.forward import _tiles, words
from lade.forward import job as file
from lade.forward.job import forwards_for
from lade.forward.reading import read
from lade.probing.profile import computing, profile_of
from lade.targets.kv_cache import RecurrentLayer
from lade.targets.trees import TreeTarget
from lade.tree import Tree
from ngram_pool import Draft
from tests.grids import thinned, thinned_rows
from tests.lade.both import EIGHT, ONE, same_as_generate
from tests.lade.forward.conftest import Ran, noted
from tests.lade.forward.families import (
    CHAINS,
    FORMATS,
    PLAIN,
    QUICK,
    READABLE,
    SORTS,
    LowRank,
    adapted,
    model_of,
    widened,
)
from tests.lade.targets.test_tree import make_draft
from tests.lade.tiny import ScriptedDrafter

# mllama keeps keys and values for images, too, which no forward of text alone has written.
SERVED = [family for family in READABLE if family != "mllama"]
TEXT = torch.tensor([[5, 6, 7, 8, 9, 10] * 5 + [5, 6, 7]])


class Apart(NamedTuple):
    """How far a job's logits are from the model's own."""

    num_tokens: int
    num_parts: int
    is_close: bool
    told: str


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Apart]:
    """Run every forward by torch and by every job; return a list that their differences fill."""
    found: list[Apart] = []

    def choose(self: Any, request: Any, plainly: Callable[[], Any], _: Any) -> Any:
        layers = [layer for part in request.parts for layer in part.cache.held]
        pending = [layer.num_pending for layer in layers]

        def again() -> None:
            for layer, num in zip(layers, pending, strict=True):
                layer.num_pending = num
                if isinstance(layer, RecurrentLayer):
                    layer._after = None

        output = plainly()
        again()
        logits = self._by_job(request)
        if logits is None:
            again()
            return plainly()
        # Against float64, chunks of a Mamba 2 are off by 1.1e-4 in torch, by 3e-5 in a job.
        limit = 2e-4 if any(isinstance(each, RecurrentLayer) for each in layers) else 1e-4
        close, told = is_close(logits, output.logits, limit)
        found.append(Apart(request.input_ids.shape[1], len(request.parts), close, told))
        return output

    monkeypatch.setattr(file.FusedForwards, "settle", lambda *_: None)
    monkeypatch.setattr(file.FusedForwards, "_choose", choose)
    return found


def is_close(mine: Tensor, theirs: Tensor, limit: float = 1e-4) -> tuple[bool, str]:
    """Return whether logits, float32 whatever weights are stored in, differ by rounding."""
    assert mine.dtype == theirs.dtype == torch.float32
    assert mine.shape == theirs.shape
    error = distance(mine.double(), theirs.double())
    return error <= limit, f"{error:.2g}"


class Forgiving(ScriptedDrafter):
    """Goes on from a text that is another one than was foreseen, as it may be in 16 bits."""

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        self.answers[sequence][: len(committed)] = committed
        return super().draft(sequence, committed, max_draft_tokens)


def with_drafts(model: Any, input_ids: Tensor, **options: Any) -> Any:
    """Decode with drafts that are right as often as not."""
    given: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 24}
    given |= {"attention_mask": torch.ones_like(input_ids), **options}
    answers = model.generate(input_ids, **given).tolist()
    drafter = Forgiving(answers, np.random.default_rng(0), 0.7)
    return lade.generate(model, input_ids, drafter=drafter, config=EIGHT, **given)


def plan_has_windows(model: Any) -> bool:
    return getattr(model.config.get_text_config(decoder=True), "sliding_window", None) is not None


# --- the numbers ----------------------------------------------------------------------------------


def are_close(compared: list[Apart]) -> bool:
    """Return whether all are."""
    return all(each.is_close for each in compared)


@pytest.mark.parametrize("dtype", thinned(FORMATS, torch.float32), ids=str)
@pytest.mark.parametrize("family", thinned(SERVED, *QUICK))
def test_logits_are_those_of_the_model(
    family: str, dtype: torch.dtype, compared: list[Apart]
) -> None:
    """Of prompts, trees and single tokens, after windows have moved on."""
    model = model_of(family, dtype)
    model.generation_config.eos_token_id = None  # with which a made-up model may begin
    with_drafts(model, TEXT, max_new_tokens=40)
    assert are_close(compared), compared
    sizes = {each.num_tokens for each in compared}
    assert 1 < min(sizes - {1}) <= 9
    # These two get more with a prompt than its tokens.
    assert plan_has_windows(model) or TEXT.shape[1] in sizes or family in ("fuyu", "got_ocr2")
    compared.clear()
    lade.generate(model, TEXT, max_new_tokens=8, config=lade.Config(max_draft_tokens=0))
    assert are_close(compared), compared
    assert 1 in {each.num_tokens for each in compared}


@pytest.mark.parametrize("num_tokens", thinned([127, 128, 129, 300], 129, 300))
@pytest.mark.parametrize("family", thinned(["llama", "gemma2", "mistral", "glm"], "llama"))
def test_long_prompts_run_in_pieces(
    family: str, num_tokens: int, compared: list[Apart], monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[int] = []
    run_piece = file.FusedForwards._run_piece

    def noting(self: Any, piece: Any, *args: Any) -> None:
        pieces.append(piece.num)
        run_piece(self, piece, *args)

    monkeypatch.setattr(file.FusedForwards, "_run_piece", noting)
    ids = torch.randint(5, 96, (1, num_tokens))
    target = Prefilled(model_of(family), ids)
    if family == "llama":
        assert [each.num_tokens for each in compared] == [num_tokens]
        whole, rest = divmod(num_tokens, 128)
        assert pieces == [128] * whole + [rest] * (rest > 0)
        # A prompt whose logits are all asked for gets them in the prompt's order.
        cache = target._make_cache(target.kinds, num_tokens, 512)
        of_all = target._view(input_ids=ids, **{CACHE: cache})
        assert len(compared) == 2
        assert of_all.logits.shape[1] == num_tokens
    target.run([-1, 0])
    assert [each for each in compared if not each.is_close] == []


def test_layers_that_read_the_keys_of_others_run_for_the_last_token_of_a_prompt(
    compared: list[Apart], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[int, tuple[int, int]]] = []
    run_piece = file.FusedForwards._run_piece

    def noting(self: Any, piece: Any, *args: Any) -> None:
        ran.append((piece.num, piece.phases))
        run_piece(self, piece, *args)

    monkeypatch.setattr(file.FusedForwards, "_run_piece", noting)
    model, ids = model_of("gemma4_text-shared", sliding_window=512), torch.randint(5, 96, (1, 300))
    with_drafts(model, ids, max_new_tokens=1)  # the first prompt is the check's
    ran.clear()
    with_drafts(model, ids, max_new_tokens=8)
    (_, (_, middle)), (_, whole) = ran[0], ran[4]
    assert 1 < middle < whole[1]
    first = 0, middle  # the layers that write keys, and the end of the last of these
    assert ran[:4] == [(128, first), (128, first), (44, first), (1, (middle - 1, whole[1]))]
    assert {phases for _, phases in ran[4:]} == {whole} == {(0, whole[1])}
    assert [each for each in compared if not each.is_close] == []


def test_queries_may_be_multiplied_by_numbers_of_their_positions(compared: list[Apart]) -> None:
    rope = model_of("ministral3").config.rope_parameters
    scaled = {**rope, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5}
    with_drafts(model_of("ministral3", rope_parameters=scaled), TEXT, max_new_tokens=8)
    assert compared
    assert [each for each in compared if not each.is_close] == []


class Prefilled(TreeTarget):
    """A target after its prompt, whose forwards ask for jobs."""

    def __init__(self, model: Any, input_ids: Tensor) -> None:
        model = widened(model)
        profile = profile_of(model)
        profile.state.watch(model)
        super().__init__(
            *(model, input_ids, {"attention_mask": torch.ones_like(input_ids)}),
            *(profile.layout_of(model), 64),
            fast_views=forwards_for(model, profile.state.settings_hold),
        )
        self.kinds = profile.layout_of(model).kinds
        self.prefilled = self.prefill()

    def run(self, parents: list[int]) -> Tensor:
        """Return the logits of a tree, which is not kept."""
        logits = self.forward(self.inputs([Tree.build(11, make_draft(parents))]))
        self.discard()
        return logits

    def run_plainly(self, parents: list[int]) -> Tensor:
        """Return what the model itself gives."""
        inputs = self.inputs([Tree.build(11, make_draft(parents))])
        logits: Tensor = self._plain_view(**inputs).logits
        self.discard()
        return logits


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


# --- several texts ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", thinned(FORMATS, torch.bfloat16), ids=str)
def test_logits_of_several_calls_are_those_of_the_model(
    dtype: torch.dtype, compared: list[Apart]
) -> None:
    model = model_of("llama", dtype)
    with lade.Batcher(model) as batcher:
        requests = [
            batcher.submit(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False
            )
            for ids in (ONE, TEXT, TEXT[:, 3:], TEXT[:, :20])
        ]
        for request in requests:
            request.result()
    assert max(each.num_parts for each in compared) >= 2
    assert [each for each in compared if not each.is_close] == []


@pytest.mark.parametrize("dtype", thinned(FORMATS, torch.float16), ids=str)
@pytest.mark.parametrize(
    "family", thinned([name for name in SORTS if name not in (*PLAIN, *CHAINS)], "llama")
)
def test_logits_of_a_batch_are_those_of_the_model(
    family: str, dtype: torch.dtype, compared: list[Apart]
) -> None:
    rows, model = torch.cat([TEXT, TEXT.flip(1), TEXT.roll(2)]), model_of(family, dtype)
    with_drafts(model, rows, max_new_tokens=16)
    assert 3 in {each.num_parts for each in compared}
    assert are_close(compared), compared


# --- what is refused ------------------------------------------------------------------------------


class OwnParameter(nn.Parameter):
    pass


class Doubled(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * super().forward(inputs)


def _sparse(model: Any) -> None:
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.relu().to_sparse_csr(), requires_grad=False)


def _negated(model: Any) -> None:
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = nn.Parameter(torch._neg_view(layer.weight.detach()), requires_grad=False)


def _transposed(model: Any) -> None:
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = nn.Parameter(layer.weight.detach().T, requires_grad=False)


REFUSED = {each.__name__: each for each in (_sparse, _negated, _transposed)}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("change", REFUSED)
def test_what_is_no_plain_decoder_is_left_to_torch(change: str, ran: list[Ran]) -> None:
    model = model_of("llama")
    forwards = forwards_for(model)
    assert forwards is not None
    assert forwards.view(model) is not model
    same_as_generate(model, TEXT, accept=0.7)
    assert ran
    ran.clear()
    REFUSED[change](model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.PlainDecodingWarning)
        same_as_generate(model, TEXT, accept=0.7, may_fail=True)
    assert ran == []
    afresh = forwards_for(model)
    assert afresh is None or afresh.view(model) is model
    assert forwards.view(model) is model


# --- models that change ---------------------------------------------------------------------------


def test_a_weight_that_is_turned_where_it_lies_is_left_to_torch(ran: list[Ran]) -> None:
    """It begins at the same address, and has the same shape."""
    model = model_of("llama")
    target = Prefilled(model, TEXT)
    parents = [-1, 0]
    target.run(parents)
    model.model.layers[0].self_attn.q_proj.weight.t_()
    logits = target.run(parents)
    assert is_close(logits, target.run_plainly(parents))[0]


# --- low-rank additions ---------------------------------------------------------------------------


def test_low_rank_additions_in_16_bits_round_states() -> None:
    model = model_of("llama", torch.bfloat16)
    adapted(model)
    assert computing(model) is model


@pytest.mark.parametrize(
    ("family", "dtype", "rank"),
    thinned_rows(
        product(["llama", "phi3", "starcoder2", "gemma2"], FORMATS, [5, 40]),
        *(("llama", torch.bfloat16, 5), ("llama", torch.float32, 40)),
    ),
    ids=str,
)
def test_low_rank_additions(
    family: str, dtype: torch.dtype, rank: int, compared: list[Apart]
) -> None:
    """PEFT keeps them in float32, whatever the model is in."""
    model = model_of(family, dtype)
    adapted(model, rank, torch.float32)
    target = Prefilled(model, TEXT)
    for draft in ([], [-1, 0, -1, 2, 2, 4, 0, -1]):
        target.run(draft)
    assert {each.num_tokens for each in compared} >= {1, 9}
    assert [each for each in compared if not each.is_close] == []


def _off(layers: list[LowRank]) -> None:
    for each in layers:
        each.is_off = True


def _another(layers: list[LowRank]) -> None:
    for each in layers:
        each.active.remove("a")


def _merge(layers: list[LowRank]) -> None:
    for each in layers:
        second: Any = each.seconds["a"]
        first: Any = each.firsts["a"]
        each.inner.weight += each.times["a"] * second.weight @ first.weight
    _another(layers)


def _replace(layers: list[LowRank]) -> None:
    first: Any = layers[0].firsts["a"]
    first.weight = nn.Parameter(first.weight.flip(0), requires_grad=False)


def _weigh(layers: list[LowRank]) -> None:
    second: Any = layers[5].seconds["b"]
    second.weight.data.mul_(-2)
    second.bias.add_(1)


SWITCHES: dict[str, Callable[[list[LowRank]], None]] = {
    "off": _off,
    "another": _another,
    "turned": lambda layers: layers[3].active.reverse(),
    "scaled": lambda layers: layers[2].times.update(a=3.0),
    "merged": _merge,
    "weights": _weigh,
    "replaced": _replace,
}


@pytest.mark.parametrize("change", thinned(SWITCHES, "off", "scaled", "weights"))
def test_additions_are_those_of_the_moment(change: str, ran: list[Ran]) -> None:
    """In the same view as in another, where they are read anew."""
    model = model_of("llama")
    layers = adapted(model)
    target = Prefilled(model, TEXT)
    parents = [-1, 0, 0, -1]
    before = target.run(parents)
    assert ran
    SWITCHES[change](layers)
    after = target.run(parents)
    assert is_close(after, target.run_plainly(parents))[0]
    assert change in ("turned", "merged") or not is_close(after, before)[0]
    ran.clear()
    again: Any = Prefilled(model, TEXT)._fast_views
    ran.clear()
    logits = again.view(model)(input_ids=TEXT, **{CACHE: target._make_cache(target.kinds, 33, 99)})
    assert ran
    with torch.no_grad():
        assert is_close(logits.logits, model(TEXT).logits)[0]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("dtype", thinned(FORMATS, torch.bfloat16), ids=str)
def test_peft_is_read(dtype: torch.dtype, compared: list[Apart]) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, lora_alpha=9, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(model_of("llama", dtype), settings).eval()
    with_drafts(model, TEXT, max_new_tokens=8)  # the second factors are still zero
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_()
    with_drafts(model, TEXT, max_new_tokens=8)
    with model.disable_adapter():
        with_drafts(model, TEXT, max_new_tokens=8)
    assert len(compared) > 9
    assert [each for each in compared if not each.is_close] == []


def test_what_is_no_sum_of_products_is_left_to_torch() -> None:
    for change in (
        lambda layer: setattr(layer.inner, "weight", OwnParameter(layer.inner.weight.data)),
        lambda layer: setattr(layer.firsts["a"], "__class__", Doubled),
        lambda layer: layer.inner.register_forward_hook(lambda *_: None),
        lambda layer: setattr(layer, "forward", lambda states: layer.inner(states).tanh()),
        lambda layer: layer.firsts["a"].to(torch.float64),
    ):
        model = model_of("llama")
        layers = adapted(model)
        change(layers[3])
        assert forwards_for(model) is None


# --- hooks of layers ------------------------------------------------------------------------------


LAYERS = slice(None), slice(1, 2), slice(2, None, 2)
# Of BERT's kind torch would run the head, whose products depend on how many tokens there are.
HOOKED = [*product([name for name in SORTS if name != "bert"], LAYERS, FORMATS)]


@pytest.mark.parametrize(
    ("family", "which", "dtype"),
    thinned_rows(
        HOOKED,
        *(("llama", LAYERS[0], torch.float32), ("gemma2", LAYERS[1], torch.float32)),
        *(("gemma2", LAYERS[0], torch.bfloat16), ("llama", LAYERS[2], torch.float16)),
    ),
    ids=str,
)
def test_hooks_of_layers_are_called_around_them(
    family: str, which: slice, dtype: torch.dtype, compared: list[Apart]
) -> None:
    """They see the states of each layer, and what they give goes on."""
    model = model_of(family, dtype)
    whole = copy.deepcopy(model).float()
    names = {module: name for name, module in whole.named_modules()}
    layers = [model.get_submodule(names[each]) for each in read(whole).modules]
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        seen.append(out)
        return out * 1.5 + 0.1

    for layer in layers[which]:
        layer.register_forward_hook(hook)
        layer.register_forward_pre_hook(lambda _, args: (args[0] * 0.75, *args[1:]))
    target = Prefilled(model, TEXT)
    for draft in ([], [-1, 0, -1, 2, 2, 4, 0, -1]):
        seen.clear()
        target.run(draft)
        num, ways = len(layers[which]), len(seen) // len(layers[which])
        assert ways * num == len(seen) >= 2 * num
        for mine, theirs in zip(seen[num:], seen[:num] * (ways - 1), strict=True):
            assert mine.dtype is dtype
            rounded = 4 * float(torch.finfo(dtype).eps)
            assert is_close(mine.float(), theirs.float(), max(1e-4, rounded))[0]
    assert {each.num_tokens for each in compared} >= {1, 9}
    assert dtype is not torch.float32 or [e for e in compared if not e.is_close] == []


@pytest.mark.parametrize("num_tokens", thinned([33, 300], 300))
def test_a_hook_of_every_layer_sees_every_token(num_tokens: int, ran: list[Ran]) -> None:
    model = model_of("llama")
    ids = torch.randint(5, 96, (1, num_tokens))
    seen: list[int] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, args, out: seen.append(out.shape[1]))
    expected = model.generate(ids, min_new_tokens=24, max_new_tokens=24, do_sample=False)
    for _ in range(2):
        seen.clear()
        assert lade.generate(
            model, ids, min_new_tokens=24, max_new_tokens=24, do_sample=False
        ).tolist() == (expected.tolist())
        assert seen.count(num_tokens) >= len(model.model.layers)
        assert sum(seen) >= len(model.model.layers) * (expected.shape[1] - 1)
    assert ran


def test_hooks_may_wait_for_other_threads_and_run_the_model(ran: list[Ran]) -> None:
    model, texts = model_of("llama"), list[list[int]]()
    prompts = [torch.randint(5, 96, (1, 20 + num)) for num in range(2)]
    expected = [model.generate(ids, max_new_tokens=8, do_sample=False).tolist() for ids in prompts]
    inside = threading.local()

    def hook(*_: Any) -> None:
        time.sleep(1e-4)  # others go on meanwhile
        if not getattr(inside, "is_nested", False):
            inside.is_nested = True
            lade.generate(model, ONE, max_new_tokens=2)
            inside.is_nested = False

    model.model.layers[1].register_forward_hook(hook)

    def answer(number: int) -> None:
        given = lade.generate(model, prompts[number], max_new_tokens=8, do_sample=False)
        texts.append([number, *given[0].tolist()])

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == [[number, *text[0]] for number, text in enumerate(expected)]
    assert ran


# --- jobs that are wrong, or slow -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", thinned(FORMATS, torch.bfloat16), ids=str)
def test_a_wrong_job_is_never_used(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    by_job = file.FusedForwards._by_job

    def wrong(*args: Any) -> Tensor:
        logits = by_job(*args)
        assert logits is not None
        return logits.index_fill(2, torch.tensor([7]), 30)

    monkeypatch.setattr(file.FusedForwards, "_by_job", wrong)
    runs = noted(monkeypatch)
    model = model_of("llama", dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            given: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
            expected = copy.deepcopy(model).float().generate(TEXT, **given)
            got = lade.generate(model, TEXT, config=lade.Config(max_draft_tokens=0), **given)
            assert got.tolist() == expected.tolist()
    told = [each for each in caught if "compiled forward is not used" in str(each.message)]
    assert [each.category for each in told] == [RuntimeWarning]
    assert len(runs) == 1


def test_a_job_that_is_wrong_for_some_sizes_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a text begins, so that nothing changes in the middle of it."""
    by_job = file.FusedForwards._by_job

    def wrong(self: Any, request: Any) -> Tensor:
        logits = by_job(self, request)
        assert logits is not None
        moved = torch.linspace(0, 9, logits.shape[-1])
        return logits + moved if request.input_ids.shape[1] == 3 else logits

    monkeypatch.setattr(file.FusedForwards, "_by_job", wrong)
    model = model_of("llama")
    with pytest.warns(RuntimeWarning, match="compiled forward is not used"):
        lade.warm_up(model)
    forwards: Any = profile_of(model).fast_views_for(model)
    assert "logits differ by" in str(forwards.why_not)
    assert not forwards.pays(1)
    same_as_generate(model, TEXT, accept=0.7)


def test_calls_compare_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file.FusedForwards, "_are_slow", lambda *_: False)
    model = model_of("llama", torch.bfloat16)
    lade.warm_up(model)
    runs, choose = noted(monkeypatch), file.FusedForwards._choose

    def by_job_alone(self: Any, request: Any, by_torch: Any, cache: Any) -> Any:
        return choose(self, request, partial(pytest.fail, "torch ran the model"), cache)

    monkeypatch.setattr(file.FusedForwards, "_choose", by_job_alone)
    with_drafts(model, TEXT)
    assert len({each.num_tokens for each in runs}) > 3


@pytest.mark.parametrize(
    ("job", "theirs", "is_used"), [(1.0, 2.0, True), (2.0, 1.0, False), (1.1, 1.0, True)]
)
def test_whether_jobs_run_is_chosen_once_before_a_text_begins(
    job: float, theirs: float, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by no small difference, as machines may be busy."""
    now = 0.0

    def by_job(self: Any, request: Any) -> Tensor | None:
        nonlocal now
        now += job
        return run_job(self, request)

    def own(self: Any, by_torch: Any, by_job: Any) -> bool:
        def run(num_tokens: int) -> Tensor:
            nonlocal now
            now += theirs
            logits: Tensor = by_torch(num_tokens)
            return logits

        return are_slow(self, run, by_job)

    run_job, are_slow = file.FusedForwards._by_job, file.FusedForwards._are_slow
    model = model_of("llama")
    monkeypatch.setattr(file, "perf_counter", lambda: now)
    monkeypatch.setattr(file.FusedForwards, "_by_job", by_job)
    monkeypatch.setattr(file.FusedForwards, "_are_slow", own)
    runs = noted(monkeypatch)
    given: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    lade.generate(model, TEXT, **given)
    assert {each.num_tokens for each in runs} >= {1, 8}
    runs.clear()
    lade.generate(model, TEXT, **given)
    assert (runs != []) == is_used


def test_a_job_that_fails_is_given_up(ran: list[Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that it has written before is left."""

    def failing(*_: Any) -> None:
        raise ArithmeticError("of a test")

    for name in ("_given", "_caches"):
        with monkeypatch.context() as patch:
            patch.setattr(file.FusedForwards, name, failing)
            model = model_of("llama")
            same_as_generate(model, TEXT, accept=0.7)
            forwards: Any = profile_of(model).fast_views_for(model)
            assert "of a test" in forwards.why_not
            same_as_generate(model, TEXT, accept=0.7)
            assert forwards.view(model) is model
    assert ran == []


# --- what is kept on disk ---------------------------------------------------------------------


def test_a_job_is_compiled_anew_when_a_file_that_it_is_made_of_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    words_file = tmp_path / "words.py"
    monkeypatch.setattr(words, "__file__", str(words_file))

    def num_hits() -> int:
        def nothing(address: Any) -> None: ...

        return int(_tiles.job(nothing)().cache_hits)

    for text, expected in [("A, B = range(2)", 0), ("A, B = range(2)", 1), ("B, A = range(2)", 0)]:
        words_file.write_text(text)
        assert num_hits() == expected
