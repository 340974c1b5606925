"""A server in a process of its own, and clients that ask, leave, dawdle and send nonsense.

Attackers, if asked for, send what takes much, by keys of their own, after a tenth of the time.

Every complete answer is held against plain `generate`'s for its prompt and seed, so that a wrong
one, or one that was meant for somebody else, is seen.
"""

import asyncio
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import httpx
import numpy as np

from lade.models.loading import LoadedModel
from tests.lade.server.hostile import BODIES
from tests.lade.server.serving import loaded_model, plain_text

_NUM_KEYS = 20
_NUM_PROMPTS = 40
_NUM_SEEDS = 4
_SAMPLE_SEC = 2.0
_NUM_IN_PLOT = 41  # of these samples, evenly over the run
_LONGEST_WAIT_SEC = 5.0  # though the server says more
_AFTER_SEC = 20.0  # without attackers, at the end
_MAX_BODY_BYTES = 2**16
_FLOOD = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 24}
_KINDS = {"leaves": 0.3, "dawdles": 0.1, "is_oversize": 0.02, "is_malformed": 0.04}


class Plan(NamedTuple):
    """How much load, and for how long."""

    num_clients: int
    seconds: float
    max_queue: int
    max_tokens: int
    seed: int
    num_attackers: int = 0


class Question(NamedTuple):
    """What is asked, and the only right answer."""

    body: dict[str, Any]
    text: str


@dataclass
class Tally:
    """What came of all requests."""

    statuses: Counter[str] = field(default_factory=Counter)
    errors_in_streams: Counter[str] = field(default_factory=Counter)
    num_right: int = 0
    num_wrong: int = 0  # not the text of its prompt and seed, nor of any other
    num_mixed: int = 0  # the text of another
    num_lost: int = 0  # neither complete nor with an error
    num_left: int = 0
    attack_statuses: Counter[str] = field(default_factory=Counter)
    quiet_first_token_sec: list[float] = field(default_factory=list)  # before attackers come
    first_token_sec: list[float] = field(default_factory=list)
    health_sec: list[float] = field(default_factory=list)
    own_sec: list[float] = field(default_factory=list)  # by which clients and watch are late
    memory_bytes: list[int] = field(default_factory=list)


def questions(plan: Plan) -> list[Question]:
    """Return different questions with plain `generate`'s answers."""
    loaded = _model(plan)
    found = []
    for number in range(_NUM_PROMPTS):
        messages = [{"role": "user", "content": f"Question-{number}:-what-is-{number * 37}?"}]
        for seed in range(_NUM_SEEDS):
            body = {"messages": messages, "max_tokens": plan.max_tokens, "temperature": 0.9}
            text = plain_text(
                loaded, messages, seed=seed, temperature=0.9, max_new_tokens=plan.max_tokens
            )
            found.append(Question({**body, "seed": seed}, text))
    return found


def _model(plan: Plan) -> LoadedModel:
    """Return the model that is served; schemas want one whose answers end."""
    return loaded_model(eos_token_id=93) if plan.num_attackers else loaded_model()


async def load(plan: Plan, folder: Path) -> dict[str, Any]:
    """Start a server, put it under load, stop it; return a report."""
    _allow_many_files()
    asked = questions(plan)
    keys = [f"key-{number}" for number in range(_NUM_KEYS)]
    of_attackers = [f"attacker-{number}" for number in range(plan.num_attackers // 10 + 1)]
    process, url, metrics_url = _start(plan, folder, [*keys, *of_attackers])
    tally, begin = Tally(), perf_counter()
    try:
        end = begin + plan.seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=plan.num_clients)
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
            clients = [
                _Client(http, random.Random(plan.seed + number), keys, asked, tally).run(end)
                for number in range(plan.num_clients)
            ]
            attackers = [
                _Attacker(http, random.Random(-number - 1), of_attackers, tally).run(
                    begin + plan.seconds / 10, end - _AFTER_SEC
                )
                for number in range(plan.num_attackers)
            ]
            watching = asyncio.create_task(_watch(http, metrics_url, tally, end))
            turning = asyncio.create_task(_turn(tally, plan))
            await asyncio.gather(*clients, *attackers)
            await watching
            await turning
            metrics = (await http.get(metrics_url)).text
        sec = perf_counter() - begin
    finally:
        process.send_signal(signal.SIGTERM)
        exit_code = process.wait(120)
    return _report(plan, tally, metrics, sec, exit_code)


class _Client:
    """Asks again and again, behaving well or not."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        rng: random.Random,
        keys: list[str],
        asked: list[Question],
        tally: Tally,
    ) -> None:
        self._http = http
        self._rng = rng
        self._keys = keys
        self._asked = asked
        self._tally = tally

    async def run(self, end: float) -> None:
        """Ask until the end."""
        await asyncio.sleep(self._rng.random() * 2)
        while perf_counter() < end:
            wait = await self._ask()
            await asyncio.sleep(wait * (0.5 + self._rng.random()))

    async def _ask(self) -> float:
        """Ask once; return for how long to wait."""
        rng, question = self._rng, self._rng.choice(self._asked)
        kind = next((name for name, share in _KINDS.items() if rng.random() < share), "")
        stream = rng.random() < 0.7
        content = json.dumps({**question.body, "stream": stream, "user": str(rng.randrange(3))})
        if kind == "is_oversize":
            content += " " * _MAX_BODY_BYTES
        elif kind == "is_malformed":
            content = rng.choice([content[: rng.randrange(len(content))], "[]", '{"n": 2}', "\0"])
        headers = {
            "authorization": f"Bearer {rng.choice(self._keys)}",
            "content-type": "application/json",
        }
        begin = perf_counter()
        asking = self._read(content, headers, question, stream, kind, begin)
        if kind != "leaves":
            return await asking
        try:
            return await asyncio.wait_for(asking, rng.random() ** 2 * 20)
        except TimeoutError:
            self._tally.num_left += 1
            return 0.0

    async def _read(
        self,
        content: str,
        headers: dict[str, str],
        question: Question,
        stream: bool,
        kind: str,
        begin: float,
    ) -> float:
        tally = self._tally
        lines: list[str] = []
        has_text = False
        try:
            async with self._http.stream(
                "POST", "/v1/chat/completions", content=content, headers=headers
            ) as answer:
                tally.statuses[str(answer.status_code)] += 1
                if answer.status_code != 200:
                    error = json.loads(await answer.aread())["error"]
                    assert error.keys() == {"message", "type", "param", "code"}
                    return min(float(answer.headers.get("retry-after", 0)), _LONGEST_WAIT_SEC)
                async for line in answer.aiter_lines():
                    if stream and not has_text and '"content"' in line:
                        has_text = True
                        tally.first_token_sec.append(perf_counter() - begin)
                    lines.append(line)
                    if kind == "dawdles":
                        await asyncio.sleep(self._rng.random())
        except httpx.HTTPError as error:
            tally.statuses[type(error).__name__] += 1
            print(f"lost: {kind or 'well-behaved'}, {len(lines)} lines, {error!r}", file=sys.stderr)
            tally.num_lost += 1
            return 1.0
        self._judge(lines, question, stream)
        return 0.0

    def _judge(self, lines: list[str], question: Question, stream: bool) -> None:
        tally = self._tally
        data = [line.removeprefix("data: ") for line in lines if line]
        if stream:
            is_whole = data[-1:] == ["[DONE]"]
            events = [json.loads(each) for each in data if each != "[DONE]"]
            failed = [event for event in events if "error" in event]
            if failed:
                tally.errors_in_streams[failed[0]["error"]["code"]] += 1
                return
            choices = [event["choices"][0] for event in events]
            text = "".join(choice["delta"].get("content") or "" for choice in choices)
        else:
            is_whole = True
            text = json.loads("".join(data))["choices"][0]["message"]["content"]
        if not is_whole:
            tally.num_lost += 1
        elif text == question.text:
            tally.num_right += 1
        elif any(text == other.text for other in self._asked):
            tally.num_mixed += 1
        else:
            tally.num_wrong += 1


class _Attacker:
    """Sends what takes much, connects and says nothing, or never ends what it says."""

    # Made once, or those who measure would wait for it.
    _plain = json.dumps(_FLOOD).encode()
    _contents: ClassVar = {
        name: json.dumps({**_FLOOD, **make()}).encode() for name, make in BODIES.items()
    }

    def __init__(
        self, http: httpx.AsyncClient, rng: random.Random, keys: list[str], tally: Tally
    ) -> None:
        self._http = http
        self._rng = rng
        self._keys = keys
        self._tally = tally

    async def run(self, begin: float, end: float) -> None:
        """Attack from a time to another."""
        await asyncio.sleep(max(begin - perf_counter(), 0))
        while perf_counter() < end:
            try:
                async with asyncio.timeout(self._rng.choice((0.5, 5.0, 60.0))):
                    await self._attack()
            except TimeoutError:
                self._tally.attack_statuses["left"] += 1
            except (httpx.HTTPError, OSError) as error:
                self._tally.attack_statuses[type(error).__name__] += 1
            await asyncio.sleep(self._rng.random())

    async def _attack(self) -> None:
        headers = {
            "authorization": f"Bearer {self._rng.choice(self._keys)}",
            "content-type": "application/json",
        }
        kind = self._rng.choice([*BODIES, "silence", "no end", "floods", "floods"])
        if kind == "silence":
            url = self._http.base_url
            _, writer = await asyncio.open_connection(url.host, url.port)
            try:
                await asyncio.sleep(30)
            finally:
                writer.close()
            return
        content: Any = _endless() if kind == "no end" else self._contents.get(kind, self._plain)
        answer = await self._http.post("/v1/chat/completions", content=content, headers=headers)
        self._tally.attack_statuses[str(answer.status_code)] += 1


async def _endless() -> AsyncIterator[bytes]:
    yield b'{"messages": "'
    while True:
        yield b"a" * 1000
        await asyncio.sleep(0.1)


async def _turn(tally: Tally, plan: Plan) -> None:
    """Keep apart what was measured before attackers came."""
    if plan.num_attackers:
        await asyncio.sleep(plan.seconds / 10)
        tally.quiet_first_token_sec = tally.first_token_sec[:]
        tally.first_token_sec.clear()


async def _watch(http: httpx.AsyncClient, metrics_url: str, tally: Tally, end: float) -> None:
    """Note the server's memory, and how soon it says that it lives."""
    while perf_counter() < end:
        begin = perf_counter()
        (await http.get("/health")).raise_for_status()
        tally.health_sec.append(perf_counter() - begin)
        tally.memory_bytes.append(int(_metric((await http.get(metrics_url)).text)))
        begin = perf_counter()
        await asyncio.sleep(_SAMPLE_SEC)
        tally.own_sec.append(perf_counter() - begin - _SAMPLE_SEC)


def _metric(text: str, name: str = "process_resident_memory_bytes") -> float:
    values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, values))


def _start(plan: Plan, folder: Path, keys: list[str]) -> tuple["subprocess.Popen[str]", str, str]:
    """Start a server; return its process, its address and that of its metrics."""
    model, tokenizer, _ = _model(plan)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "keys").write_text("\n".join(keys))
    (folder / "keys").chmod(0o600)
    log = folder / "log"
    options = {
        "model": folder / "model",
        "model-name": "tiny",
        "dtype": "float32",
        "threads": 1,
        "port": 0,
        "metrics-port": 0,
        "api-keys-file": folder / "keys",
        "pools": folder / "pools",
        "max-queue": plan.max_queue,
        "max-body-bytes": 2**22 if plan.num_attackers else _MAX_BODY_BYTES,
        "timeout": 300,
        # So little that both are full within minutes, and memory shows what else grows.
        "pool-memory-bytes": 2**26,
        "max-prefix-bytes": 2**25,
    }
    command = [sys.executable, "-m", "lade", "serve"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stderr=file, text=True, env={**os.environ, "COLUMNS": "500"}
        )
    begin = perf_counter()
    while (
        found := re.search(r"(http://\S+)/v1.*?(http://\S+/metrics)", log.read_text(), re.DOTALL)
    ) is None:
        if process.poll() is not None or perf_counter() > begin + 120:
            process.kill()
            raise RuntimeError(f"the server did not start: {log.read_text()}")
        os.sched_yield()
    return process, found[1], found[2]


def _report(plan: Plan, tally: Tally, metrics: str, sec: float, exit_code: int) -> dict[str, Any]:
    first = np.array(tally.first_token_sec or [float("nan")])
    memory = np.array(tally.memory_bytes)
    tenth = max(len(memory) // 10, 1)
    places = np.linspace(0, len(memory) - 1, min(len(memory), _NUM_IN_PLOT)).astype(int)
    counted = dict(vars(tally))
    for name in (
        "first_token_sec",
        "quiet_first_token_sec",
        "health_sec",
        "own_sec",
        "memory_bytes",
    ):
        counted.pop(name)
    if plan.num_attackers:
        quiet = np.array(tally.quiet_first_token_sec or [float("nan")])
        counted["quiet_first_token_sec"] = _percentiles(quiet)
        counted["health_sec"] = _percentiles(np.array(tally.health_sec))
        counted["own_sec"] = _percentiles(np.array(tally.own_sec))
    return {
        "plan": plan._asdict(),
        "sec": round(sec, 1),
        **counted,
        "num_tokens": int(_metric(metrics, "vllm:generation_tokens_total")),
        "num_accepted_tokens": int(_metric(metrics, "vllm:spec_decode_num_accepted_tokens_total")),
        "first_token_sec": _percentiles(first),
        "memory_mb": {
            "after_a_tenth": round(int(memory[tenth - 1]) / 1e6),
            "last_tenth": round(float(np.median(memory[-tenth:])) / 1e6),
            "last": round(int(memory[-1]) / 1e6),
            "over_time": [round(int(memory[place]) / 1e6) for place in places],
        },
        "exit_code": exit_code,
    }


def _percentiles(seconds: "np.ndarray[Any, Any]") -> dict[str, float]:
    return {f"p{share}": round(float(np.percentile(seconds, share)), 3) for share in (50, 99)}


def _allow_many_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
