"""`engines`: methods of speculative decoding in vLLM beside each other, many requests at once.

Each method has an engine in a process of its own, stepped by its clients there, so that nothing but
the engine's and the drafter's work is between two steps. A client sends its next prompt as soon as
its last is answered. With every number of clients, drafters begin anew; what they learn in the
first pass they know in the second. The cache of prefixes is emptied between passes.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks.alone import alone
from benchmarks.environment import environment
from benchmarks.methods import named
from benchmarks.prompts import Chosen
from benchmarks.report import (
    Keeping,
    msec_text,
    progress_bar,
    share_text,
    sheet,
    show,
    speedup_text,
)
from lade.apps.cli.loading import tell
from lade.engines.extension import PoolExtension
from lade.errors import LadeError, MissingExtraError
from lade.models.loading import find_model, load_tokenizer, source_of
from lade.models.prompts import encode
from lade.stats import ends_in_loop

PLAIN = "plain"
_PROPOSER = {"method": "custom_class", "model": "lade.engines.vllm.PoolProposer"}
_LOOKUP = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}
#: By name, in the order of tables: vLLM's `speculative_config`, but for num_speculative_tokens, and
#: how lade's proposer shares its pools.
METHODS: dict[str, tuple[Mapping[str, Any] | None, str | None]] = {
    PLAIN: (None, None),
    "ngram": (_LOOKUP, None),
    "ngram_5": ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 5}, None),
    "suffix": ({"method": "suffix"}, None),  # of the package arctic-inference
    "pool": (_PROPOSER, "all"),
    "pool_private": (_PROPOSER, "none"),
    "pool_prewarmed": (_PROPOSER, "all"),
}
_NUM_PASSES, _NUM_DRAFT_TOKENS = 2, 8
_COUNTERS = {  # of vLLM, by our fields
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
}
# What vLLM's builds for CPUs ask for; other builds ignore these. Whoever sets them is obeyed.
_CPU_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_OPENMP = "libiomp5.so"  # vLLM warns of large losses where it is not loaded first


@dataclass(frozen=True)
class EngineJob:
    """A comparison, and which of its methods an engine runs."""

    model: str  # for vLLM: a hub id or a folder
    dtype: str
    prompts: Sequence[Sequence[int]]  # token ids
    concurrency: Sequence[int]  # numbers of requests at once, each measured by itself
    max_new_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)  # of lade's proposer
    table: str | None = None  # path of a prewarmed model's table
    method: str = PLAIN


class RequestAnswer(NamedTuple):
    """One answered request."""

    token_ids: list[int]
    num_steps: int  # of the engine that gave it a token or more; the first runs the prompt
    first_token_sec: float  # from asking to the first token
    sec: float  # to the last one


class Pass(NamedTuple):
    """What an engine did in a pass over all prompts."""

    concurrency: int
    number: int  # from 1
    sec: float
    answers: list[RequestAnswer]  # in the order of the prompts
    counters: dict[str, Any]  # of the engine and its drafter


class SteppedEngine:
    """vLLM's engine, stepped by its clients."""

    def __init__(self, job: EngineJob) -> None:
        import vllm
        from vllm.platforms import current_platform

        config, sharing = METHODS[job.method]
        prewarmed = {"prewarmed": job.table} if job.method == "pool_prewarmed" else {}
        # Where a request is nearer to this limit, vLLM drafts nothing for all of them.
        most = max(map(len, job.prompts)) + job.max_new_tokens + _NUM_DRAFT_TOKENS + 1
        arguments = vllm.EngineArgs(
            model=job.model,
            dtype=job.dtype,
            max_model_len=most,
            max_num_seqs=max(job.concurrency),
            seed=0,
            # What a CPU gains by compilation, a benchmark of minutes spends on it.
            enforce_eager=current_platform.is_cpu(),
            disable_log_stats=False,  # they are the counters
            speculative_config=None
            if config is None
            else {**config, "num_speculative_tokens": _NUM_DRAFT_TOKENS},
            additional_config={}
            if sharing is None
            else {"lade": {**job.options, **prewarmed, "sharing": sharing}},
        )
        self._engine, self._ids = vllm.LLMEngine.from_engine_args(arguments), count()
        self._draft_sec = self._num_proposals = 0.0

    def run(
        self, prompts: Sequence[Sequence[int]], concurrency: int, number: int, max_new_tokens: int
    ) -> Pass:
        """Answer all prompts, the drafter beginning anew in the first pass."""
        if number == 1:
            self._engine.collective_rpc(self._renew)
        # Prompts of a second pass are run like those of the first.
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("expected vLLM to drop its prefix cache between passes")
        before, self._draft_sec, self._num_proposals = self._counted(), 0.0, 0.0
        start = perf_counter()
        answers = self._answer(prompts, concurrency, max_new_tokens)
        sec, after = perf_counter() - start, self._counted()
        counters: dict[str, Any] = {name: after[name] - before[name] for name in after}
        counters["draft_sec_per_step"] = self._draft_sec / max(self._num_proposals, 1)
        return Pass(concurrency, number, sec, answers, counters)

    def _answer(
        self, prompts: Sequence[Sequence[int]], concurrency: int, max_new_tokens: int
    ) -> list[RequestAnswer]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        settings = SamplingParams(
            temperature=0.0,
            max_tokens=max_new_tokens,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        waiting = iter(enumerate(prompts))
        running: dict[str, tuple[int, float, list[list[int]], list[float]]] = {}
        answers: dict[int, RequestAnswer] = {}

        def ask_next() -> None:
            for number, token_ids in waiting:
                name = str(next(self._ids))
                running[name] = number, perf_counter(), [], []
                self._engine.add_request(name, {"prompt_token_ids": [*token_ids]}, settings)
                return

        for _ in range(concurrency):
            ask_next()
        while running:
            for output in self._engine.step():
                number, start, parts, times = running[output.request_id]
                if new := output.outputs[0].token_ids:
                    parts.append([*new])
                    times.append(perf_counter() - start)
                if output.finished:
                    del running[output.request_id]
                    token_ids = [token_id for part in parts for token_id in part]
                    answers[number] = RequestAnswer(token_ids, len(parts), times[0], times[-1])
                    ask_next()
        return [answers[number] for number in range(len(prompts))]

    def _counted(self) -> dict[str, int]:
        """Return vLLM's own counters of drafts and our proposer's failures, by our names."""
        metrics = self._engine.get_metrics()
        counted = {_COUNTERS[each.name]: each.value for each in metrics if each.name in _COUNTERS}
        (stats,) = self._engine.collective_rpc(PoolExtension.lade_stats)
        return {**counted, "num_failures": 0 if stats is None else stats["failures"]}

    def _renew(self, worker: Any) -> None:
        """Make the worker's drafter anew, as its runner makes it, if it has one, and time it."""
        runner = worker.model_runner
        old = getattr(runner, "drafter", None)
        if old is None:
            return
        runner.drafter = drafter = type(old)(runner.vllm_config)
        drafter.load_model(runner.model)
        propose = drafter.propose

        def timed(*arguments: Any, **options: Any) -> Any:
            start = perf_counter()
            proposed = propose(*arguments, **options)
            self._draft_sec += perf_counter() - start
            self._num_proposals += 1
            return proposed

        drafter.propose = timed


def answered(job: EngineJob) -> list[Pass]:
    """Return all passes of a method, in this process, which vLLM's engine shares."""
    engine = SteppedEngine(job)
    first = [[number + 1, *range(5, 13)] for number in range(min(max(job.concurrency), 4))]
    engine.run(first, len(first), 1, 8)  # so that nothing is compiled or allocated later
    return [
        engine.run(job.prompts, concurrency, number, job.max_new_tokens)
        for concurrency in job.concurrency
        for number in range(1, _NUM_PASSES + 1)
    ]


def summarise(done: Pass, plain: Pass | None) -> dict[str, Any]:
    """Return what a pass comes to, compared with plain's same pass.

    MAT is tokens of a request in an engine's step, but for the step of its prompt, of answers that
    end in no loop; vLLM's acceptance length is of steps with a draft.
    """
    answers, counters = done.answers, done.counters
    judged = answers if plain is None else plain.answers
    loops = [ends_in_loop(answer.token_ids) for answer in judged]
    clean = [answer for answer, loop in zip(answers, loops, strict=True) if not loop] or answers
    num_steps = sum(answer.num_steps - 1 for answer in clean)
    num_gained = sum(len(answer.token_ids) - 1 for answer in clean)
    latencies = [answer.sec for answer in answers]
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    num_drafts, num_accepted = (counters.get(f"num_{n}", 0) for n in ("drafts", "accepted_tokens"))
    same = None
    if plain is not None:
        pairs = zip(answers, plain.answers, strict=True)
        same = sum(one.token_ids == other.token_ids for one, other in pairs) / len(answers)
    return {
        "num_tokens": num_tokens,
        "tokens_per_sec": num_tokens / done.sec,
        "mat": num_gained / num_steps if num_steps else 1.0,
        "acceptance_length": 1 + num_accepted / num_drafts if num_drafts else None,
        "num_draft_tokens": counters.get("num_draft_tokens", 0),
        "num_accepted_tokens": num_accepted,
        "num_failures": counters["num_failures"],
        "draft_sec_per_step": counters["draft_sec_per_step"],
        "first_token_sec": median(answer.first_token_sec for answer in answers),
        "latency_sec": median(latencies),
        "latency_p90_sec": quantiles(latencies, n=10)[-1] if len(answers) > 1 else latencies[0],
        "same_text": same,
        "num_loops": sum(loops),
    }


def table(rows: Sequence[Mapping[str, Any]], title: str, caption: str) -> Table:
    """Return a table with a section for each number of requests and pass."""
    sections: dict[str, list[list[str]]] = {}
    for row in rows:
        key = f"{row['concurrency']} at once, pass {row['pass']}"
        same_pass = ("concurrency", "pass")
        plain = (r for r in rows if r["method"] == PLAIN and all(r[n] == row[n] for n in same_pass))
        speed, num_drafted = (
            next((r["tokens_per_sec"] for r in plain), None),
            row["num_draft_tokens"],
        )
        length = row["acceptance_length"]
        sections.setdefault(key, []).append(
            [
                *(key, row["method"], f"{row['tokens_per_sec']:.1f}"),
                speedup_text(speed and row["tokens_per_sec"] / speed),
                f"{row['mat']:.2f}",
                "" if length is None else f"{length:.2f}",
                share_text(row["num_accepted_tokens"] / num_drafted) if num_drafted else "",
                msec_text(row["draft_sec_per_step"]) if num_drafted else "",
                f"{1000 * row['first_token_sec']:,.0f}",
                f"{row['latency_sec']:.2f}",
                "" if row["same_text"] is None else f"{row['same_text']:.1%}",
            ]
        )
    headings = (
        *("requests", "method", "tokens/s", "speed-up", "MAT", "acceptance length", "accepted"),
        *("draft ms/step", "first token, ms", "latency, s", "same text"),
    )
    return sheet(title, headings, [*sections.values()], caption)


def choose(text: str | None, table: Path | None) -> list[str]:
    """Return the methods to run: those named, or all that can run here.

    Raises:
        MissingExtraError: vLLM is not installed.
        ValueError: a method is unknown or named twice.
    """
    if find_spec("vllm") is None:  # of the distribution vllm, or of a build for CPUs
        raise MissingExtraError("vllm", "vllm")
    if text is not None:
        return named(text, [*METHODS])
    missing = {"suffix": find_spec("arctic_inference") is None, "pool_prewarmed": table is None}
    return [name for name in METHODS if not missing.get(name)]


def run(
    model: str | None,
    job: EngineJob,
    chosen: Sequence[Chosen],
    methods: Sequence[str],
    checks: bool,
    threads: int | None,
    file: Path | None,
) -> None:
    """Run all methods; show and write what they did, also when interrupted.

    Raises:
        LadeError: vLLM failed; or a check was asked for, and a method does not say what plain says.
    """
    tokenizer = load_tokenizer(model, progress=tell)
    texts = [prompt.text for each in chosen for prompt in each.prompts]
    prompts = [encode(tokenizer, text)["input_ids"][0].tolist() for text in texts]
    job = replace(job, model=source_of(find_model(model)), prompts=prompts)
    threads = threads or os.cpu_count() or 1
    # We step the engine ourselves; results must not wait for a server that counts users.
    ours = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    openmp = Path(sys.prefix) / "lib" / _OPENMP
    preload = {"LD_PRELOAD": str(openmp)} if openmp.is_file() else {}
    os.environ.update(
        {**_CPU_SETTINGS, **preload, **os.environ, **ours, "OMP_NUM_THREADS": str(threads)}
    )
    rows: list[dict[str, Any]] = []
    plain: list[Pass] = []
    with Keeping(rows) as kept, progress_bar() as bars:
        for method in bars.track(methods, description="answering"):
            passes = alone(answered, replace(job, method=method))
            plain = passes if method == PLAIN else plain
            for place, done in enumerate(passes):
                summary = summarise(done, plain[place] if plain else None)
                where = {"concurrency": done.concurrency, "pass": done.number}
                rows.append({"method": method, **where, **summary})
    settings = {
        "model": Path(job.model).name,
        "dtype": job.dtype,
        "threads": threads,
        "prompts": [each.described for each in chosen],
        "num_prompts": len(prompts),
        "max_new_tokens": job.max_new_tokens,
        "num_speculative_tokens": _NUM_DRAFT_TOKENS,
        "passes": _NUM_PASSES,
        "methods": [*methods],
        "options": dict(job.options),
        "interrupted": kept.by is not None,
    }
    title = f"vLLM in {job.dtype}, {len(prompts)} prompts, {job.max_new_tokens} new tokens"
    caption = "MAT is without answers that end in a loop; acceptance length is vLLM's own."
    version = {"vllm": metadata.version(metadata.packages_distributions()["vllm"][0])}
    content = {"environment": environment() | version, "settings": settings, "rows": rows}
    show(file, content, table(rows, title, caption))
    kept.end(f"stopped after {len(rows)} passes")
    wrong = [
        f"{row['method']}, pass {row['pass']}: {row['same_text']:.1%} of the answers have plain's "
        f"tokens, and the proposer failed {row['num_failures']} times"
        for row in rows
        if row["same_text"] not in (None, 1.0) or row["num_failures"]
    ]
    if checks and wrong:
        raise LadeError("; ".join(wrong))
