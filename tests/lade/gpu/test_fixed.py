"""Trees in forwards of a few fixed shapes, on memory that is kept between calls."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lade
from lade.attention import packed
from lade.attention.tree import TREE_ATTENTION
from lade.gpu.fixed import WIDTHS, FixedTarget, StepSettings
from lade.gpu.workspace import StaticInputs, StepShape, WorkspaceStore, slots_for
from lade.probing import selfcheck
from lade.probing.plan import choose_verification
from lade.probing.profile import profile_of
from lade.targets.kv_cache import TreeCache
from lade.targets.kv_memory import LayerKind
from lade.targets.layout import tree_layout
from lade.tree import Tree
from tests.grids import thinned
from tests.lade.both import ONE, THREE, both, same_as_generate
from tests.lade.targets.test_tree import check_cache, make_draft, path_to, random_parents
from tests.lade.tiny import FAMILIES, BatchDrafter, tiny_model

FIXED = lade.Config(execution="fixed", max_draft_tokens=8)
LONG: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


def widths_of(model: Any) -> list[int]:
    """Tokens of every forward from now on."""
    seen: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return seen


# --- the same text --------------------------------------------------------------------------


@pytest.mark.parametrize("family", thinned(FAMILIES, "llama", "gemma3_text"))
def test_the_text_is_that_of_generate(family: str) -> None:
    model = tiny_model(family)
    for prompt in (ONE, THREE):
        for do_sample in (False, True):
            _, got = both(model, prompt, config=FIXED, do_sample=do_sample, **LONG)
            assert got.stats.mean_accepted_tokens > 1.3


def test_steps_are_held_against_the_models_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """What both sides of a check had would be noticed by none."""
    model = tiny_model("llama", seed=1)
    both(model, ONE, config=FIXED, accept=0.9, **LONG)  # which checks it
    assert profile_of(model).results[("tree", "dynamic", False, WIDTHS)].attention
    profile_of(model).first_check = 0
    attended = packed._attended

    def wrong(query: Tensor, *args: Any) -> Tensor:
        return attended(1.5 * query, *args)

    monkeypatch.setattr(packed, "_attended", wrong)
    with pytest.warns(lade.VerificationWarning, match="differ from those for the same token alone"):
        both(model, ONE, config=FIXED, accept=0.9, may_fail=True, **LONG)


@pytest.mark.parametrize("family", thinned(FAMILIES, "llama", "deepseek_v3"))
def test_our_own_attention_gives_that_text_too(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is tried first on CUDA; here in plain torch."""
    monkeypatch.setattr(selfcheck, "_attentions_for", lambda *args: [TREE_ATTENTION])
    model = tiny_model(family)
    for prompt in (ONE, THREE):
        both(model, prompt, config=FIXED, do_sample=False, **LONG)
    for is_padded in (False, True):
        chosen = choose_verification(model, is_padded=is_padded, execution="fixed")
        assert (chosen.verification, chosen.execution, chosen.attention) == (
            "tree",
            "fixed",
            TREE_ATTENTION,
        )


def test_rows_leave_and_come_back() -> None:
    model = tiny_model("gemma3_text")
    for seed in range(6):
        both(model, THREE, config=FIXED, seed=seed, num_return_sequences=2, max_new_tokens=30)


def test_a_lookahead_window_and_rejection_sampling_run_in_fixed_shapes() -> None:
    model = tiny_model("llama")
    same(model, lade.Config(execution="fixed", lookahead=lade.Lookahead(3, 4)))
    options = {**GREEDY, "do_sample": True, "temperature": 0.2}
    texts = []
    for execution in ("eager", "fixed"):
        torch.manual_seed(0)
        config = lade.Config(execution=execution, acceptance="rejection", max_draft_tokens=7)
        texts.append(lade.generate(model, ONE, config=config, **options))
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    "family", thinned(["llama", "deepseek_v3", "mistral", "gemma3_text"], "llama", "gemma3_text")
)
def test_a_node_has_the_logits_of_its_path_and_a_commit_leaves_a_fresh_cache(family: str) -> None:
    model = tiny_model(family, seed=2)
    workspace_store = WorkspaceStore()
    prompts = [[5, 9, 11, 5, 9], [7, 7, 3, 2, 8]]

    @settings(max_examples=15, deadline=None)
    @given(steps=st.lists(st.tuples(random_parents, st.integers(0, 99)), min_size=2, max_size=6))
    @torch.no_grad()
    def check(steps: list[tuple[list[int], int]]) -> None:
        ids, layout = torch.tensor(prompts), tree_layout(model)
        target = FixedTarget(
            model, ids, {"use_cache": True}, layout, 60, settings=StepSettings(workspace_store)
        )
        target.prefill()
        committed = [[*prompt] for prompt in prompts]
        for (parents, leaf), (others, other_leaf) in zip(steps[::2], steps[1::2], strict=False):
            drafts = [make_draft(parents, 0), make_draft(others, 1)]
            trees = [Tree.build(8, draft) for draft in drafts]
            logits = target.forward(target.inputs(trees)).logits
            assert logits.shape[1] in WIDTHS
            paths = []
            for row, (draft, end) in enumerate(zip(drafts, (leaf, other_leaf), strict=True)):
                path = path_to(draft, end % (len(draft) + 1))
                committed[row] += [trees[row].token_ids[node] for node in path]
                alone = model(torch.tensor([committed[row]]), use_cache=False).logits[0, -1]
                torch.testing.assert_close(logits[row, path[-1]], alone, rtol=1e-5, atol=1e-5)
                paths.append(path)
            target.commit(paths)
        for row, of_row in enumerate(committed):
            check_cache(model, target, row, of_row)
        target.close()
        target.release()

    check()
    assert len(workspace_store) == 1


# --- shapes ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("trusted")
def test_forwards_have_few_widths_and_are_filled_with_nodes() -> None:
    model = tiny_model("llama")
    seen = widths_of(model)
    answer = model.generate(ONE, **{**GREEDY, "max_new_tokens": 100}, eos_token_id=None)
    seen.clear()
    drafter = BatchDrafter(answer.tolist(), np.random.default_rng(0), 0.8)
    costs = {1: 1.0, 2: 1.01, 4: 1.02, 6: 1.03, 16: 2.0}  # five nodes and a root are best
    config = lade.Config(execution="fixed", step_costs=costs)
    got = lade.generate(
        *(model, ONE),
        **{**GREEDY, "max_new_tokens": 100, "eos_token_id": None},
        drafter=drafter,
        config=config,
        return_dict_in_generate=True,
    )
    assert torch.equal(got.sequences, answer)
    assert {*seen[-got.stats.num_steps :]} <= {*WIDTHS}
    # Eight tokens cost what six do here, and so two nodes more are verified.
    assert got.stats.draft_tokens_per_step > 4


@given(st.integers(0, 10**6))
def test_attention_runs_over_at_most_a_quarter_more(num_slots: int) -> None:
    assert num_slots <= slots_for(num_slots) <= max(256, 1.25 * num_slots + 1)
    assert slots_for(slots_for(num_slots)) == slots_for(num_slots)


def test_widths_are_padded_up() -> None:
    model = tiny_model("llama")
    target = FixedTarget(
        *(model, ONE, {"use_cache": True}, tree_layout(model), 9),
        settings=StepSettings(WorkspaceStore(), widths=(1, 4, 6)),
    )
    assert [target.width_of(n) for n in (1, 2, 4, 5, 6, 7, 13)] == [1, 4, 4, 6, 6, 12, 18]


def test_a_text_that_outgrows_its_memory_goes_on_in_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lade.gpu.fixed._FIRST_NEW", 0)
    model = tiny_model("mistral")
    both(model, THREE, config=FIXED, max_new_tokens=300, do_sample=False, eos_token_id=None)


# --- memory that is kept --------------------------------------------------------------------


def same(model: Any, config: lade.Config = FIXED, **options: Any) -> Any:
    """Compare the tokens of lade with those of `generate`; return lade's output."""
    options = {**GREEDY, "return_dict_in_generate": False, **options}
    return same_as_generate(model, ONE, config=config, **options)[1]


def generate(model: Any, prompt: Tensor = ONE, **options: Any) -> Any:
    return lade.generate(model, prompt, config=FIXED, **{**GREEDY, **options})


def kept(model: Any) -> Any:
    return profile_of(model).workspace_store._kept[-1]


def test_the_next_call_uses_the_memory_of_the_last() -> None:
    model = tiny_model("llama")
    same(model)
    first = kept(model)
    addresses = first.cache.addresses
    same(model)
    assert kept(model) is first
    assert first.cache.addresses == addresses
    generate(model, THREE)  # other rows
    assert kept(model) is not first
    same(model)
    assert kept(model) is first  # batch sizes that take turns keep theirs
    assert len(profile_of(model).workspace_store) == 2


def test_of_several_workspaces_those_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    store = profile_of(model).workspace_store
    for rows in range(1, 7):
        generate(model, ONE.repeat(rows, 1))
    assert [workspace.key.num_rows for workspace in store._kept] == [3, 4, 5, 6]
    most = store._kept[0].cache.num_bytes + store._kept[1].cache.num_bytes
    monkeypatch.setattr("lade.gpu.workspace._MOST_KEPT_BYTES", most)
    generate(model, ONE.repeat(3, 1))
    assert [workspace.key.num_rows for workspace in store._kept] == [3]  # with 6 it is too much
    generate(model, ONE.repeat(4, 1))
    assert [workspace.key.num_rows for workspace in store._kept] == [3, 4]


@pytest.mark.exhaustive
def test_a_conversation_that_grows_keeps_its_memory_where_there_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: all slots that a text may ever need, in a tenth of what is free."""
    model = tiny_model("llama", max_position_embeddings=4096)
    monkeypatch.setattr("lade.gpu.fixed._FIRST_NEW", 0)

    def turns(num_bytes: int) -> tuple[int, int]:
        """Return how many memories five turns used, and the slots of the last."""
        monkeypatch.setattr("lade.gpu.fixed.spare_bytes", lambda device: num_bytes)
        lade.release(model)
        addresses, prompt = set(), ONE
        for _ in range(5):
            prompt = torch.cat([generate(model, prompt), ONE.repeat(1, 40)], dim=1)
            addresses.add(kept(model).cache.addresses)
        return len(addresses), kept(model).cache.room

    num_memories, room = turns(0)
    assert num_memories > 2
    of_slot = kept(model).cache.num_bytes // room
    assert turns(4096 * of_slot) == (1, 4096)
    assert turns(2048 * of_slot) == (1, 2048)
    assert turns(10**9) == (1, 4096)


def test_compiled_steps_take_no_spare_slots_that_they_would_attend_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lade.gpu.fixed.spare_bytes", lambda device: 10**9)
    model = tiny_model("llama", max_position_embeddings=4096)
    rooms = []
    for call in (None, model):
        target = FixedTarget(
            *(model, ONE, {"use_cache": True}, tree_layout(model), 9),
            settings=StepSettings(WorkspaceStore(), call=call),
        )
        target.prefill()
        rooms.append(target.cache.room)
    assert rooms == [4096, 256]


def test_it_is_given_back_on_demand_and_goes_with_the_model() -> None:
    model = tiny_model("llama")
    generate(model)
    cache = weakref.ref(kept(model).cache)
    lade.release(model)
    gc.collect()
    assert cache() is None
    lade.release(model)  # nothing there
    lade.release(tiny_model("llama"))  # never used
    generate(model)
    cache = weakref.ref(kept(model).cache)
    del model
    gc.collect()
    assert cache() is None


def test_memory_that_is_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lade.gpu.workspace._MOST_KEPT_BYTES", 1000)
    model = tiny_model("llama")
    generate(model)
    assert len(profile_of(model).workspace_store) == 0


def test_a_call_inside_of_another_has_memory_of_its_own() -> None:
    model = tiny_model("llama")
    expected = model.generate(ONE, **GREEDY)
    inner: list[Tensor] = []
    got = generate(model, on_step=lambda step: inner.append(generate(model)))
    assert torch.equal(got, expected)
    assert all(torch.equal(each, expected) for each in inner)


def test_a_cache_that_is_returned_is_the_callers() -> None:
    model = tiny_model("gemma3_text")
    options: dict[str, Any] = {"return_dict_in_generate": True, "eos_token_id": None}
    plain = model.generate(ONE, **GREEDY, **options)
    got = generate(model, **options)
    generate(model, ONE + 3, max_new_tokens=20)  # writes where the first call wrote
    longer = torch.cat([plain.sequences, torch.tensor([[3, 4]])], dim=1)
    expected = model.generate(longer, past_key_values=plain.past_key_values, **GREEDY)
    assert torch.equal(generate(model, longer, past_key_values=got.past_key_values), expected)


def test_memory_taken_in_inference_mode_serves_outside_of_it() -> None:
    model = tiny_model("mistral")
    with torch.inference_mode():
        same(model)
    same(model)
    with torch.inference_mode():
        same(model)


def test_calls_in_other_precisions_have_memory_of_their_own() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    expected = generate(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        generate(model)
    assert torch.equal(generate(model), expected)


def test_what_is_told_the_device_stays_until_it_was_copied() -> None:
    """A step that nobody waits for, as where a cache is filled up, may still be to come."""
    model = tiny_model("llama")
    inputs = StaticInputs(StepShape(1, 2, (256,), False, (), (), None), model.device)
    waited: list[int] = []
    inputs._is_sent = SimpleNamespace(synchronize=lambda: waited.append(1))
    inputs.host["token_ids"][0, 0] = 3
    assert waited == [1]


def test_nothing_is_left_of_numbers_that_are_none() -> None:
    """What a mask hides is multiplied by 0, and NaN times 0 is NaN."""
    model = tiny_model("llama")
    generate(model)
    for store in kept(model).cache._storage:
        store.whole.fill_(float("nan"))
    kept(model).cache.reset()
    same(model)


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
def test_a_call_that_is_broken_off_leaves_its_memory_to_the_next(kind: type[BaseException]) -> None:
    model = tiny_model("llama")
    expected = generate(model)
    first = kept(model)

    def fail(step: Any) -> None:
        raise kind("mine")

    with pytest.raises(kind):
        generate(model, on_step=fail)
    assert kept(model) is first
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(generate(model), expected)


# --- where it is not possible ---------------------------------------------------------------


def test_what_has_no_fixed_shape_is_run_eagerly_and_said_once(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model = tiny_model("llama", attention="eager")
    options = {**GREEDY, "output_attentions": True}
    with pytest.warns(lade.EagerExecutionWarning, match="attentions were asked for"):
        expected, got = same_as_generate(model, ONE, config=FIXED, **options)
    assert len(got.attentions) == len(expected.attentions)
    same_as_generate(model, ONE, config=FIXED, **options)  # another warning would be an error


def test_a_check_that_fails_leaves_trees_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    right = TreeCache.fix

    def wrong(self: TreeCache, slots: Any, length: Any = None) -> None:
        right(
            self, {window: each._replace(of_new=each.of_new * 0) for window, each in slots.items()}
        )

    monkeypatch.setattr(TreeCache, "fix", wrong)
    with pytest.warns(lade.EagerExecutionWarning, match="not of fixed shape: its logits differ"):
        same(model, return_dict_in_generate=True)
    chosen = choose_verification(model, execution="fixed")
    assert (chosen.verification, chosen.execution) == ("tree", "eager")


def test_graphs_are_refused_where_there_are_none() -> None:
    model = tiny_model("llama")
    with pytest.raises(lade.UnsupportedOptionError, match="CUDA graphs need a CUDA device"):
        lade.generate(model, ONE, config=lade.Config(execution="graphs"), **GREEDY)
    with pytest.raises(ValueError, match="execution"):
        lade.Config(execution="quick")  # type: ignore[arg-type]


def test_other_ways_of_verifying_know_no_shapes() -> None:
    model = tiny_model("llama")
    config = lade.Config(execution="fixed", verification="chain")
    with pytest.warns(lade.EagerExecutionWarning, match="it verifies drafts by 'chain'"):
        same(model, config)


# --- out of memory --------------------------------------------------------------------------


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Let every allocation of more slots than `most` fail."""
    limit = {"most": 10**9, "refused": 0}
    real = torch.Tensor.new_zeros

    def new_zeros(self: Tensor, shape: Any, **options: Any) -> Tensor:
        if len(shape) == 5 and shape[3] > limit["most"]:
            limit["refused"] += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(self, shape, **options)

    monkeypatch.setattr(torch.Tensor, "new_zeros", new_zeros)
    return limit


def test_less_memory_is_taken_where_there_is_not_enough(little_memory: dict[str, int]) -> None:
    model = tiny_model("llama")
    choose_verification(model, execution="fixed")
    little_memory["most"] = 80
    same(model, max_new_tokens=60, eos_token_id=None)
    assert little_memory["refused"] > 2


def test_what_cannot_be_held_at_all_is_said(little_memory: dict[str, int]) -> None:
    model = tiny_model("llama")
    options = {**GREEDY, "max_new_tokens": 60, "eos_token_id": None}
    expected = model.generate(ONE, **options)
    choose_verification(model, execution="fixed")
    little_memory["most"] = 40
    message = r"no memory is left for the keys or values of \d+ tokens in 3 layers and 1 rows"
    with pytest.warns(lade.VerificationWarning, match=message):
        got = generate(model, **options)
    assert torch.equal(got, expected)
    little_memory["most"] = 10**9
    assert torch.equal(generate(model, **options), expected)


def test_a_cache_that_cannot_grow_loses_nothing(little_memory: dict[str, int]) -> None:
    cache = TreeCache([LayerKind("full")], 4, 8, is_fixed=True)
    states = torch.randn(1, 2, 8, 4)
    cache.update(states, states, 0)
    cache.keep_all()
    little_memory["most"] = 8
    with pytest.raises(torch.OutOfMemoryError, match="keys or values of 12 tokens"):
        cache.reserve(4)
    assert torch.equal(cache.layers[0].keys, states)
