"""Print an answer as it grows: from a thread, and in an event loop."""

import asyncio
from threading import Thread
from typing import Any

from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer

import lade
from lade.models import encode, load

OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 48}


def from_a_thread(model: Any, tokenizer: Any, inputs: dict[str, Any]) -> None:
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    options = {**inputs, **OPTIONS, "streamer": streamer}
    thread = Thread(target=lade.generate, args=(model,), kwargs=options)
    thread.start()
    for text in streamer:
        print(text, end="", flush=True)
    thread.join()


async def in_an_event_loop(model: Any, tokenizer: Any, inputs: dict[str, Any]) -> None:
    streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True)
    options = {**inputs, **OPTIONS, "streamer": streamer}
    task = asyncio.create_task(asyncio.to_thread(lade.generate, model, **options))
    async for text in streamer:
        print(text, end="", flush=True)
    await task


if __name__ == "__main__":
    model, tokenizer, _ = load(dtype="float32")
    inputs = encode(tokenizer, "What is the moon made of?", model.device)
    from_a_thread(model, tokenizer, inputs)
    print("\n---")
    asyncio.run(in_an_event_loop(model, tokenizer, inputs))
