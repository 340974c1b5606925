"""Whoever sees an encrypted stream, sizes and times of what is sent, learns nothing of the prompt.

Source: "Privacy Risks of Speculative Decoding in Large Language Models" (arXiv 2411.01076).
"""

import json
import math
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, zip_longest

import httpx
import pytest

from lade.models.loading import LoadedModel
from lade.server.app import Server
from tests.lade.server.serving import (
    QUESTION,
    Paced,
    asked,
    client_of,
    loaded_model,
    metric,
    plain_text,
    post,
    serving,
    text_of,
    wait_until,
)

PROMPTS = ["What-is-a-pool?", "Why-why-why-why?", "abcabcabc", "To-be-or-not-to-be:"]
NUM_TRIALS = 30
# Of 30 guesses among four, fewer than one in 2,000 runs has as many right by chance.
BEYOND_CHANCE = 17

Trace = list[tuple[int, float]]  # bytes, and seconds since what was sent before


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return loaded_model()


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Server]:
    with serving(loaded) as server:
        yield server


def overheard(server: Server, prompt: str, *, obfuscates: bool) -> Trace:
    """Return what is seen of an answer from outside of its encryption."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 48,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_obfuscation": obfuscates},
    }
    trace: Trace = []
    before = time.perf_counter()
    with httpx.stream("POST", f"{server.url}/chat/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        for chunk in answer.iter_raw():
            now = time.perf_counter()
            trace.append((len(chunk), now - before))
            before = now
    return trace


def ends_of(trace: Trace) -> set[int]:
    """Return where in the text each chunk ends: the smallest has a character, others more."""
    sizes = [size for size, _ in trace[:-1]]
    return {*accumulate(size - min(sizes) + 1 for size in sizes)}


def distance(one: Trace, other: Trace) -> float:
    """Return how different two streams look; times are noisy, so an end counts as 0.1 s."""
    secs = zip_longest(*([sec for _, sec in each] for each in (one, other)), fillvalue=0.0)
    return len(ends_of(one) ^ ends_of(other)) + 10 * math.fsum(abs(a - b) for a, b in secs)


def num_guessed(server: Server, *, obfuscates: bool) -> int:
    """Return how many of the prompts somebody guesses who has heard each of them before."""
    known = [(prompt, overheard(server, prompt, obfuscates=obfuscates)) for prompt in PROMPTS * 2]
    rng, num_right = random.Random(0), 0
    for _ in range(NUM_TRIALS):
        prompt = rng.choice(PROMPTS)
        trace = overheard(server, prompt, obfuscates=obfuscates)
        guess, _ = min(known, key=lambda each: distance(each[1], trace))
        num_right += guess == prompt
    return num_right


def test_sizes_and_times_tell_which_prompt_was_asked(server: Server) -> None:
    assert num_guessed(server, obfuscates=False) > BEYOND_CHANCE


def test_padded_and_paced_they_do_not(loaded: LoadedModel) -> None:
    with serving(loaded, chunk_interval_sec=0.3) as server:
        assert num_guessed(server, obfuscates=True) < BEYOND_CHANCE


def events_of(answer: httpx.Response) -> list[str]:
    return [each + "\n\n" for each in answer.text.split("\n\n") if each]


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/responses"])
@pytest.mark.parametrize("interval_sec", [0.0, 0.05])
def test_events_are_padded_unless_asked_not_to_be(
    loaded: LoadedModel, path: str, interval_sec: float
) -> None:
    body = {
        "/chat/completions": {"messages": QUESTION, "max_tokens": 9},
        "/completions": {"prompt": "What-is", "max_tokens": 9},
        "/responses": {"input": "What-is", "max_output_tokens": 9},
    }[path] | {"stream": True, "temperature": 0}
    with serving(loaded, chunk_interval_sec=interval_sec) as server:
        padded = events_of(post(server, path, json=body))
        plain = post(server, path, json=body | {"stream_options": {"include_obfuscation": False}})
    if path != "/responses":
        assert padded.pop() == "data: [DONE]\n\n"
    assert {len(event) % 512 for event in padded} == {0}
    told = [json.loads(event[6:]) for event in padded if not event.startswith(": ")]
    assert len({event["obfuscation"] for event in told}) == len(told)
    assert "obfuscation" not in plain.text
    if path == "/responses":
        assert [event["sequence_number"] for event in told] == [*range(len(told))]


@pytest.mark.parametrize("interval_sec", [0.0, 0.03])
def test_padding_and_pacing_change_no_text(loaded: LoadedModel, interval_sec: float) -> None:
    expected = plain_text(loaded)
    with (
        serving(loaded, chunk_interval_sec=interval_sec) as server,
        client_of(server) as client,
    ):
        assert text_of(asked(client, stream=True)) == expected
        stop = expected[20:23]
        assert text_of(asked(client, stream=True, stop=stop)) == expected[: expected.index(stop)]
        chunks = [*asked(client, stream=True, logprobs=True)]
        tokens = [
            each.token
            for c in chunks
            if c.choices[0].logprobs
            for each in c.choices[0].logprobs.content
        ]
        assert "".join(tokens) == expected
        streamed = client.responses.create(
            model="tiny", input="What-is", temperature=0, max_output_tokens=20, stream=True
        )
        text = "".join(e.delta for e in streamed if e.type == "response.output_text.delta")
        assert text == plain_text(loaded, "<user>What-is<assistant>", max_new_tokens=20)


def test_chunks_leave_at_fixed_intervals(loaded: LoadedModel) -> None:
    """A stream that waits sends as much as one that does not."""
    with serving(loaded, chunk_interval_sec=0.1) as server, Paced(loaded) as pace:
        with ThreadPoolExecutor(1) as threads:
            trace = threads.submit(overheard, server, PROMPTS[0], obfuscates=True)
            time.sleep(1)
            pace.free()
            sizes = [size for size, _ in trace.result()]
        assert len(sizes) > 9
        assert {size % 512 for size in sizes[:-1]} == {0}


def test_a_paced_stream_ends_when_its_client_leaves(loaded: LoadedModel) -> None:
    with serving(loaded, chunk_interval_sec=0.05) as server, Paced(loaded) as pace:
        with client_of(server) as client, asked(client, stream=True, max_tokens=300) as stream:
            pace.let(2)
            next(iter(stream))
        wait_until(lambda: metric(server, "lade:requests_total", code="499") == 1)
        pace.free()
        wait_until(lambda: metric(server, "vllm:num_requests_running") == 0)
        assert pace.num_tokens < 20
