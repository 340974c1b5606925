"""Speed of OpenAI-compatible servers, asked in turn: tokens a second and time to the first token.

So many clients at once ask one server a few questions, then the next server the same, so that all
meet the machine as it is at that moment; nothing else is asked of any meanwhile.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any, NamedTuple

import httpx
from rich.table import Table

from benchmarks.environment import environment
from benchmarks.prompts import Chosen
from benchmarks.report import Keeping, progress_bar, sheet, show, speedup_text
from lade.apps.bench.prompts import Prompt
from lade.errors import LadeError

_TIMEOUT_SEC = 600.0
_ROUND = 4  # conversations of each client before the next server is asked


class Reply(NamedTuple):
    """One streamed answer of a server."""

    prompt_id: str
    turn: int  # from 0
    num_prompt_tokens: int
    num_tokens: int
    first_token_sec: float
    sec: float
    text: str


class Round(NamedTuple):
    """What a server replied to clients that asked at once."""

    server: str
    num_clients: int
    sec: float  # from the first question to the end of the last answer
    replies: list[Reply]


class ServerSummary(NamedTuple):
    """What a server's replies to so many clients come to."""

    num_tokens: int
    tokens_per_sec: float  # of all time, that to first tokens included
    first_token_sec: float  # median
    first_token_p90_sec: float
    same_text: float  # share of replies with the text of the first server


def ask_all(
    servers: Mapping[str, str],
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    num_clients: Sequence[int] = (1,),
) -> Iterator[Round]:
    """Hold every conversation with every server, greedily, and yield what they replied.

    A server is asked each turn with its own earlier answers, as a chat client asks. Which is asked
    first changes from round to round.

    Raises:
        LadeError: a server cannot be reached, or answers with an error.
    """
    names = [*servers]
    for count in num_clients:
        size = _ROUND * count
        for number, begin in enumerate(range(0, len(prompts), size)):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                asked = prompts[begin : begin + size]
                start = perf_counter()
                replies = asyncio.run(_hold(name, servers[name], asked, max_new_tokens, count))
                yield Round(name, count, perf_counter() - start, replies)


def summarise(rounds: Sequence[Round], server: str, baseline: str, count: int) -> ServerSummary:
    """Summarise what one server replied to so many clients."""
    mine, others = (
        {reply[:2]: reply for each in rounds if each[:2] == (name, count) for reply in each.replies}
        for name in (server, baseline)
    )
    first_token = [reply.first_token_sec for reply in mine.values()]
    num_tokens = sum(reply.num_tokens for reply in mine.values())
    shared = mine.keys() & others.keys()
    return ServerSummary(
        num_tokens,
        num_tokens / sum(each.sec for each in rounds if each[:2] == (server, count)),
        median(first_token),
        quantiles(first_token, n=10)[-1] if len(first_token) > 1 else first_token[0],
        sum(mine[key].text == others[key].text for key in shared) / max(1, len(shared)),
    )


def table(rounds: Sequence[Round], title: str) -> Table:
    """Return the servers beside each other, as compared with the first, by number of clients."""
    sections = []
    for count, by_name in _summaries(rounds).items():
        of_first = next(iter(by_name.values()))
        sections.append(
            [
                [
                    f"{count} at once",
                    name,
                    f"{found.tokens_per_sec:.1f}",
                    speedup_text(found.tokens_per_sec / of_first.tokens_per_sec),
                    f"{1000 * found.first_token_sec:,.0f}",
                    f"{1000 * found.first_token_p90_sec:,.0f}",
                    f"{found.num_tokens:,}",
                    f"{found.same_text:.0%}",
                ]
                for name, found in by_name.items()
            ]
        )
    headings = (
        *("clients", "server", "tokens/s", "speed", "first token, ms", "its p90", "tokens"),
        "same text",
    )
    caption = "speed: tokens a second, over those of the first server. first token: median."
    return sheet(title, headings, sections, caption)


def as_json(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the summaries, ready for JSON."""
    return {
        str(count): {name: found._asdict() for name, found in by_name.items()}
        for count, by_name in _summaries(rounds).items()
    }


def _summaries(rounds: Sequence[Round]) -> dict[int, dict[str, ServerSummary]]:
    """Return the summaries by number of clients and by server, in the order asked."""
    names = [*dict.fromkeys(each.server for each in rounds)]
    met = {each[:2] for each in rounds}
    return {
        count: {
            name: summarise(rounds, name, names[0], count) for name in names if (name, count) in met
        }
        for count in dict.fromkeys(each.num_clients for each in rounds)
    }


async def _hold(
    name: str, address: str, prompts: Sequence[Prompt], max_new_tokens: int, num_clients: int
) -> list[Reply]:
    """Have clients hold conversations with a server, each one after the other."""
    waiting, replies = iter(prompts), list[Reply]()
    limits = httpx.Limits(max_connections=None)

    async def client(http: httpx.AsyncClient) -> None:
        for prompt in waiting:
            messages: list[dict[str, str]] = []
            for turn, text in enumerate(prompt.turns):
                messages.append({"role": "user", "content": text})
                try:
                    reply = await _ask(http, messages, max_new_tokens)
                except httpx.HTTPError as error:
                    raise LadeError(
                        f"the server {name!r} at {address} cannot be asked: {error}"
                    ) from None
                except LadeError as error:
                    raise LadeError(f"the server {name!r} {error}") from None
                messages.append({"role": "assistant", "content": reply.text})
                replies.append(reply._replace(prompt_id=prompt.id, turn=turn))

    async with httpx.AsyncClient(base_url=address, timeout=_TIMEOUT_SEC, limits=limits) as http:
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(num_clients):
                    tasks.create_task(client(http))
        except* LadeError as errors:
            raise errors.exceptions[0] from None
    return replies


async def _ask(
    http: httpx.AsyncClient, messages: Sequence[Mapping[str, str]], max_new_tokens: int
) -> Reply:
    """Ask for one streamed answer."""
    body = {
        "messages": [*messages],
        "max_tokens": max_new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first_token_sec, text, usage = None, list[str](), None
    start = perf_counter()
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            said = (await response.aread())[:200].decode(errors="replace")
            raise LadeError(f"answered {response.status_code}: {said}")
        async for chunk in _events(response):
            if "error" in chunk:
                raise LadeError(f"answered {str(chunk['error'])[:200]}")
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", ()):
                part = choice["delta"].get("content")
                if part:
                    first_token_sec = first_token_sec or perf_counter() - start
                    text.append(part)
    sec = perf_counter() - start
    if usage is None:
        raise LadeError("does not say how many tokens it generated")
    num_prompt_tokens, num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    return Reply("", 0, num_prompt_tokens, num_tokens, first_token_sec or sec, sec, "".join(text))


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of a stream of server-sent events."""
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if data.startswith("{"):
            yield json.loads(data)


def read_servers(texts: Sequence[str]) -> dict[str, str]:
    """Return the addresses of servers by name, from texts as NAME=URL.

    Raises:
        ValueError: one is not that, or a name stands twice.
    """
    servers: dict[str, str] = {}
    for text in texts:
        name, _, address = text.partition("=")
        if not name or not address.startswith(("http://", "https://")):
            raise ValueError(f"expected a server as NAME=http://HOST:PORT, got {text!r}")
        if name in servers:
            raise ValueError(f"expected different names of servers, got {name!r} twice")
        servers[name] = address
    return servers


def run(
    servers: Mapping[str, str],
    chosen: Chosen,
    max_new_tokens: int,
    num_clients: Sequence[int],
    file: Path | None,
) -> None:
    """Ask all servers; show and write what they replied, also when interrupted."""
    rounds: list[Round] = []
    num_turns = sum(len(prompt.turns) for prompt in chosen.prompts)
    num_answers = num_turns * len(servers) * len(num_clients)
    with Keeping(rounds) as kept, progress_bar() as bars:
        task = bars.add_task("asking", total=num_answers)
        for each in ask_all(servers, chosen.prompts, max_new_tokens, num_clients):
            rounds.append(each)
            described = f"{each.num_clients} at once, {each.server}"
            bars.update(task, advance=len(each.replies), description=described)
    title = f"{len(chosen.prompts)} conversations, {num_turns} turns, {max_new_tokens} tokens each"
    num_asked = sum(len(each.replies) for each in rounds)
    settings = {
        "prompts": chosen.described,
        "max_new_tokens": max_new_tokens,
        "num_clients": [*num_clients],
        "interrupted": kept.by is not None,
    }
    content = {"environment": environment(), "settings": settings, "summary": as_json(rounds)}
    show(file, content, table(rounds, title))
    kept.end(f"stopped after {num_asked} of {num_answers} answers")
