"""A client that loses no question: it asks again where it was sent away, or where a replica died.

python client.py http://127.0.0.1:8000 "What is an n-gram?"
"""

import asyncio
import random
import sys
from collections import Counter
from typing import Any

import httpx

_MAX_TRIES = 100
_SHORTEST_WAIT_SEC = 0.1
_LONGEST_WAIT_SEC = 3.0
# The server's: too much to do, or a replica that died or is not there yet.
_TRY_AGAIN = {500, 502, 503, 504}


async def ask(
    http: httpx.AsyncClient,
    prompt: str,
    max_tokens: int = 64,
    *,
    rng: random.Random | None = None,
    tried: Counter[str] | None = None,
) -> dict[str, Any]:
    """Ask until there is an answer, waiting ever longer in between.

    Args:
        http: a client whose `base_url` is the server's.
        prompt: the question.
        max_tokens: most tokens of the answer.
        rng: how long to wait, so that not all ask again at once.
        tried: counts what every try came to: a status, or the name of an error.

    Raises:
        httpx.HTTPStatusError: the question is at fault.
        TimeoutError: there was no answer after 100 tries.
    """
    rng, tried = rng or random.Random(), Counter() if tried is None else tried
    wait = _SHORTEST_WAIT_SEC
    for _ in range(_MAX_TRIES):
        try:
            response = await http.post(
                "/answers", json={"prompt": prompt, "max_tokens": max_tokens}
            )
        except httpx.TransportError as error:
            tried[type(error).__name__] += 1
        else:
            tried[str(response.status_code)] += 1
            if response.status_code not in _TRY_AGAIN:
                answer: dict[str, Any] = response.raise_for_status().json()
                return answer
        await asyncio.sleep(wait * (0.5 + rng.random()))
        wait = min(2 * wait, _LONGEST_WAIT_SEC)
    raise TimeoutError(f"expected an answer in {_MAX_TRIES} tries, got {dict(tried)}")


async def main(url: str, prompt: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as http:
        answer = await ask(http, prompt)
    print(answer["text"])
    print(f"-> {answer['num_tokens']} tokens in {answer['num_forwards'] + 1} forwards")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
