"""A slice of the random comparison of `tests/fuzz`, and that it catches what it is there for."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lade
from tests.fuzz import run
from tests.fuzz.cases import Case, draw_case
from tests.fuzz.compare import Door, call_lade, call_plain, compare
from tests.fuzz.shrink import program, shrink

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


def summary_of(num_cases: int, architectures: Sequence[str]) -> run.Summary:
    summary = run.Summary()
    for outcome in run.run_cases(SEED, range(num_cases), architectures=architectures):
        summary.add(outcome)
        if outcome.kind == "mismatch":
            case = draw_case(SEED, outcome.index, architectures)
            pytest.fail(run.explain(f"Case {outcome.index}", case, call_lade))
    assert summary.kinds["tie"] <= 1
    assert summary.kinds["not built"] == summary.kinds["unsteady"] == 0
    return summary


def test_random_calls_return_what_plain_generate_returns() -> None:
    summary = summary_of(NUM_CASES, FAMILIES)
    assert summary.kinds["same"] > NUM_CASES / 2
    # The comparison means nothing unless drafts are both accepted and rejected.
    assert summary.with_accepted > summary.with_stats / 4
    assert 0.02 < summary.as_dict()["acceptance_rate"] < 0.98


def test_random_calls_of_any_architecture_return_what_plain_generate_returns() -> None:
    summary = summary_of(NUM_CASES_OF_ARCHITECTURES, ARCHITECTURES)
    assert summary.kinds["same"] > NUM_CASES_OF_ARCHITECTURES / 2
    assert summary.architectures.keys() == set(ARCHITECTURES)
    assert {"tree", "rows", "snapshot", "plain"} <= summary.ways.keys()
    assert {"chain, as asked", "plain, as asked"} <= summary.ways.keys()
    assert summary.with_accepted > summary.with_stats / 4


def test_a_case_depends_on_its_number_alone() -> None:
    assert draw_case(3, 7) == draw_case(3, 7)
    assert draw_case(3, 7) != draw_case(3, 8)
    assert draw_case(3, 7) != draw_case(4, 7)
    assert draw_case(3, 7, FAMILIES).architecture == ""
    assert draw_case(3, 7, ["bloom"]).architecture == "bloom"


def test_plain_generate_equals_itself_and_rarely_refuses_a_case() -> None:
    verdicts = [compare(draw_case(5, index, FAMILIES), call_plain) for index in range(60)]
    verdicts += [compare(draw_case(5, index, ["bloom"]), call_plain) for index in range(10)]
    assert [verdict.differences for verdict in verdicts if verdict.kind != "same"] == []
    assert sum(verdict.error != "" for verdict in verdicts) < 6


# --- planted faults -------------------------------------------------------------------------


def drops_the_last_token(model: Any, door: str, arguments: dict[str, Any], given: Any) -> Any:
    return _with_ids(call_plain(model, door, arguments, given), lambda ids: ids[:, :-1])


def swaps_rows(model: Any, door: str, arguments: dict[str, Any], given: Any) -> Any:
    return _with_ids(call_plain(model, door, arguments, given), lambda ids: ids.flip(0))


def _with_ids(output: Any, change: Any) -> Any:
    if torch.is_tensor(output):
        return change(output)
    output.sequences = change(output.sequences)
    return output


def draws_once_more(model: Any, door: str, arguments: dict[str, Any], given: Any) -> Any:
    output = call_plain(model, door, arguments, given)
    torch.rand(())
    return output


def draws_from_numpy(model: Any, door: str, arguments: dict[str, Any], given: Any) -> Any:
    np.random.random()
    return call_plain(model, door, arguments, given)


def forgets_a_put(model: Any, door: str, arguments: dict[str, Any], given: Any) -> Any:
    streamer = arguments.get("streamer")
    if streamer is not None:
        put, num_puts = streamer.put, iter(range(1000))
        streamer.put = lambda value: put(value) if next(num_puts) != 1 else None
    return call_plain(model, door, arguments, given)


def never_ends_the_stream(model: Any, door: str, arguments: dict[str, Any], given: Any) -> Any:
    if "streamer" in arguments:
        arguments["streamer"].end = lambda: None
    return call_plain(model, door, arguments, given)


def asks_processors_twice(model: Any, door: str, arguments: dict[str, Any], given: Any) -> Any:
    processors = arguments.get("logits_processor")
    if processors:
        arguments["logits_processor"] = [_Twice(processor) for processor in processors]
    return call_plain(model, door, arguments, given)


class _Twice:
    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        self.processor(input_ids, scores.clone())
        return self.processor(input_ids, scores)


def rounds_scores(model: Any, door: str, arguments: dict[str, Any], given: Any) -> Any:
    output = call_plain(model, door, arguments, given)
    for name in ("scores", "logits"):
        if getattr(output, name, None) is not None:
            output[name] = tuple(score.bfloat16().float() for score in output[name])
    return output


def returns_a_shorter_cache(model: Any, door: str, arguments: dict[str, Any], given: Any) -> Any:
    output = call_plain(model, door, arguments, given)
    if getattr(output, "past_key_values", None) is not None:
        output.past_key_values.crop(output.past_key_values.get_seq_length() - 1)
    return output


def forgets_an_option(model: Any, door: str, arguments: dict[str, Any], given: Any) -> Any:
    arguments.pop("repetition_penalty", None)
    return call_plain(model, door, arguments, given)


def raises_another_error(model: Any, door: str, arguments: dict[str, Any], given: Any) -> Any:
    try:
        return call_plain(model, door, arguments, given)
    except Exception as error:
        raise KeyError from error


def returns_nothing(model: Any, door: str, arguments: dict[str, Any], given: Any) -> Any:
    return None


def changes_the_mask(model: Any, door: str, arguments: dict[str, Any], given: Any) -> Any:
    output = call_plain(model, door, arguments, given)
    if "attention_mask" in arguments:
        arguments["attention_mask"][:, -1] = 2
    return output


FAULTS: list[Door] = [
    drops_the_last_token,
    swaps_rows,
    draws_once_more,
    draws_from_numpy,
    forgets_a_put,
    never_ends_the_stream,
    asks_processors_twice,
    rounds_scores,
    returns_a_shorter_cache,
    forgets_an_option,
    changes_the_mask,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault: Door) -> None:
    found = (compare(draw_case(2, index, FAMILIES), fault) for index in range(400))
    verdict = next(verdict for verdict in found if verdict.kind == "mismatch")
    assert verdict.differences


def test_another_error_than_that_of_plain_generate_is_found() -> None:
    options = {"max_new_tokens": "3", "do_sample": "False", "num_return_sequences": "2"}
    case = Case({"family": "llama", "seed": 0, "vocab_size": 12}, 0, ((5, 6),), options=options)
    assert compare(case, call_plain).kind == "same"
    assert compare(case, call_plain).error == "ValueError"
    assert compare(case, raises_another_error).kind == "mismatch"
    assert compare(case, returns_nothing).kind == "mismatch"


# --- what is no mistake ---------------------------------------------------------------------


def of_architecture(name: str, **lade_given: str) -> Case:
    model = {"architecture": name, "seed": 0, "attention": None, "dtype": "float64"}
    options = {"max_new_tokens": "2", "do_sample": "False"}
    return Case(model, 0, ((5,),), options=options, lade=lade_given)


def test_plain_decoding_that_depends_on_the_call_before_is_told_apart() -> None:
    # It keeps its state in the module, and a prompt of one token goes on from it.
    verdict = compare(of_architecture("recurrent_gemma"))
    assert verdict.kind == "unsteady"
    assert verdict.way == "plain"
    assert compare(of_architecture("bloom"), swaps_tokens).kind == "mismatch"


def swaps_tokens(model: Any, door: str, arguments: dict[str, Any], given: Any) -> Any:
    return _with_ids(call_plain(model, door, arguments, given), lambda ids: ids.flip(1))


def test_a_way_that_is_not_exact_may_be_refused_where_it_was_asked_for_alone() -> None:
    refused = compare(of_architecture("bloom", config="lade.Config(target='tree')"))
    assert refused.kind == "refused"
    assert refused.reason.startswith("… cannot verify drafts by 'tree'")
    verdict = compare(of_architecture("bloom", config="lade.Config(target='chain')"))
    assert (verdict.kind, verdict.way) == ("same", "chain, as asked")
    assert compare(of_architecture("bloom"), refuses).kind == "mismatch"


def refuses(model: Any, door: str, arguments: dict[str, Any], given: Any) -> Any:
    raise lade.UnsupportedModelError("bloom cannot verify drafts by 'tree': no reason")


def test_what_cannot_be_built_is_counted_apart() -> None:
    summary = run.Summary()
    (outcome,) = run.run_cases(0, [0], architectures=["musicgen"])
    summary.add(outcome)
    assert summary.as_dict()["num_not_built"] == 1
    assert summary.as_dict()["not_built"].keys() == {"musicgen"}


# --- what is printed ------------------------------------------------------------------------


def first_failing(fault: Door, architectures: Sequence[str]) -> Case:
    cases = (draw_case(2, index, architectures) for index in range(100))
    return next(case for case in cases if compare(case, fault).kind == "mismatch")


@pytest.mark.parametrize("architectures", [FAMILIES, ["bloom"]], ids=["families", "bloom"])
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


def test_every_case_can_be_printed_as_a_program() -> None:
    for index in range(200):
        architectures = FAMILIES if index % 2 else ARCHITECTURES
        compile(program(draw_case(6, index, architectures), "Any case"), "printed", "exec")


def test_the_command_sums_up_and_tells_of_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # In this process: the planted fault would not reach a worker.
    monkeypatch.setitem(run.DOORS, "lade", drops_the_last_token)
    out = tmp_path / "results" / "fuzz.json"
    command = ["--cases", "4", "--processes", "0", "--out", str(out), "--stop-after", "1"]
    command += ["--architectures", "mamba2,llama"]
    assert run.main([*command, "--no-shrink"]) == 1
    result = json.loads(out.read_text())
    assert result["num_mismatches"] == 1
    assert not result["complete"]
    assert "assert not found, found" in capsys.readouterr().out
    assert run.main([*command, "--against", "plain"]) == 0
    result = json.loads(out.read_text())
    assert result["complete"]
    assert result["num_cases"] == result["num_same"] == 4
    assert result["only_architectures"] == ["mamba2", "llama"]
    assert sum(counts["cases"] for counts in result["architectures"].values()) == 4
    assert result["versions"]["python"] == sys.version.split()[0]
    assert run.main(["--only", "2", "--against", "plain", "--architectures", ""]) == 0
    assert "# same" in capsys.readouterr().out
