"""Put two replicas on this machine under load, kill one, and say what came of it, as JSON.

    python examples/ray_serve/measure.py --out docs/results/ray/two_replicas.json

Every answer is held against plain `generate`'s.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx

from lade.bench.environment import environment
from lade.engines.ray import RayCollector
from lade.models import LoadedModel, encode, load

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from app import app  # noqa: E402
from client import ask  # noqa: E402

_COLLECTOR = "measured"
_FIRST = 25  # answers of a replica that tell what its pool began with
_HARDEST_WAIT_SEC = 300.0


def prompts_of(paths: list[Path], most: int) -> list[str]:
    lines = [line for path in paths for line in path.read_text().splitlines()]
    return [json.loads(line)["turns"][0] for line in lines][:most]


def plain_texts(loaded: LoadedModel, prompts: list[str], max_tokens: int) -> list[str]:
    texts = []
    for prompt in prompts:
        inputs = encode(loaded.tokenizer, prompt)
        ids = loaded.model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)[0]
        answer = ids[inputs["input_ids"].shape[1] :]
        texts.append(loaded.tokenizer.decode(answer, skip_special_tokens=True))
    return texts


class Load:
    """Clients that share a list of questions, and what they were answered."""

    def __init__(self, options: argparse.Namespace, prompts: list[str], texts: list[str]) -> None:
        self.options = options
        self.prompts, self.texts = prompts, texts
        self.asked = [*islice(cycle(range(len(prompts))), options.requests)]
        random.Random(options.seed).shuffle(self.asked)
        self.answers: list[dict[str, Any]] = []
        self.tried: Counter[str] = Counter()
        self.lost: list[str] = []
        self.killed: dict[str, Any] | None = None

    async def run(self, url: str) -> float:
        """Ask all questions, and on until a killed replica is replaced; return how long it took."""
        begin = perf_counter()
        questions = self._questions()
        async with httpx.AsyncClient(base_url=url, timeout=_HARDEST_WAIT_SEC) as http:
            clients = [self._client(http, questions, i) for i in range(self.options.clients)]
            await asyncio.gather(*clients)
        return perf_counter() - begin

    def _questions(self) -> Iterator[int]:
        yield from self.asked
        # Fast models are done with all of them before Ray has replaced a replica.
        until = perf_counter() + _HARDEST_WAIT_SEC
        for which in cycle(self.asked):
            pids = {answer["pid"] for answer in self.answers}
            if self.killed is None or len(pids) > self.options.replicas or perf_counter() > until:
                return
            yield which

    async def _client(self, http: httpx.AsyncClient, questions: Any, number: int) -> None:
        rng = random.Random(self.options.seed + number)
        for which in questions:
            begin = perf_counter()
            try:
                answer = await ask(
                    http, self.prompts[which], self.options.max_tokens, rng=rng, tried=self.tried
                )
            except (httpx.HTTPError, TimeoutError) as error:
                self.lost.append(str(error))
                continue
            now = perf_counter()
            is_right = answer["text"] == self.texts[which]
            self.answers.append({**answer, "sec": now - begin, "at": now, "is_right": is_right})
            if len(self.answers) % 50 == 0:
                print(f"{len(self.answers)} of {self.options.requests} answers", file=sys.stderr)
            if len(self.answers) == self.options.kill_after:
                os.kill(answer["pid"], signal.SIGKILL)
                self.killed = {"pid": answer["pid"], "at": now}

    def report(self, sec: float) -> dict[str, Any]:
        """Return what came of it."""
        if not self.answers:
            raise RuntimeError(f"expected answers, got none: {self.lost[0]}")
        seconds = sorted(answer["sec"] for answer in self.answers)
        pids = [*dict.fromkeys(answer["pid"] for answer in self.answers)]
        report = {
            "num_requests": len(self.answers) + len(self.lost),
            "num_answered": len(self.answers),
            "num_right": sum(answer["is_right"] for answer in self.answers),
            "num_lost": len(self.lost),
            "tries": dict(sorted(self.tried.items())),
            "sec": round(sec, 1),
            "answers_per_sec": round(len(self.answers) / sec, 2),
            "median_sec": round(seconds[len(seconds) // 2], 2),
            "p99_sec": round(seconds[int(0.99 * (len(seconds) - 1))], 2),
            "replicas": [self._replica(number, pid) for number, pid in enumerate(pids)],
        }
        if self.killed is not None:
            after = [a["at"] for a in self.answers if pids.index(a["pid"]) >= 2]
            report["killed"] = {
                "replica": pids.index(self.killed["pid"]),
                "after_answers": self.options.kill_after,
                "replaced_after_sec": round(min(after) - self.killed["at"], 1) if after else None,
            }
        return report

    def _replica(self, number: int, pid: int) -> dict[str, Any]:
        mine = [answer for answer in self.answers if answer["pid"] == pid]
        return {
            "replica": number,
            "num_answers": len(mine),
            "num_joined_tokens": mine[0]["num_joined_tokens"],
            f"tokens_per_forward_first_{_FIRST}": tokens_per_forward(mine[:_FIRST]),
            "tokens_per_forward": tokens_per_forward(mine),
        }


def tokens_per_forward(answers: list[dict[str, Any]]) -> float:
    """Return the mean accepted tokens, the bonus token counted; without the first of each."""
    num_forwards = sum(answer["num_forwards"] for answer in answers)
    num_tokens = sum(answer["num_tokens"] - 1 for answer in answers)
    return round(float(num_tokens / max(1, num_forwards)), 3)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    prompts = prompts_of(options.prompts, options.num_prompts)
    loaded = load(options.model, device="cpu", dtype="float32")
    texts = plain_texts(loaded, prompts, options.max_tokens)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=options.replicas, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        arguments = {
            "model": options.model or "",
            "collector": _COLLECTOR,
            "replicas": str(options.replicas),
            "queue": str(options.queue),
            "every": str(options.every),
        }
        serve.run(app(arguments))
        clients = Load(options, prompts, texts)
        sec = asyncio.run(clients.run(f"http://127.0.0.1:{port}"))
        found = clients.report(sec)
        serve.shutdown()  # replicas send what is left
        found["collector"] = asdict(RayCollector(_COLLECTOR).stats())
    finally:
        ray.shutdown()
    names = ("seed", "requests", "clients", "replicas", "queue", "every")
    settings = {
        "model": loaded.name,
        "dtype": "float32",
        "max_new_tokens": options.max_tokens,
        "prompts": {"num": len(prompts)},
        **{name: getattr(options, name) for name in names},
    }
    return {
        "environment": {**environment(), "ray": ray.__version__},
        "settings": settings,
        **found,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    files = [ROOT / "docs/prompts" / name for name in ("support.jsonl", "support_before.jsonl")]
    parser.add_argument("--model", help="a Hub id or a folder; the default model without")
    parser.add_argument("--prompts", type=Path, nargs="+", default=files)
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--kill-after", type=int, default=200, help="answers; 0 for never")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--queue", type=int, default=4)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between exchanges")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    text = json.dumps(measure(options), indent=2) + "\n"
    if options.out is None:
        print(text, end="")
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text)


if __name__ == "__main__":
    main()
