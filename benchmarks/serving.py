"""Speed of OpenAI-compatible servers, asked in turn: tokens a second and time to the first token.

Servers are asked one after the other, question by question, so that all of them meet the machine as
it is at that moment; nothing else is asked of any meanwhile.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from statistics import median, quantiles
from time import perf_counter
from typing import Any, NamedTuple

from lade.bench.environment import environment
from lade.bench.prompts import Prompt
from lade.bench.report import speedup_text
from lade.bench.tables import Sheet
from lade.cli.bench import Chosen
from lade.cli.results import ResultFiles, keeping, progress_bar
from lade.errors import LadeError

_TIMEOUT_SEC = 600.0


class Reply(NamedTuple):
    """One streamed answer of a server."""

    server: str
    prompt_id: str
    turn: int  # from 0
    num_prompt_tokens: int
    num_tokens: int
    first_token_sec: float
    sec: float
    text: str


class ServerSummary(NamedTuple):
    """What a server's replies come to."""

    num_tokens: int
    tokens_per_sec: float  # of all time, that to first tokens included
    first_token_sec: float  # median
    first_token_p90_sec: float
    last_turn_first_token_sec: float  # median over the conversations
    same_text: float  # share of replies with the text of the first server


def ask_all(
    servers: Mapping[str, str],
    prompts: Sequence[Prompt],
    max_new_tokens: int,
) -> Iterator[Reply]:
    """Hold every conversation with every server, greedily, and yield the replies.

    A server is asked each turn with its own earlier answers, as a chat client asks. Which is asked
    first changes from prompt to prompt.

    Raises:
        LadeError: a server cannot be reached, or answers with an error.
    """
    names = [*servers]
    for number, prompt in enumerate(prompts):
        messages: dict[str, list[dict[str, str]]] = {name: [] for name in names}
        first = number % len(names)
        for turn, text in enumerate(prompt.turns):
            for name in (*names[first:], *names[:first]):
                messages[name].append({"role": "user", "content": text})
                reply = _ask(name, servers[name], messages[name], max_new_tokens)
                reply = reply._replace(prompt_id=prompt.id, turn=turn)
                messages[name].append({"role": "assistant", "content": reply.text})
                yield reply


def summarise(replies: Sequence[Reply], server: str, baseline: str) -> ServerSummary:
    """Summarise the replies of one server."""
    mine = {reply[1:3]: reply for reply in replies if reply.server == server}
    others = {reply[1:3]: reply for reply in replies if reply.server == baseline}
    last = dict(sorted(mine))
    first_token = [reply.first_token_sec for reply in mine.values()]
    num_tokens = sum(reply.num_tokens for reply in mine.values())
    shared = mine.keys() & others.keys()
    return ServerSummary(
        num_tokens,
        num_tokens / sum(reply.sec for reply in mine.values()),
        median(first_token),
        quantiles(first_token, n=10)[-1] if len(first_token) > 1 else first_token[0],
        median(mine[key].first_token_sec for key in last.items()),
        sum(mine[key].text == others[key].text for key in shared) / len(shared),
    )


def table(replies: Sequence[Reply], title: str) -> Sheet:
    """Return the servers beside each other, as compared with the first."""
    names = [*dict.fromkeys(reply.server for reply in replies)]
    of_first = summarise(replies, names[0], names[0])
    rows = []
    for name in names:
        found = summarise(replies, name, names[0])
        rows.append(
            [
                name,
                f"{found.tokens_per_sec:.1f}",
                speedup_text(found.tokens_per_sec / of_first.tokens_per_sec),
                f"{1000 * found.first_token_sec:,.0f}",
                f"{1000 * found.first_token_p90_sec:,.0f}",
                f"{1000 * found.last_turn_first_token_sec:,.0f}",
                f"{found.num_tokens:,}",
                f"{found.same_text:.0%}",
            ]
        )
    headings = (
        *("server", "tokens/s", "speed", "first token, ms", "its p90", "in last turns"),
        *("tokens", "same text"),
    )
    caption = "speed: tokens a second, over those of the first server. first token: median."
    return Sheet(title, headings, 1, [rows], caption)


def as_json(replies: Sequence[Reply]) -> dict[str, Any]:
    """Return summary and replies, ready for JSON; of the text, only its length."""
    names = [*dict.fromkeys(reply.server for reply in replies)]
    return {
        "summary": {name: summarise(replies, name, names[0])._asdict() for name in names},
        "replies": [{**reply._asdict(), "text": len(reply.text)} for reply in replies],
    }


def _ask(
    name: str, address: str, messages: Sequence[Mapping[str, str]], max_new_tokens: int
) -> Reply:
    """Ask for one streamed answer."""
    body = {
        "messages": [*messages],
        "max_tokens": max_new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{address.rstrip('/')}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    start = perf_counter()
    first_token_sec, text, usage = None, [], None
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SEC) as response:
            for chunk in _events(response):
                if "error" in chunk:
                    raise LadeError(f"the server {name!r} answered {str(chunk['error'])[:200]}")
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", ()):
                    part = choice["delta"].get("content")
                    if part:
                        first_token_sec = first_token_sec or perf_counter() - start
                        text.append(part)
    except urllib.error.HTTPError as error:
        said = error.read(200).decode(errors="replace")
        raise LadeError(f"the server {name!r} answered {error.code}: {said}") from None
    except OSError as error:
        raise LadeError(f"the server {name!r} at {address} cannot be asked: {error}") from None
    sec = perf_counter() - start
    if usage is None:
        raise LadeError(f"the server {name!r} does not say how many tokens it generated")
    return Reply(
        name,
        "",
        0,
        usage["prompt_tokens"],
        usage["completion_tokens"],
        sec if first_token_sec is None else first_token_sec,
        sec,
        "".join(text),
    )


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """Yield the JSON of a stream of server-sent events."""
    for line in response:
        data = line.decode().strip().removeprefix("data:").strip()
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
    servers: Mapping[str, str], chosen: Chosen, max_new_tokens: int, files: ResultFiles
) -> None:
    """Ask all servers; show and write what they replied, also when interrupted."""
    replies: list[Reply] = []
    num_turns = sum(len(prompt.turns) for prompt in chosen.prompts)
    with keeping(replies) as stopped, progress_bar() as bars:
        task = bars.add_task("asking", total=num_turns * len(servers))
        for reply in ask_all(servers, chosen.prompts, max_new_tokens):
            replies.append(reply)
            bars.update(task, advance=1, description=f"{reply.prompt_id}, {reply.server}")
    if len({reply.server for reply in replies}) < len(servers):
        stopped.pass_on()  # there is nothing to compare
    title = f"{len(chosen.prompts)} conversations, {num_turns} turns, {max_new_tokens} tokens each"
    stopped.tell(f"stopped after {len(replies)} of {num_turns * len(servers)} answers")
    settings = {
        "prompts": chosen.described,
        "max_new_tokens": max_new_tokens,
        "interrupted": stopped.by is not None,
    }
    content = {"environment": environment(), "settings": settings, **as_json(replies)}
    files.show(content, table(replies, title))
    stopped.pass_on()
