"""`python -m benchmarks engines`, against an engine of a few lines in vLLM's place."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

import lade
from benchmarks import engines
from benchmarks.__main__ import app
from benchmarks.engines import EngineJob, Pass, RequestAnswer, SteppedEngine, answered, summarise

JOB = EngineJob("folder", "float32", [[10], [20], [30], [40], [50]], [2, 1], 5, method="ngram")


class FakeEngine:
    """Gives every request the tokens that follow its last one, two at a time behind a drafter."""

    seen: ClassVar[list["FakeEngine"]] = []

    def __init__(self, arguments: SimpleNamespace) -> None:
        self.arguments = arguments
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


@pytest.mark.usefixtures("vllm")
def test_clients_send_their_next_prompt_once_they_have_an_answer() -> None:
    engine = SteppedEngine(JOB)
    found = engine.run(JOB.prompts, 2, 1, 5)
    assert [answer.token_ids for answer in found.answers] == [
        [*range(start + 1, start + 6)] for start in (10, 20, 30, 40, 50)
    ]
    assert {answer.num_steps for answer in found.answers} == {3}
    assert FakeEngine.seen[0].most == 2
    # Room for the longest text and its drafts.
    assert FakeEngine.seen[0].arguments.max_model_len == 1 + 5 + 8 + 1


@pytest.mark.usefixtures("vllm")
def test_counters_and_drafters_are_those_of_the_pass_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stats(drafter: FakeDrafter) -> dict[str, int]:
        return {"failures": 2 * drafter.num_calls}

    monkeypatch.setattr(FakeDrafter, "stats", stats, raising=False)
    found = answered(JOB)
    assert [(each.concurrency, each.number) for each in found] == [(2, 1), (2, 2), (1, 1), (1, 2)]
    assert [each.counters["num_drafts"] for each in found] == [15] * 4
    assert all(each.counters["draft_sec_per_step"] > 0 for each in found)
    assert FakeEngine.seen[0].num_resets == 5  # of cached prefixes
    assert {each.model for each in FakeDrafter.made[1:]} == {"model"}
    # A new one warms up, and begins with every number of clients.
    assert [each.num_calls > 0 for each in FakeDrafter.made] == [False, True, True, True]
    assert found[1].counters["num_failures"] > 0
    plain = answered(EngineJob("folder", "float32", [[1]], [1], 4))
    assert plain[0].answers[0].token_ids == [2, 3, 4, 5]
    assert plain[0].counters["num_drafts"] == 0


def test_a_pass_is_summed_up_beside_the_same_pass_of_plain() -> None:
    loop = [7, 8] * 20
    answers = [RequestAnswer([1, 2, 3, 4, 5], 3, 0.1, 1.0), RequestAnswer(loop, 5, 0.3, 3.0)]
    counters = {"num_drafts": 4, "num_draft_tokens": 12, "num_accepted_tokens": 6}
    done = Pass(1, 1, 4.0, answers, {**counters, "num_failures": 0, "draft_sec_per_step": 0.001})
    found = summarise(done, None)
    # Neither the step of the prompt counts nor, where there are others, an answer that loops.
    assert (found["mat"], found["num_loops"], found["same_text"]) == (2.0, 1, None)
    assert (found["acceptance_length"], found["tokens_per_sec"]) == (2.5, 45 / 4)
    assert found["latency_sec"] == 2.0
    other = done._replace(answers=[answers[0]._replace(token_ids=[1]), answers[1]])
    assert summarise(done, other)["same_text"] == 0.5


def engines_of(texts: Mapping[str, int]) -> Any:
    """Return a stand-in for engines' processes: answers of one token, given here by method."""

    def alone(function: Any, job: EngineJob) -> Sequence[Pass]:
        if texts[job.method] < 0:
            raise lade.LadeError("answered ended with status 1")
        answers = [RequestAnswer([texts[job.method]], 1, 0.1, 0.2) for _ in job.prompts]
        counters = {"num_failures": 0, "draft_sec_per_step": 0.0}
        return [Pass(2, number, 1.0, answers, counters) for number in (1, 2)]

    return alone


@pytest.fixture
def run(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(engines, "find_spec", lambda name: True)
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: {"vllm": ["torch"]})
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.json"
    prompts.write_text("one\ntwo\n")

    def run(texts: Mapping[str, int], *options: str) -> tuple[Any, Any]:
        monkeypatch.setattr(engines, "alone", engines_of(texts))
        monkeypatch.setattr("os.environ", {**os.environ})
        words = ["engines", "--prompts", str(prompts), "--model", folder, "--json", str(out)]
        done = CliRunner().invoke(app, [*words, *options], env={"COLUMNS": "200"})
        return done.exception, json.loads(out.read_text()) if out.exists() else None

    return run


def test_the_command_writes_all_methods_and_fails_where_one_says_something_else(run: Any) -> None:
    options = ("--methods", "plain,ngram,pool", "--concurrency", "2", "--check")
    error, content = run({"plain": 1, "ngram": 1, "pool": 1}, *options)
    assert error is None
    assert [(row["method"], row["pass"]) for row in content["rows"]] == [
        (method, num) for method in ("plain", "ngram", "pool") for num in (1, 2)
    ]
    assert (content["settings"]["dtype"], content["settings"]["num_prompts"]) == ("float32", 2)
    error, content = run({"plain": 1, "ngram": 1, "pool": 2}, *options)
    assert "pool, pass 1: 0.0% of the answers have plain's tokens" in str(error)
    assert content["rows"]  # what was found is kept
    error, content = run({"plain": 1, "ngram": -1}, "--methods", "plain,ngram")
    assert "ended with status 1" in str(error)
    assert content["settings"]["interrupted"]
    assert {row["method"] for row in content["rows"]} == {"plain"}


def test_a_check_is_in_float32(run: Any) -> None:
    error, _ = run({}, "--check", "--dtype", "bfloat16")
    assert "expected float32" in str(error)
