"""A server in a process of its own, and clients that ask, leave, dawdle and send nonsense.

python -m tests.load --clients 1000 --seconds 1200 --out docs/results/load.json

Attackers, if asked for, send what takes much, by keys of their own, after a tenth of the time.
Every complete answer is held against plain `generate`'s for its prompt and seed, so that a wrong
one, or one that was meant for somebody else, is seen. In half precision (`--dtype bfloat16`) the
right answer is that of lade without drafts and alone.
"""

import argparse
import asyncio
import json
import random
import re
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import numpy as np
import torch

import lade
from tests.about import about
from tests.lade.apps.server.hostile import BODIES, FLOODS
from tests.lade.apps.server.serving import loaded_model, plain_text, process_of

_KEYS = [f"key-{number}" for number in range(20)]
_ATTACKERS = [f"attacker-{number}" for number in range(6)]
_CHAT = "/v1/chat/completions"
_AFTER_SEC = 20.0  # without attackers, at the end
_FLOOD = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 24}
_PLAIN = json.dumps(_FLOOD).encode()
# Made once, or those who measure would wait for them.
_CONTENTS = {name: json.dumps({**_FLOOD, **make()}).encode() for name, make in BODIES.items()}
# What takes much of each token; the stops are those that look most as if they had begun.
_COSTLY: dict[str, dict[str, Any]] = {
    "log-probabilities": {"logprobs": True, "top_logprobs": 20},
    "stops": {"stop": ["a" * 255 + end for end in "bcde"], "logit_bias": {"64": 100}},
    "biases": {"logit_bias": {str(token): token / 100 for token in range(94)}},
}
_CONTENTS |= {
    name: json.dumps({**_FLOOD, "max_tokens": 400, **more}).encode()
    for name, more in _COSTLY.items()
}


class Load:
    """All that is asked of a server, and what came of it."""

    def __init__(self, plan: argparse.Namespace) -> None:
        self.plan = plan
        self.counts = Counter(num_right=0, num_wrong=0, num_mixed=0, num_lost=0, num_left=0)
        self.statuses, self.attack_statuses = Counter[str](), Counter[str]()
        self.seconds: dict[str, list[float]] = {
            name: [] for name in ("first_token", "quiet_first_token", "health", "own")
        }
        self.memory_bytes: list[int] = []
        # Schemas want a model whose answers end; compiled forwards want heads of whole vectors.
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        options: dict[str, Any] = heads | {"dtype": getattr(torch, plan.dtype)}
        self.loaded = loaded_model(**options, **({"eos_token_id": 93} if plan.attackers else {}))
        self.asked = [self._question(number, seed) for number in range(40) for seed in range(4)]

    def _question(self, number: int, seed: int) -> tuple[dict[str, Any], str]:
        """Return what to ask, and the only right answer."""
        messages = [{"role": "user", "content": f"Question-{number}:-what-is-{number * 37}?"}]
        body = {"messages": messages, "max_tokens": 24, "temperature": 0.9, "seed": seed}
        sampling: Any = {"temperature": 0.9, "max_new_tokens": 24}
        if self.plan.dtype != "float32":
            sampling["custom_generate"] = partial(
                lade.decode, config=lade.Config(max_draft_tokens=0)
            )
        return body, plain_text(self.loaded, messages, seed=seed, **sampling)

    async def run(self, url: str) -> str:
        """Ask until the end; return the server's metrics then."""
        plan, begin = self.plan, perf_counter()
        self.turn, self.end = begin + plan.seconds / 10, begin + plan.seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=plan.clients)
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
            seeds = range(plan.seed, plan.seed + plan.clients)
            await asyncio.gather(
                *(self._client(http, random.Random(each)) for each in seeds),
                *(self._attacker(http, random.Random(-each - 1)) for each in range(plan.attackers)),
                self._watch(http),
            )
            return await self._metrics(http)

    async def _metrics(self, http: httpx.AsyncClient) -> str:
        return (await http.get("/metrics", headers={"authorization": "Bearer boss"})).text

    async def _watch(self, http: httpx.AsyncClient) -> None:
        """Note the server's memory, and how soon it says that it lives."""
        while (begin := perf_counter()) < self.end:
            (await http.get("/health")).raise_for_status()
            self.seconds["health"].append(perf_counter() - begin)
            name = "process_resident_memory_bytes"
            self.memory_bytes.append(int(metric(await self._metrics(http), name)))
            begin = perf_counter()
            await asyncio.sleep(2)
            self.seconds["own"].append(perf_counter() - begin - 2)

    async def _client(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Ask again and again, behaving well or not."""
        await asyncio.sleep(rng.random() * 2)
        while perf_counter() < self.end:
            asking, wait = self._ask(http, rng), 0.0
            if rng.random() < 0.3:
                try:
                    await asyncio.wait_for(asking, rng.random() ** 2 * 20)
                except TimeoutError:
                    self.counts["num_left"] += 1
            else:
                wait = await asking
            await asyncio.sleep(wait * (0.5 + rng.random()))

    async def _ask(self, http: httpx.AsyncClient, rng: random.Random) -> float:
        """Ask once; return for how long to wait."""
        body, text = rng.choice(self.asked)
        stream, dawdles = rng.random() < 0.7, rng.random() < 0.1
        content = json.dumps({**body, "stream": stream, "user": str(rng.randrange(3))})
        if rng.random() < 0.04:
            content = rng.choice([content[: rng.randrange(len(content))], "[]", '{"n": 2}', "\0"])
        elif rng.random() < 0.01:
            content += " " * 2**22
        key, begin, lines, has_text = rng.choice(_KEYS), perf_counter(), list[str](), False
        try:
            async with http.stream("POST", _CHAT, content=content, headers=headers(key)) as answer:
                self.statuses[str(answer.status_code)] += 1
                if answer.status_code != 200:
                    error = json.loads(await answer.aread())["error"]
                    assert error.keys() == {"message", "type", "param", "code"}
                    return float(answer.headers.get("retry-after", 0))
                async for line in answer.aiter_lines():
                    if stream and not has_text and '"content"' in line:
                        has_text, now = True, perf_counter()
                        is_quiet = self.plan.attackers and now < self.turn
                        name = "quiet_first_token" if is_quiet else "first_token"
                        self.seconds[name].append(now - begin)
                    lines.append(line.removeprefix("data: "))
                    if dawdles:
                        await asyncio.sleep(rng.random())
        except httpx.HTTPError as error:
            self.statuses[type(error).__name__] += 1
            self.counts["num_lost"] += 1
            print(f"lost: {len(lines)} lines, {error!r}", file=sys.stderr)
            return 1.0
        self._judge([line for line in lines if line], text, stream)
        return 0.0

    def _judge(self, lines: list[str], text: str, stream: bool) -> None:
        events = [json.loads(line) for line in lines if line != "[DONE]"]
        if "error" in events[-1]:
            self.statuses[events[-1]["error"]["code"]] += 1
            return
        choices = [event["choices"][0] for event in events]
        parts = [each.get("delta") or each.get("message") or {} for each in choices]
        found = "".join(part.get("content") or "" for part in parts)
        if stream and lines[-1] != "[DONE]":
            self.counts["num_lost"] += 1
        elif found == text:
            self.counts["num_right"] += 1
        else:
            is_other = any(found == other for _, other in self.asked)
            self.counts["num_mixed" if is_other else "num_wrong"] += 1

    async def _attacker(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Send what takes much, connect and say nothing, or never end what is said."""
        await asyncio.sleep(max(self.turn - perf_counter(), 0))
        while perf_counter() < self.end - _AFTER_SEC:
            try:
                async with asyncio.timeout(rng.choice((0.5, 5.0, 60.0))):
                    status = await _attack(http, rng)
            except TimeoutError:
                status = "left"
            except (httpx.HTTPError, OSError) as error:
                status = type(error).__name__
            self.attack_statuses[status] += 1
            await asyncio.sleep(rng.random())

    def report(self, metrics: str, sec: float, exit_code: int) -> dict[str, Any]:
        """Return what came of it, ready for JSON."""
        memory = np.array(self.memory_bytes)
        tenth = max(len(memory) // 10, 1)
        places = np.linspace(0, len(memory) - 1, min(len(memory), 41)).astype(int)
        times = {
            f"{name}_sec": {f"p{p}": round(float(np.percentile(sec, p)), 3) for p in (50, 99)}
            for name, sec in self.seconds.items()
            if sec
        }
        accepted = "vllm:spec_decode_num_accepted_tokens_total"
        return {
            "plan": {name: each for name, each in vars(self.plan).items() if name != "out"},
            "sec": round(sec, 1),
            "statuses": self.statuses,
            "attack_statuses": self.attack_statuses,
            **self.counts,
            "num_tokens": int(metric(metrics, "vllm:generation_tokens_total")),
            "num_accepted_tokens": int(metric(metrics, accepted)),
            **times,
            "memory_mb": {
                "after_a_tenth": round(int(memory[tenth - 1]) / 1e6),
                "last_tenth": round(float(np.median(memory[-tenth:])) / 1e6),
                "last": round(int(memory[-1]) / 1e6),
                "over_time": [round(int(memory[place]) / 1e6) for place in places],
            },
            "exit_code": exit_code,
        }


async def _attack(http: httpx.AsyncClient, rng: random.Random) -> str:
    kind = rng.choice([*_CONTENTS, *FLOODS, "silence", "no end", "floods", "floods"])
    if kind == "silence" or kind in FLOODS:
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        try:
            for _ in range(200 if kind in FLOODS else 0):  # tens of megabytes, if they are taken
                writer.write(FLOODS[kind])
                await writer.drain()
            async with asyncio.timeout(30):
                return (await reader.read(64)).decode()[9:12] or "closed"
        finally:
            writer.close()
    content: Any = _endless() if kind == "no end" else _CONTENTS.get(kind, _PLAIN)
    answer = await http.post(_CHAT, content=content, headers=headers(rng.choice(_ATTACKERS)))
    return str(answer.status_code)


async def _endless() -> AsyncIterator[bytes]:
    yield b'{"messages": "'
    while True:
        yield b"a" * 1000
        await asyncio.sleep(0.1)


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", "content-type": "application/json"}


def metric(text: str, name: str) -> float:
    """Return a metric's value, of all labels."""
    values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, values))


def main() -> None:
    parser = argparse.ArgumentParser(description="Load on lade serve, and attacks on it.")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--max-queue", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attackers", type=int, default=0, help="that send what takes much")
    parser.add_argument("--out", type=Path)
    load = Load(plan := parser.parse_args())
    with suppress(ValueError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        keys = folder / "keys"
        keys.write_text("\n".join(["boss admin", *_KEYS, *_ATTACKERS]))
        options = ["--api-keys-file", str(keys), "--pools", str(folder / "pools")]
        options += ["--max-queue", str(plan.max_queue), "--timeout", "300"]
        # So little that both are full within minutes, and memory shows what else grows.
        options += ["--pool-memory-bytes", str(2**26), "--max-prefix-bytes", str(2**25)]
        with process_of(load.loaded, folder, *options) as (process, url):
            begin = perf_counter()
            metrics = asyncio.run(load.run(url))
            sec = perf_counter() - begin
            process.send_signal(signal.SIGTERM)
            exit_code = process.wait(120)
    report = load.report(metrics, sec, exit_code) | about()
    text = json.dumps(report, indent=2) + "\n"
    print(text, end="")
    if plan.out is not None:
        plan.out.write_text(text)
    failed = {"500"} & {*report["statuses"], *report["attack_statuses"]}
    if failed or any(report[name] for name in ("num_wrong", "num_mixed", "num_lost")):
        sys.exit(1)


if __name__ == "__main__":
    main()
