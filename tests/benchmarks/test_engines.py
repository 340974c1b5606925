"""`python -m benchmarks engines`, against engines of a few lines in vLLM's place."""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.engines import agreement, command, methods
from benchmarks.engines.agreement import compare_drawn, same_distribution
from benchmarks.engines.job import Counters, EngineJob, Phase, PhaseResult, RequestAnswer
from benchmarks.engines.mending import FAULT, expand_batch_to_tokens
from benchmarks.engines.methods import METHODS, choose_methods
from benchmarks.engines.plan import DRAWS, EnginePlan
from benchmarks.engines.process import environment_of, run_job
from benchmarks.engines.report import as_json, rows_of, summarise, table, what_differs
from benchmarks.engines.worker import Engine
from lade.engines.options import PoolOptions
from lade.errors import LadeError, MissingExtraError

PLAN = EnginePlan("folder", "float32", [[1, 2], [3], [4]], [2, 1], 5, 2, 4)


def job(*phases: Phase, **named: Any) -> EngineJob:
    speculative_config = {"method": "ngram", "num_speculative_tokens": 4}
    return EngineJob("folder", "float32", 64, 2, speculative_config, {}, phases, **named)


def result(
    texts: Sequence[Sequence[int]],
    name: str = "2 at once, pass 1",
    steps: int | None = None,
    counters: Counters | None = None,
    sec: float = 2.0,
) -> PhaseResult:
    answers = [RequestAnswer([*text], steps or len(text), 0.5, 1.0) for text in texts]
    return PhaseResult(name, 2, sec, answers, counters or Counters())


# --- what is run ----------------------------------------------------------------------------


def test_methods_that_cannot_run_are_left_out_unless_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(methods, "find_spec", lambda name: None)
    reason = "the package arctic-inference is not installed"
    table = {"pool_prewarmed": "no table of the model is given"}
    names = ["plain", "ngram", "pool", "pool_private"]
    assert choose_methods(None, False) == (names, {"suffix": reason, **table})
    assert choose_methods(None, True) == ([*names, "pool_prewarmed"], {"suffix": reason})
    assert choose_methods("pool, plain", False) == (["pool", "plain"], {})
    with pytest.raises(LadeError, match="the method pool_prewarmed cannot run here: no table"):
        choose_methods("pool_prewarmed", False)
    with pytest.raises(LadeError, match=f"the method suffix cannot run here: {reason}"):
        choose_methods("plain,suffix", False)
    for text in ("", "plain,plain", "plain,nothing"):
        with pytest.raises(ValueError, match=r"expected --methods to be different ones of plain,"):
            choose_methods(text, False)
    with pytest.raises(MissingExtraError, match=r'pip install "lade-decoding\[vllm\]"'):
        methods.check_engine()


def test_all_methods_draft_the_same_number_of_tokens_at_most() -> None:
    configs = [method.config(6) for method in METHODS.values()]
    assert configs.count(None) == 1
    assert {config["num_speculative_tokens"] for config in configs if config} == {6}


def test_only_the_proposer_of_lade_gets_its_options() -> None:
    plan = replace(PLAN, options={"min_probability": 0.2}, table="a.safetensors")
    assert plan.job("ngram").additional_config == {}
    expected = {"lade": {"min_probability": 0.2, "sharing": "none"}}
    assert plan.job("pool_private").additional_config == expected
    assert plan.job("pool_prewarmed").additional_config["lade"]["prewarmed"] == "a.safetensors"
    for name, method in METHODS.items():
        options = method.additional_config({}, "a").get("lade")
        assert (options is None) == ("pool" not in name)
        assert options is None or PoolOptions.from_mapping(options).sharing == method.sharing


def test_drafters_begin_anew_with_every_number_of_requests_and_live_through_its_passes() -> None:
    phases = PLAN.phases()
    assert [(phase.name, phase.concurrency, phase.begins_anew) for phase in phases] == [
        ("2 at once, pass 1", 2, True),
        ("2 at once, pass 2", 2, False),
        ("1 at once, pass 1", 1, True),
        ("1 at once, pass 2", 1, False),
    ]


def test_a_job_leaves_room_for_the_longest_text_and_its_drafts_and_survives_json() -> None:
    plan = EnginePlan("folder", "float32", [[1, 2]], [2, 8], 5, 1, 4, questions=[[1] * 9])
    made = plan.job("ngram")
    assert (made.max_model_len, made.max_num_seqs) == (9 + 5 + 4 + 1, 8)
    assert made.phases[-1].name == DRAWS
    assert made.phases[-1].temperature == 1.0
    assert EngineJob.from_message(json.loads(json.dumps(made.as_message()))) == made
    done = result([[1, 2]])
    assert PhaseResult.from_message(json.loads(json.dumps(done.as_message()))) == done


# --- the engine -----------------------------------------------------------------------------


class FakeEngine:
    """Gives every request the tokens that follow its last one, two at a time behind a drafter."""

    seen: ClassVar[list["FakeEngine"]] = []

    def __init__(self, arguments: SimpleNamespace) -> None:
        self.arguments = arguments
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=9)
        )
        self.model_config = SimpleNamespace(enforce_eager=arguments.enforce_eager)
        self.requests: dict[str, list[int]] = {}  # tokens left to give
        self.most = 0
        self.num_resets = 0
        self.counts = [0, 0, 0]
        self.worker = SimpleNamespace(
            model_runner=SimpleNamespace(vllm_config="config", model="model")
        )
        if arguments.speculative_config is not None:
            self.worker.model_runner.drafter = FakeDrafter("config")
        FakeEngine.seen.append(self)

    @classmethod
    def from_engine_args(cls, arguments: SimpleNamespace) -> "FakeEngine":
        return cls(arguments)

    def add_request(self, name: str, prompt: dict[str, Any], settings: SimpleNamespace) -> None:
        last = prompt["prompt_token_ids"][-1]
        self.requests[name] = [*range(last + 1, last + 1 + settings.max_tokens)]
        self.most = max(self.most, len(self.requests))

    def step(self) -> list[SimpleNamespace]:
        drafter = getattr(self.worker.model_runner, "drafter", None)
        outputs = []
        for name, left in [*self.requests.items()]:
            size = 1 if drafter is None else 2
            given, self.requests[name] = left[:size], left[size:]
            if not self.requests[name]:
                del self.requests[name]
            is_done = name not in self.requests
            new = SimpleNamespace(token_ids=given)
            outputs.append(SimpleNamespace(request_id=name, outputs=[new], finished=is_done))
        if drafter is not None:
            drafter.propose([[1]] * len(outputs))
            for i, number in enumerate((1, 3, 1)):
                self.counts[i] += number * len(outputs)
        return outputs[::-1]

    def reset_prefix_cache(self) -> bool:
        self.num_resets += 1
        return True

    def get_metrics(self) -> list[SimpleNamespace]:
        names = ("drafts", "draft_tokens", "accepted_tokens")
        found = [
            SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=count)
            for name, count in zip(names, self.counts, strict=True)
        ]
        return [*found, SimpleNamespace(name="vllm:other", labels={})]

    def collective_rpc(self, method: Any) -> list[Any]:
        return [method(self.worker)]


class FakeDrafter:
    made: ClassVar[list["FakeDrafter"]] = []

    def __init__(self, config: str) -> None:
        assert config == "config"
        self.model: str | None = None
        self.num_calls = 0
        FakeDrafter.made.append(self)

    def load_model(self, model: str) -> None:
        self.model = model

    def propose(self, sampled: list[list[int]]) -> list[list[int]]:
        self.num_calls += 1
        return [[] for _ in sampled]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an engine of a few lines into vLLM's place."""

    def module(name: str, **content: Any) -> None:
        made = ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)

    FakeEngine.seen, FakeDrafter.made = [], []
    module(
        "vllm",
        __version__="0.0",
        EngineArgs=SimpleNamespace,
        LLMEngine=FakeEngine,
        SamplingParams=SimpleNamespace,
    )
    module("vllm.platforms", current_platform=SimpleNamespace(is_cpu=lambda: True, device_name="x"))
    module("vllm.sampling_params", RequestOutputKind=SimpleNamespace(DELTA="delta"))
    module("vllm.v1.sample.rejection_sampler", expand_batch_to_tokens=expand_batch_to_tokens)


@pytest.mark.usefixtures("vllm")
def test_clients_send_their_next_prompt_once_they_have_an_answer() -> None:
    phase = Phase("all", 2, [[10], [20], [30], [40], [50]], 5)
    engine = Engine(job(phase))
    answered: list[int] = []
    found = engine.run(phase, lambda: answered.append(1))
    assert [answer.token_ids for answer in found.answers] == [
        [*range(start + 1, start + 6)] for start in (10, 20, 30, 40, 50)
    ]
    assert {answer.num_steps for answer in found.answers} == {3}
    assert FakeEngine.seen[0].most == 2
    assert len(answered) == 5
    for answer in found.answers:
        assert 0 < answer.first_token_sec <= answer.sec <= found.sec


@pytest.mark.usefixtures("vllm")
def test_counters_are_those_of_the_phase_alone_and_its_drafter_is_timed() -> None:
    first, second = Phase("one", 1, [[1], [2]], 4), Phase("two", 2, [[1], [2]], 4)
    engine = Engine(job(first, second))
    engine.warm_up()
    found = [engine.run(phase, lambda: None).counters for phase in (first, second)]
    assert [counters[:4] for counters in found] == [(4, 12, 4, 4), (4, 12, 4, 2)]
    assert all(counters.draft_sec > 0 for counters in found)
    assert FakeEngine.seen[0].num_resets == 3


@pytest.mark.usefixtures("vllm")
def test_a_phase_that_begins_anew_has_a_new_drafter_with_the_model() -> None:
    phases = [Phase(f"{n}", 1, [[1]], 2, begins_anew=n != 1) for n in range(3)]
    engine = Engine(job(*phases))
    for phase in phases:
        engine.run(phase, lambda: None)
    of_vllm, of_start, *later = FakeDrafter.made
    assert of_vllm.num_calls == of_start.num_calls == 0
    assert [each.num_calls for each in later] == [2, 1]
    assert {each.model for each in (of_start, *later)} == {"model"}


@pytest.mark.usefixtures("vllm")
def test_failures_of_the_proposer_are_counted_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    def stats(drafter: FakeDrafter) -> dict[str, int]:
        return {"failures": 2 * drafter.num_calls}

    monkeypatch.setattr(FakeDrafter, "stats", stats, raising=False)
    phase = Phase("all", 1, [[1]], 4)
    engine = Engine(job(phase))
    found = [engine.run(phase, lambda: None) for _ in range(2)]
    assert [each.counters.num_failures for each in found] == [4, 4]
    rows = rows_of({"pool": found[:1]})
    assert what_differs(rows, {}) == ["pool, 1 at once, pass 1: the proposer failed 4 times"]


@pytest.mark.usefixtures("vllm")
def test_an_engine_without_speculation_has_no_drafter_and_counts_none() -> None:
    plain = EngineJob("folder", "float32", 64, 2, None, {"lade": {"capacity": 5}}, ())
    engine = Engine(plain)
    found = engine.run(Phase("all", 1, [[1]], 3), lambda: None)
    assert found.answers[0].token_ids == [2, 3, 4]
    assert found.counters == Counters()
    arguments = FakeEngine.seen[0].arguments
    assert (arguments.speculative_config, arguments.additional_config) == (
        None,
        {"lade": {"capacity": 5}},
    )
    assert engine.description() == {
        "vllm": "0.0",
        "platform": "x",
        "max_num_batched_tokens": 9,
        "enforce_eager": True,
        "mended": [],
    }


@pytest.mark.usefixtures("vllm")
def test_a_sampler_that_does_not_read_temperatures_is_mended_and_told() -> None:
    sampler = sys.modules["vllm.v1.sample.rejection_sampler"]

    def faulty(x: torch.Tensor, _: torch.Tensor, num_tokens: int, *__: int) -> torch.Tensor:
        return x.new_zeros(num_tokens)

    sampler.expand_batch_to_tokens = faulty  # type: ignore[attr-defined]
    phase = Phase("all", 1, [[1]], 4)
    assert Engine(job(phase)).description()["mended"] == [FAULT]
    assert Engine(job(phase)).description()["mended"] == []  # it reads them now


def test_requests_values_are_given_to_their_tokens() -> None:
    values, ends = torch.tensor([0.7, 0.0, 0.5]), torch.tensor([2, 2, 5], dtype=torch.int32)
    found = expand_batch_to_tokens(values, ends, 5, replace_from=0, replace_to=1)
    assert torch.equal(found, torch.tensor([0.7, 0.7, 0.5, 0.5, 0.5]))
    found = expand_batch_to_tokens(torch.tensor([0, 9]), torch.tensor([1, 3]), 3, 0, 1)
    assert found.tolist() == [1, 9, 9]


# --- its process ----------------------------------------------------------------------------


def saying(program: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import json, os, sys\njob = sys.stdin.readline()\n{program}")


def test_a_process_gets_its_job_and_its_messages_are_passed_on() -> None:
    program = (
        "seq = json.loads(job)['max_num_seqs']\n"
        "print(json.dumps({'answered': seq, 'threads': os.environ['OMP_NUM_THREADS']}))\n"
        "print(json.dumps({'done': True}))"
    )
    assert [*run_job(job(), 3, saying(program))] == [{"answered": 2, "threads": "3"}]


def test_a_process_that_fails_is_told_with_its_last_words() -> None:
    program = "print('first\\nthe cause', file=sys.stderr)\nsys.exit(5)"
    with pytest.raises(LadeError, match="process ended with status 5: first / the cause"):
        [*run_job(job(), 1, saying(program))]
    with pytest.raises(LadeError, match="process ended with status 3"):  # reads no job
        [*run_job(job(), 1, (sys.executable, "-c", "import sys; sys.exit(3)"))]


def test_a_process_is_ended_when_its_listener_leaves(tmp_path: Path) -> None:
    program = "import time\nprint(json.dumps({'pid': os.getpid()}), flush=True)\ntime.sleep(600)"
    messages = run_job(job(), 1, saying(program))
    pid = next(messages)["pid"]
    messages.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_settings_of_the_user_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert "LD_PRELOAD" not in environment_of({}, 2)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    made = environment_of({}, 2)
    assert made["LD_PRELOAD"] == str(tmp_path / "lib" / "libiomp5.so")
    assert made["VLLM_CPU_KVCACHE_SPACE"] == "4"
    of_user = {"LD_PRELOAD": "own.so", "VLLM_CPU_KVCACHE_SPACE": "1"}
    assert environment_of(of_user, 2).items() >= of_user.items()


# --- what it comes to -----------------------------------------------------------------------


def draws(probs: Mapping[tuple[int, ...], float], num: int, seed: int) -> list[tuple[int, ...]]:
    return Random(seed).choices([*probs], [*probs.values()], k=num)


def test_samples_of_one_distribution_pass_and_those_of_another_fail() -> None:
    rare: dict[tuple[int, ...], float] = {(4, n): 0.005 for n in range(10)}
    probs = {(1, 2): 0.5, (1, 3): 0.3, (2,): 0.15, **rare}
    p_values = [
        same_distribution(draws(probs, 300, seed), draws(probs, 300, seed + 1000))[0]
        for seed in range(200)
    ]
    assert min(p_values) > agreement.FALSE_ALARM
    assert 0.3 < sum(p_values) / len(p_values) < 0.7  # neither too strict nor too lenient
    # As a sampler does that keeps every draft of (1, 2), whatever the model says.
    biased = {**probs, (1, 2): 0.8, (1, 3): 0.0}
    assert same_distribution(draws(biased, 300, 0), draws(probs, 300, 1))[0] < 1e-9


def test_rare_texts_are_counted_by_their_beginning() -> None:
    ones = [*[(1, 2)] * 40, *[(1, n) for n in range(10, 30)], *[(n,) for n in range(40, 60)]]
    others = [*[(1, 2)] * 40, *[(1, n) for n in range(60, 80)], *[(n,) for n in range(90, 110)]]
    p_value, num_cells = same_distribution(ones, others)
    assert (p_value, num_cells) == (1.0, 3)  # (1, 2), (1, …), …
    cells = agreement._cells(Counter(ones), Counter(others), 160)
    assert cells == [(40, 40), (20, 20), (20, 20)]


def test_samples_with_one_answer_are_the_same() -> None:
    assert same_distribution([(1,)] * 50, [(1,)] * 50) == (1.0, 1)


def test_draws_are_compared_question_by_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "NUM_DRAWS", 100)
    half = [[1], [2]] * 50
    plain = result([*half, *half])
    same = compare_drawn(result([*half, *half], counters=Counters(9, 9, 4)), plain)
    assert (same.is_same, same.tells, same.num_cells) == (True, True, 4)
    # As likely over both questions, but not in each.
    swapped = compare_drawn(result([*[[1]] * 100, *[[2]] * 100], counters=Counters(9, 9, 9)), plain)
    assert (swapped.is_same, swapped.tells) == (False, False)


def test_mat_counts_neither_the_step_of_the_prompt_nor_answers_that_loop() -> None:
    loop = [7, 8] * 20
    found = summarise(
        PhaseResult(
            "1",
            1,
            4.0,
            [RequestAnswer([1, 2, 3, 4, 5], 3, 0.1, 1.0), RequestAnswer(loop, 5, 0.3, 3.0)],
            Counters(4, 12, 6, 4, 0.004),
        ),
        None,
    )
    assert (found.mat, found.mat_of_all, found.num_loops) == (2.0, 43 / 6, 1)
    assert found.acceptance_length == 2.5
    assert found.tokens_per_sec == 45 / 4
    assert found.draft_sec_per_step == pytest.approx(0.001)
    assert (found.latency_sec, found.same_text) == (2.0, None)


def test_a_pass_is_compared_with_the_same_pass_of_plain() -> None:
    names = ("2 at once, pass 1", "2 at once, pass 2")
    results = {
        "plain": [result([[1], [2]], name) for name in names],
        "pool": [
            result([[1], [2]], names[0], sec=1.0),
            result([[1], [3]], names[1], sec=4.0, counters=Counters(2, 4, 1, 1, 0.1)),
        ],
    }
    rows = rows_of(results)
    assert [(row.method, row.num_pass, row.summary.same_text) for row in rows] == [
        ("plain", 1, 1.0),
        ("plain", 2, 1.0),
        ("pool", 1, 1.0),
        ("pool", 2, 0.5),
    ]
    text = table(rows, "title").as_markdown()
    assert "| 2 at once | pass 1 | pool | 2.0 | 2.00x |" in text
    assert "| 2 at once | pass 2 | pool | 0.5 | 0.50x | 1.00 | 1.50 | 4 | 25% | 100.000 |" in text
    assert what_differs(rows, {}) == [
        "pool, 2 at once, pass 2: 50.0% of the answers have plain's tokens"
    ]
    assert as_json(rows, {})["rows"][3]["acceptance_length"] == 1.5


# --- the command ----------------------------------------------------------------------------


def engines_of(texts: Mapping[str, int]) -> Any:
    """Return a stand-in for `run_job` whose answers are by methods, the first token given here."""

    def run(job: EngineJob, threads: int) -> Iterator[Mapping[str, Any]]:
        method = (
            "plain" if job.speculative_config is None else str(job.speculative_config["method"])
        )
        if texts[method] < 0:
            raise LadeError("vLLM's process ended with status 1: the cause")
        yield {"engine": {"vllm": "0.0"}}
        for phase in job.phases:
            drawn = Random(texts[method])
            answers = [
                RequestAnswer(
                    [texts[method] if phase.name != DRAWS else drawn.randrange(3)], 1, 0.1, 0.2
                )
                for _ in phase.prompts
            ]
            counters = Counters() if method == "plain" else Counters(9, 9, 5, 9, 0.1)
            yield {"answered": 1}
            done = PhaseResult(phase.name, phase.concurrency, 1.0, answers, counters)
            yield {"phase": done.as_message()}

    return run


@pytest.fixture
def command_line(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setattr(methods, "find_spec", lambda name: True)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    return ("engines", "--prompts", str(prompts), "--model", folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer; no model of it is loaded here."""
    from tests.lade.tiny import byte_tokenizer

    path = tmp_path_factory.mktemp("tiny")
    byte_tokenizer().save_pretrained(path)
    return str(path)


def test_the_command_shows_and_writes_all_methods(
    command_line: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_job", engines_of({"plain": 1, "ngram": 1, "custom_class": 1}))
    out = tmp_path / "out.json"
    options = ("--methods", "plain,ngram,pool", "--concurrency", "2", "--check", "--json", str(out))
    done = CliRunner().invoke(app, [*command_line, *options], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "2 at once, pass 2" in done.stdout
    content = json.loads(out.read_text())
    assert [(row["method"], row["pass"]) for row in content["rows"]] == [
        (method, num) for method in ("plain", "ngram", "pool") for num in (1, 2)
    ]
    assert content["draws"]["pool"]["is_same"]
    assert content["settings"]["dtype"] == "float32"
    assert content["settings"]["num_prompts"] == 2
    assert content["environment"]["vllm"] == "0.0"
    assert str(tmp_path) not in out.read_text()


def test_a_check_fails_where_a_method_says_something_else(
    command_line: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_job", engines_of({"plain": 1, "custom_class": 2}))
    out = tmp_path / "out.json"
    options = ("--methods", "plain,pool", "--check", "--concurrency", "2", "--json", str(out))
    done = CliRunner().invoke(app, [*command_line, *options])
    assert isinstance(done.exception, LadeError)
    assert "pool, 2 at once, pass 1: 0.0% of the answers have plain's tokens" in str(done.exception)
    assert json.loads(out.read_text())["rows"]  # what was found is kept


def test_what_was_measured_before_a_failure_is_written(
    command_line: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_job", engines_of({"plain": 1, "custom_class": -1}))
    out = tmp_path / "out.json"
    options = ("--methods", "plain,pool", "--concurrency", "1", "--json", str(out))
    done = CliRunner().invoke(app, [*command_line, *options])
    assert "the cause" in str(done.exception)
    content = json.loads(out.read_text())
    assert content["settings"]["interrupted"]
    assert {row["method"] for row in content["rows"]} == {"plain"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--check", "--dtype", "bfloat16"), "expected --dtype float32 with --check, got bfloat16"),
        (("--check", "--methods", "pool"), "expected plain and another of the methods"),
        (("--dtype", "float64"), "for vLLM, got float64"),
        (("--concurrency", "1,0"), "expected different numbers above 0, got"),
        (("--concurrency", "4,4"), "expected different numbers above 0, got"),
        (("--concurrency", "4,x"), "expected different numbers above 0, got"),
        (("--options", "[1]"), "expected --options to be a JSON object, got '[1]'"),
        (("--options", '{"sharing": "all"}'), "expected --options without 'sharing'"),
        (("--options", '{"prewarmed": "x"}'), "expected --options without 'prewarmed'"),
        (("--options", '{"size": 1}'), "got 'size'"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    command_line: tuple[str, ...], options: tuple[str, ...], message: str
) -> None:
    done = CliRunner().invoke(app, [*command_line, *options])
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)


# --- vLLM itself ----------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.model
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_says_the_same_with_the_pool(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Count from one to twenty.\nRepeat: a b c d a b c d a b c d\n")
    options = ("--methods", "plain,pool", "--concurrency", "2", "--check", "--max-new-tokens", "24")
    done = CliRunner().invoke(app, ["engines", "--prompts", str(prompts), *options])
    assert done.exit_code == 0, done.output
