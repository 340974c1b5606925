"""`python -m benchmarks engines`, against an engine of a few lines in vLLM's place."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from typer.testing import CliRunner

import lade
from benchmarks.__main__ import app
from benchmarks.engines import agreement, command, methods
from benchmarks.engines.agreement import compare_drawn, same_distribution
from benchmarks.engines.job import Counters, EngineJob, Phase, PhaseResult, RequestAnswer
from benchmarks.engines.mending import FAULT, expand_batch_to_tokens
from benchmarks.engines.methods import METHODS, choose_methods
from benchmarks.engines.plan import DRAWS, EnginePlan
from benchmarks.engines.report import rows_of, summarise, what_differs
from benchmarks.engines.worker import Engine

PLAN = EnginePlan("folder", "float32", [[1, 2], [3], [4]], [2, 1], 5, 2, 4)


def job(*phases: Phase, speculates: bool = True) -> EngineJob:
    config = {"method": "ngram", "num_speculative_tokens": 4} if speculates else None
    return EngineJob("folder", "float32", 64, 2, config, {}, phases)


def result(
    texts: Sequence[Sequence[int]],
    name: str = "2 at once, pass 1",
    counters: Counters | None = None,
    sec: float = 2.0,
) -> PhaseResult:
    answers = [RequestAnswer([*text], len(text), 0.5, 1.0) for text in texts]
    return PhaseResult(name, 2, sec, answers, counters or Counters())


# --- what is run ----------------------------------------------------------------------------


def test_methods_that_cannot_run_are_left_out_unless_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(methods, "find_spec", lambda name: None)
    reason = "the package arctic-inference is not installed"
    names = ["plain", "ngram", "pool", "pool_private", "pool_prewarmed"]
    assert choose_methods(None, True) == (names, {"suffix": reason})
    with pytest.raises(lade.LadeError, match=f"the method suffix cannot run here: {reason}"):
        choose_methods("plain,suffix", False)


def test_all_methods_are_set_up_alike_and_begin_anew_with_every_number_of_requests() -> None:
    configs = [method.config(6) for method in METHODS.values()]
    assert configs.count(None) == 1
    assert {config["num_speculative_tokens"] for config in configs if config} == {6}
    for name, method in METHODS.items():
        assert bool(method.additional_config({}, "a")) == ("pool" in name)
    assert [(phase.name, phase.concurrency, phase.begins_anew) for phase in PLAN.phases()] == [
        ("2 at once, pass 1", 2, True),
        ("2 at once, pass 2", 2, False),
        ("1 at once, pass 1", 1, True),
        ("1 at once, pass 2", 1, False),
    ]
    made = PLAN.job("ngram")
    # Room for the longest text and its drafts.
    assert (made.max_model_len, made.max_num_seqs) == (2 + 5 + 4 + 1, 2)
    assert EngineJob.from_message(json.loads(json.dumps(made.as_message()))) == made


# --- the engine -----------------------------------------------------------------------------


class FakeEngine:
    """Gives every request the tokens that follow its last one, two at a time behind a drafter."""

    seen: ClassVar[list["FakeEngine"]] = []

    def __init__(self, arguments: SimpleNamespace) -> None:
        self.arguments = arguments
        scheduler = SimpleNamespace(max_num_batched_tokens=9)
        self.vllm_config = SimpleNamespace(scheduler_config=scheduler)
        self.model_config = SimpleNamespace(enforce_eager=arguments.enforce_eager)
        self.requests: dict[str, list[int]] = {}  # tokens left to give
        self.most = self.num_resets = 0
        self.counts = [0, 0, 0]
        runner = SimpleNamespace(vllm_config="config", model="model")
        if arguments.speculative_config is not None:
            runner.drafter = FakeDrafter("config")
        self.worker = SimpleNamespace(model_runner=runner)
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
            new, self.requests[name] = SimpleNamespace(token_ids=left[:size]), left[size:]
            is_done = not self.requests[name]
            if is_done:
                del self.requests[name]
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
        pairs = zip((f"vllm:spec_decode_num_{name}" for name in names), self.counts, strict=True)
        return [SimpleNamespace(name=name, value=count) for name, count in pairs]

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
    settings = dict.fromkeys(("EngineArgs", "SamplingParams"), SimpleNamespace)
    module("vllm", __version__="0.0", LLMEngine=FakeEngine, **settings)
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
    assert (FakeEngine.seen[0].most, len(answered)) == (2, 5)


@pytest.mark.usefixtures("vllm")
def test_counters_and_drafters_are_those_of_the_phase_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stats(drafter: FakeDrafter) -> dict[str, int]:
        return {"failures": 2 * drafter.num_calls}

    monkeypatch.setattr(FakeDrafter, "stats", stats, raising=False)
    phases = [Phase(f"{n}", 1 + n // 2, [[1], [2]], 4, begins_anew=n != 1) for n in range(3)]
    engine = Engine(job(*phases))
    engine.warm_up()
    found = [engine.run(phase, lambda: None).counters for phase in phases]
    assert [counters[:4] for counters in found] == [(4, 12, 4, 4), (4, 12, 4, 4), (4, 12, 4, 2)]
    assert all(counters.draft_sec > 0 for counters in found)
    assert FakeEngine.seen[0].num_resets == 4  # of cached prefixes
    assert [each.num_calls for each in FakeDrafter.made[2:]] == [8, 2]
    assert {each.model for each in FakeDrafter.made[1:]} == {"model"}
    assert found[1].num_failures == 8
    rows = rows_of({"pool": [result([[1]], counters=found[1])]})
    assert what_differs(rows, {}) == ["pool, 2 at once, pass 1: the proposer failed 8 times"]
    plain = Engine(job(speculates=False)).run(phases[0], lambda: None)
    assert plain.answers[0].token_ids == [2, 3, 4, 5]
    assert plain.counters == Counters()


@pytest.mark.usefixtures("vllm")
def test_a_sampler_that_does_not_read_temperatures_is_mended_and_told() -> None:
    sampler = sys.modules["vllm.v1.sample.rejection_sampler"]

    def faulty(x: torch.Tensor, _: torch.Tensor, num_tokens: int, *__: int) -> torch.Tensor:
        return x.new_zeros(num_tokens)

    sampler.expand_batch_to_tokens = faulty  # type: ignore[attr-defined]
    assert Engine(job()).description()["mended"] == [FAULT]
    assert Engine(job()).description()["mended"] == []  # it reads them now


# --- what it comes to -----------------------------------------------------------------------


def test_samples_of_one_distribution_pass_and_those_of_another_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def draws(probs: Mapping[tuple[int, ...], float], seed: int) -> list[tuple[int, ...]]:
        return Random(seed).choices([*probs], [*probs.values()], k=300)

    rare: dict[tuple[int, ...], float] = {(4, n): 0.005 for n in range(10)}
    probs = {(1, 2): 0.5, (1, 3): 0.3, (2,): 0.15, **rare}
    pairs = [(draws(probs, seed), draws(probs, seed + 1000)) for seed in range(200)]
    p_values = [same_distribution(*pair)[0] for pair in pairs]
    assert min(p_values) > agreement.FALSE_ALARM
    assert 0.3 < sum(p_values) / len(p_values) < 0.7  # neither too strict nor too lenient
    # As a sampler does that keeps every draft of (1, 2), whatever the model says.
    biased = {**probs, (1, 2): 0.8, (1, 3): 0.0}
    assert same_distribution(draws(biased, 0), draws(probs, 1))[0] < 1e-9
    monkeypatch.setattr(agreement, "NUM_DRAWS", 100)
    plain = result([[1], [2]] * 100)
    # As likely over both questions, but not in each; and all drafts were accepted.
    swapped = compare_drawn(result([*[[1]] * 100, *[[2]] * 100], counters=Counters(9, 9, 9)), plain)
    assert (swapped.is_same, swapped.tells) == (False, False)


def test_a_pass_is_summed_up_beside_the_same_pass_of_plain() -> None:
    loop = [7, 8] * 20
    answers = [RequestAnswer([1, 2, 3, 4, 5], 3, 0.1, 1.0), RequestAnswer(loop, 5, 0.3, 3.0)]
    counters = Counters(4, 12, 6, 4, 0.004)
    found = summarise(PhaseResult("1", 1, 4.0, answers, counters), None)
    # Neither the step of the prompt counts nor, where there are others, an answer that loops.
    assert (found.mat, found.mat_of_all, found.num_loops) == (2.0, 43 / 6, 1)
    assert (found.acceptance_length, found.tokens_per_sec) == (2.5, 45 / 4)
    assert found.draft_sec_per_step == pytest.approx(0.001)
    assert (found.latency_sec, found.same_text) == (2.0, None)
    names = ("2 at once, pass 1", "2 at once, pass 2")
    plain = [result([[1], [2]], name) for name in names]
    pool = [result([[1], [2]], names[0]), result([[1], [3]], names[1])]
    rows = rows_of({"plain": plain, "pool": pool})
    assert [row.summary.same_text for row in rows] == [1.0, 1.0, 1.0, 0.5]
    differs = "pool, 2 at once, pass 2: 50.0% of the answers have plain's tokens"
    assert what_differs(rows, {}) == [differs]


# --- the command ----------------------------------------------------------------------------


def engines_of(texts: Mapping[str, int]) -> Any:
    """Return a stand-in for `run_job` whose answers are by methods, the first token given here."""

    def run(job: EngineJob, threads: int) -> Iterator[Mapping[str, Any]]:
        method = str((job.speculative_config or {"method": "plain"})["method"])
        if texts[method] < 0:
            raise lade.LadeError("vLLM's process ended with status 1: the cause")
        yield {"engine": {"vllm": "0.0"}}
        for phase in job.phases:
            drawn, first = Random(texts[method]), texts[method]
            answers = [
                RequestAnswer([drawn.randrange(3) if phase.name == DRAWS else first], 1, 0.1, 0.2)
                for _ in phase.prompts
            ]
            counters = Counters() if method == "plain" else Counters(9, 9, 5, 9, 0.1)
            yield {"answered": 1}
            done = PhaseResult(phase.name, phase.concurrency, 1.0, answers, counters)
            yield {"phase": done.as_message()}

    return run


@pytest.fixture
def run(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(methods, "find_spec", lambda name: True)
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.json"
    prompts.write_text("one\ntwo\n")

    def run(texts: Mapping[str, int], *options: str) -> tuple[Any, Any]:
        monkeypatch.setattr(command, "run_job", engines_of(texts))
        words = ["engines", "--prompts", str(prompts), "--model", folder, "--json", str(out)]
        done = CliRunner().invoke(app, [*words, *options], env={"COLUMNS": "200"})
        return done.exception, json.loads(out.read_text()) if out.exists() else None

    return run


def test_the_command_writes_all_methods_and_fails_where_one_says_something_else(run: Any) -> None:
    options = ("--methods", "plain,ngram,pool", "--concurrency", "2", "--check")
    error, content = run({"plain": 1, "ngram": 1, "custom_class": 1}, *options)
    assert error is None
    assert [(row["method"], row["pass"]) for row in content["rows"]] == [
        (method, num) for method in ("plain", "ngram", "pool") for num in (1, 2)
    ]
    assert content["draws"]["pool"]["is_same"]
    assert (content["settings"]["dtype"], content["settings"]["num_prompts"]) == ("float32", 2)
    error, content = run({"plain": 1, "ngram": 1, "custom_class": 2}, *options)
    assert "pool, 2 at once, pass 1: 0.0% of the answers have plain's tokens" in str(error)
    assert content["rows"]  # what was found is kept
    error, content = run({"plain": 1, "ngram": -1}, "--methods", "plain,ngram")
    assert "the cause" in str(error)
    assert content["settings"]["interrupted"]
    assert {row["method"] for row in content["rows"]} == {"plain"}


def test_a_check_is_in_float32(run: Any) -> None:
    error, _ = run({}, "--check", "--dtype", "bfloat16")
    assert "expected --dtype float32 with --check, got bfloat16" in str(error)
