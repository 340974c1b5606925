"""A slice of the random comparison of `tests/fuzz`, and that it catches what it is there for."""

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lade
from tests.fuzz import run
from tests.fuzz.cases import Case, draw_case
from tests.fuzz.compare import Door, call_lade, call_plain, compare
from tests.fuzz.parts import PACKED
from tests.fuzz.shrink import program, shrink
from tests.grids import thinned

SEED = 1
NUM_CASES = 200
NUM_CASES_OF_ARCHITECTURES = 120
FAMILIES: tuple[str, ...] = ()  # draw from those of `tests/fuzz/parts.py` alone
ARCHITECTURES = (
    *("mistral", "gemma3_text", "llama4_text"),  # windows, chunks
    *("bloom", "gpt_neo", "falcon-alibi", "mpt"),  # masks of their own, ALiBi
    *("mamba", "mamba2", "rwkv", "xlstm", "jamba", "qwen3_next", "lfm2"),  # states, also in part
    *("openai-gpt", "bert", "rembert", "gpt2", "ctrl"),  # no cache, token types
    *("deepseek_v3", "gpt_oss", "whisper"),
)


@pytest.fixture(autouse=True)
def _reproducible() -> Iterator[None]:
    with run.deterministic():
        yield


def summary_of(cases: range, architectures: Sequence[str]) -> run.Summary:
    summary = run.Summary()
    for outcome in run.run_cases(SEED, cases, architectures=architectures):
        summary.add(outcome)
        if outcome.verdict.kind == "mismatch":
            case = draw_case(SEED, outcome.index, architectures)
            pytest.fail(run.explain(f"Case {outcome.index}", case, call_lade))
    assert summary.kinds["tie"] <= 1
    assert summary.kinds["not built"] == summary.kinds["unsteady"] == 0
    return summary


@pytest.mark.parametrize("cases", thinned([range(18), range(18, NUM_CASES)], range(18)))
def test_random_calls_return_what_plain_generate_returns(cases: range) -> None:
    summary = summary_of(cases, FAMILIES)
    assert summary.kinds["same"] > len(cases) / 2
    # The comparison means nothing unless drafts are both accepted and rejected.
    assert summary.with_accepted > summary.with_stats / 4
    assert 0.02 < summary.as_dict()["acceptance_rate"] < 0.98


@pytest.mark.exhaustive
def test_random_calls_of_any_architecture_return_what_plain_generate_returns() -> None:
    summary = summary_of(range(NUM_CASES_OF_ARCHITECTURES), ARCHITECTURES)
    assert summary.kinds["same"] > NUM_CASES_OF_ARCHITECTURES / 2
    assert summary.architectures.keys() == set(ARCHITECTURES)
    assert {"tree", "chain", "snapshot", "plain"} <= summary.verifications.keys()
    assert {"chain, as asked", "plain, as asked"} <= summary.verifications.keys()
    assert summary.with_accepted > summary.with_stats / 4


@pytest.mark.exhaustive
def test_random_calls_of_packed_models_return_what_those_made_whole_return() -> None:
    summary = summary_of(range(60), PACKED)
    assert summary.kinds["same"] > 40
    assert summary.doors["itself"] > 5
    assert summary.with_accepted > summary.with_stats / 5


# --- planted faults -------------------------------------------------------------------------


def faulty(
    before: Callable[[Any, dict[str, Any], Any], object] = lambda model, arguments, given: None,
    after: Callable[[Any], Any] = lambda output: output,
) -> Door:
    """Return a door to plain `generate` that changes what is given to it, or what it returns."""

    def call(model: Any, door: str, arguments: dict[str, Any], given: Any) -> Any:
        before(model, arguments, given)
        return after(call_plain(model, door, arguments, given))

    return call


def on_ids(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    def changed(output: Any) -> Any:
        if torch.is_tensor(output):
            return change(output)
        output.sequences = change(output.sequences)
        return output

    return changed


def draws_once_more(output: Any) -> Any:
    torch.rand(())
    return output


def asks_processors_twice(model: Any, arguments: dict[str, Any], given: Any) -> None:
    def twice(processor: Any, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        processor(input_ids, scores.clone())
        return processor(input_ids, scores)

    if arguments.get("logits_processor"):
        arguments["logits_processor"] = [partial(twice, p) for p in arguments["logits_processor"]]


def rounds_scores(output: Any) -> Any:
    for name in ("scores", "logits"):
        if getattr(output, name, None) is not None:
            output[name] = tuple(score.bfloat16().float() for score in output[name])
    return output


def returns_a_shorter_cache(output: Any) -> Any:
    if getattr(output, "past_key_values", None) is not None:
        output.past_key_values.crop(output.past_key_values.get_seq_length() - 1)
    return output


def changes_the_mask(model: Any, door: str, arguments: dict[str, Any], given: Any) -> Any:
    output = call_plain(model, door, arguments, given)
    if "attention_mask" in arguments:
        arguments["attention_mask"][:, -1] = 2
    return output


drops_the_last_token = faulty(after=on_ids(lambda ids: ids[:, :-1]))
FAULTS: dict[str, Door] = {
    "drops the last token": drops_the_last_token,
    "draws once more": faulty(after=draws_once_more),
    "asks processors twice": faulty(asks_processors_twice),
    "rounds scores": faulty(after=rounds_scores),
    "returns a shorter cache": faulty(after=returns_a_shorter_cache),
    "changes the mask": changes_the_mask,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(fault: Door) -> None:
    found = (compare(draw_case(2, index, FAMILIES), fault) for index in range(400))
    verdict = next(verdict for verdict in found if verdict.kind == "mismatch")
    assert verdict.differences


def raises_another_error(model: Any, door: str, arguments: dict[str, Any], given: Any) -> Any:
    try:
        return call_plain(model, door, arguments, given)
    except Exception as error:
        raise KeyError from error


def test_another_error_than_that_of_plain_generate_is_found() -> None:
    options = {"max_new_tokens": "3", "do_sample": "False", "num_return_sequences": "2"}
    case = Case({"family": "llama", "seed": 0, "vocab_size": 12}, 0, ((5, 6),), options=options)
    assert compare(case, call_plain).kind == "same"
    assert compare(case, call_plain).error == "ValueError"
    assert compare(case, raises_another_error).kind == "mismatch"
    assert compare(case, lambda *_: None).kind == "mismatch"


# --- planted faults around a call -------------------------------------------------------------


LLAMA = {"family": "llama", "seed": 1, "vocab_size": 40, "hidden_size": 32, "sharpness": 1.0}
ALL_RIGHT = {
    "drafter": "ScriptDrafter(answer, 40, 0.8, 0)",
    "config": "lade.Config(max_draft_tokens=8, strict_drafter=True)",
}
WITH_A_POOL = {"pool": "pool_of(answer)", "config": ALL_RIGHT["config"]}


def changed(*events: str, dtype: str = "float64", **fields: Any) -> Case:
    """Return a case whose model was used before these events."""
    options = {"max_new_tokens": "40", "do_sample": "False", "eos_token_id": "39"}
    model = {**LLAMA, "attention": "sdpa", "dtype": dtype}
    used = "used(model, [[5, 6, 5, 6, 5]])"
    fields = {"rows": ((5, 6, 7, 5, 6),), "options": options, "lade": ALL_RIGHT, **fields}
    return Case(model, 0, events=(used, *events), **fields)


def warns(text: str, category: type[Warning]) -> Door:
    return faulty(lambda *_: warnings.warn(text, category, stacklevel=2))


AROUND: list[tuple[Door, str]] = [
    (
        faulty(lambda _, arguments, given: given["pool"].open_sequence()),
        "the pool has 1 sequences open",
    ),
    (
        faulty(lambda model, *_: model.model.norm.train()),
        "the training flag of a module was changed in place",
    ),
    (
        faulty(lambda model, *_: setattr(model.config, "note", "was here")),
        "the model's config was changed in place",
    ),
    (warns("drafts are wrong", lade.VerificationWarning), "lade warned: drafts are wrong"),
    (
        warns("the drafter failed", lade.DrafterWarning),
        "plain raised nothing, lade raised DrafterWarning",
    ),
]


@pytest.mark.parametrize(("fault", "said"), AROUND, ids=[said for _, said in AROUND])
def test_what_a_call_leaves_behind_is_found(fault: Door, said: str) -> None:
    verdict = compare(changed(lade=WITH_A_POOL), fault)
    assert verdict.kind == "mismatch"
    assert verdict.differences[0].startswith(said)


def test_forwards_that_are_made_to_fail_are_no_mistake() -> None:
    case = changed("failing(model, 30)")
    assert case.may_fail
    assert compare(case).kind == "same"


# --- what is no mistake ---------------------------------------------------------------------


def of_architecture(name: str, **lade_given: str) -> Case:
    model = {"architecture": name, "seed": 0, "attention": None, "dtype": "float64"}
    options = {"max_new_tokens": "2", "do_sample": "False"}
    return Case(model, 0, ((5,),), options=options, lade=lade_given)


def test_plain_decoding_that_depends_on_the_call_before_is_told_apart() -> None:
    # It keeps its state in the module, and a prompt of one token goes on from it.
    verdict = compare(of_architecture("recurrent_gemma"))
    assert verdict.kind == "unsteady"
    assert verdict.verification == "plain"
    swaps_tokens = faulty(after=on_ids(lambda ids: ids.flip(1)))
    assert compare(of_architecture("bloom"), swaps_tokens).kind == "mismatch"


def test_a_way_that_is_not_exact_may_be_refused_where_it_was_asked_for_alone() -> None:
    refused = compare(of_architecture("bloom", config="lade.Config(verification='tree')"))
    assert refused.kind == "refused"
    assert refused.reason.startswith("… cannot verify drafts by 'tree'")
    verdict = compare(of_architecture("bloom", config="lade.Config(verification='chain')"))
    assert (verdict.kind, verdict.verification) == ("same", "chain, as asked")
    assert compare(of_architecture("bloom"), refuses).kind == "mismatch"


def refuses(model: Any, door: str, arguments: dict[str, Any], given: Any) -> Any:
    raise lade.UnsupportedModelError("bloom cannot verify drafts by 'tree': no reason")


# --- what is printed ------------------------------------------------------------------------


def first_failing(fault: Door, architectures: Sequence[str]) -> Case:
    cases = (draw_case(2, index, architectures) for index in range(100))
    return next(case for case in cases if compare(case, fault).kind == "mismatch")


@pytest.mark.parametrize("architectures", thinned([FAMILIES, ["bloom"]], FAMILIES))
def test_a_failing_case_is_made_small_and_printed_as_a_program_that_fails(
    architectures: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = shrink(
        first_failing(drops_the_last_token, architectures),
        lambda smaller: compare(smaller, drops_the_last_token).kind == "mismatch",
    )
    assert len(case.rows) == 1
    assert len(case.rows[0]) == 1
    assert case.options.keys() <= {"max_new_tokens", "max_length"}
    assert case.config == case.model_config == {}
    assert case.door == "generate"
    assert case.architecture == ("llama" if architectures else "")
    code = compile(program(case, "A planted fault"), "printed", "exec")

    def sound(model: Any, *place: Any, config: Any, **arguments: Any) -> Any:
        return model.generate(*place, **arguments)

    def faulty(model: Any, *place: Any, **arguments: Any) -> Any:
        return sound(model, *place, **arguments)[:, :-1]

    monkeypatch.setattr(lade, "generate", faulty)
    with pytest.raises(AssertionError):
        exec(code, {})
    monkeypatch.setattr(lade, "generate", sound)
    exec(code, {})


def test_the_command_sums_up_and_tells_of_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # In this process: the planted fault would not reach a worker.
    monkeypatch.setitem(run.DOORS, "lade", drops_the_last_token)
    out = tmp_path / "fuzz.json"
    command = ["--cases", "4", "--processes", "0", "--out", str(out)]
    command += ["--architectures", "mamba2,llama"]
    assert run.main([*command, "--no-shrink"]) == 1
    result = json.loads(out.read_text())
    assert result["num_mismatches"] > 0
    assert "assert verdict.kind" in capsys.readouterr().out
    assert run.main([*command, "--against", "plain"]) == 0
    result = json.loads(out.read_text())
    assert result["complete"]
    assert result["num_cases"] == result["num_same"] == 4
    assert result["only_architectures"] == ["mamba2", "llama"]
    assert sum(result["architectures"].values()) == 4
    assert result["versions"]["python"] == sys.version.split()[0]
    assert result["code"]
    assert run.main(["--only", "2", "--against", "plain", "--architectures", ""]) == 0
    assert "# same" in capsys.readouterr().out


def test_numbers_that_differ_in_float32_alone_are_rounding() -> None:
    """Where they differ in float64 as well it is a mismatch."""

    def off_in(*dtypes: torch.dtype) -> Door:
        def ours(model: Any, door: str, call: Any, given: Any) -> Any:
            output = call_plain(model, door, call, given)
            if model.dtype in dtypes:
                output.logits[3][0, 1] += 3e-3
            return output

        return ours

    options = {"max_new_tokens": "5", "output_logits": "True", "return_dict_in_generate": "True"}
    model = {"architecture": "llama", "seed": 0, "attention": None, "dtype": "float32"}
    case = Case(model, 0, ((5,),), options=options | {"do_sample": "False"})
    assert compare(case, off_in(torch.float32)).kind == "rounding"
    assert compare(case, off_in()).kind == "same"
    assert compare(case, off_in(torch.float32, torch.float64)).kind == "mismatch"
