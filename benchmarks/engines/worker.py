"""Process with an engine: `python -m benchmarks.engines.worker`.

It reads an `EngineJob` as JSON from standard input, and writes a line of JSON to standard output
for each answer and each phase. The engine is stepped in this process, so that nothing but its own
work and the drafter's is between two steps. Next file: `process.py`, which starts such processes.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from time import perf_counter
from typing import Any

from benchmarks.engines.job import Counters, EngineJob, Phase, PhaseResult, RequestAnswer
from benchmarks.engines.mending import FAULT, mend_sampler
from benchmarks.process import DONE
from lade.engines.extension import PoolExtension

_COUNTERS = {  # of vLLM, by our fields
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
}
_WARM_UP_TOKENS = 8

Tell = Callable[[dict[str, Any]], None]


def main() -> None:
    """Do the job described on standard input."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what vLLM prints must not come between the lines

    def tell(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=channel, flush=True)

    job = EngineJob.from_message(json.loads(sys.stdin.readline()))
    engine = Engine(job)
    tell({"engine": engine.description()})
    engine.warm_up()
    for phase in job.phases:
        result = engine.run(phase, lambda: tell({"answered": 1}))
        tell({"phase": result.as_message()})
    tell(DONE)


def _sampler() -> Any:
    return import_module("vllm.v1.sample.rejection_sampler")


@dataclass
class _Request:
    """A request that is being answered."""

    number: int
    start: float
    token_ids: list[int] = field(default_factory=list)
    num_steps: int = 0
    first_token_sec: float = 0.0


class Engine:
    """vLLM's engine, stepped by its clients."""

    def __init__(self, job: EngineJob) -> None:
        import vllm
        from vllm.platforms import current_platform

        self._job = job
        self._ids = count()
        self._watch = _Watch()
        arguments = vllm.EngineArgs(
            model=job.model,
            dtype=job.dtype,
            max_model_len=job.max_model_len,
            max_num_seqs=job.max_num_seqs,
            seed=0,
            # What a CPU gains by compilation, a benchmark of minutes spends on it.
            enforce_eager=current_platform.is_cpu(),
            disable_log_stats=False,  # they are the counters
            speculative_config=None
            if job.speculative_config is None
            else dict(job.speculative_config),
            additional_config=dict(job.additional_config),
        )
        self._engine = vllm.LLMEngine.from_engine_args(arguments)
        self._mended = [FAULT] if current_platform.is_cpu() and mend_sampler(_sampler()) else []
        self._renew_drafter()

    def description(self) -> dict[str, Any]:
        """Return what result files say of the engine."""
        import vllm
        from vllm.platforms import current_platform

        scheduler = self._engine.vllm_config.scheduler_config
        return {
            "vllm": vllm.__version__,
            "platform": current_platform.device_name,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "enforce_eager": self._engine.model_config.enforce_eager,
            "mended": self._mended,
        }

    def warm_up(self) -> None:
        """Answer a request of a few tokens, so that nothing is compiled or allocated later."""
        size = min(self._job.max_num_seqs, 4)
        prompts = [[number + 1, *range(5, 5 + _WARM_UP_TOKENS)] for number in range(size)]
        self.run(Phase("warm-up", size, prompts, _WARM_UP_TOKENS), lambda: None)

    def run(self, phase: Phase, on_answer: Callable[[], None]) -> PhaseResult:
        """Answer all requests of a phase."""
        if phase.begins_anew:
            self._renew_drafter()
        # Prompts of a second pass are run like those of the first.
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("expected vLLM to drop its prefix cache between phases")
        before, self._watch.counters = self._counted(), Counters()
        start = perf_counter()
        answers = self._answer(phase, on_answer)
        sec = perf_counter() - start
        after, watched = self._counted(), self._watch.counters
        counted = {name: after[name] - before[name] for name in after}
        return PhaseResult(phase.name, phase.concurrency, sec, answers, watched._replace(**counted))

    def _answer(self, phase: Phase, on_answer: Callable[[], None]) -> list[RequestAnswer]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        settings = SamplingParams(
            temperature=phase.temperature,
            max_tokens=phase.max_new_tokens,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        waiting = iter(enumerate(phase.prompts))
        running: dict[str, _Request] = {}
        answers: dict[int, RequestAnswer] = {}

        def ask_next() -> None:
            for number, token_ids in waiting:
                name = str(next(self._ids))
                running[name] = _Request(number, perf_counter())
                self._engine.add_request(name, {"prompt_token_ids": [*token_ids]}, settings)
                return

        for _ in range(phase.concurrency):
            ask_next()
        while running:
            for output in self._engine.step():
                now, request = perf_counter(), running[output.request_id]
                new = output.outputs[0].token_ids
                if new:
                    request.num_steps += 1
                    request.first_token_sec = request.first_token_sec or now - request.start
                    request.token_ids += new
                if output.finished:
                    del running[output.request_id]
                    answers[request.number] = RequestAnswer(
                        request.token_ids,
                        request.num_steps,
                        request.first_token_sec,
                        now - request.start,
                    )
                    on_answer()
                    ask_next()
        return [answers[number] for number in range(len(phase.prompts))]

    def _counted(self) -> dict[str, int]:
        """Return vLLM's own counters of drafts and our proposer's failures, by our names."""
        metrics = self._engine.get_metrics()
        counted = {_COUNTERS[each.name]: each.value for each in metrics if each.name in _COUNTERS}
        (stats,) = self._engine.collective_rpc(PoolExtension.lade_stats)
        return counted if stats is None else {**counted, "num_failures": stats["failures"]}

    def _renew_drafter(self) -> None:
        """Put a new drafter, which knows no text, into the place of the old one, and time it."""
        self._engine.collective_rpc(self._watch.renew)


class _Watch:
    """Times a drafter of vLLM."""

    def __init__(self) -> None:
        self.counters = Counters()

    def renew(self, worker: Any) -> None:
        """Make the worker's drafter anew, as its runner makes it, if it has one."""
        runner = worker.model_runner
        old = getattr(runner, "drafter", None)
        if old is None:
            return
        drafter = type(old)(runner.vllm_config)
        drafter.load_model(runner.model)
        propose = drafter.propose

        def timed(*arguments: Any, **named: Any) -> Any:
            with self._timing():
                return propose(*arguments, **named)

        drafter.propose = timed
        runner.drafter = drafter

    @contextmanager
    def _timing(self) -> Iterator[None]:
        start = perf_counter()
        yield
        self.counters = self.counters._replace(
            num_proposals=self.counters.num_proposals + 1,
            draft_sec=self.counters.draft_sec + perf_counter() - start,
        )


if __name__ == "__main__":
    main()
