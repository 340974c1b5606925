"""A model under Ray Serve: replicas whose pools learn from each other, through one collector.

    serve run app:app model=HuggingFaceTB/SmolLM2-135M-Instruct replicas=2

Each replica answers one question at a time; a few wait, and more are sent away with status 503. A
replica that dies is replaced, and the new one begins with what all had learned.
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse

import lade
from lade.engines.exchange import PoolExchange
from lade.engines.ray import RayCollector
from lade.models import encode, load


class Question(BaseModel):
    """What a client asks."""

    prompt: str = Field(min_length=1, max_length=20_000)
    max_tokens: int = Field(64, ge=1, le=1024)


class Answer(BaseModel):
    """What it gets."""

    text: str
    num_tokens: int
    num_forwards: int  # of the model, that of the prompt left out
    pid: int  # of the replica
    num_joined_tokens: int  # that the replica's pool began with


class Replica:
    """One copy of the model, with a pool that all users of all replicas share."""

    def __init__(self, model: str | None, collector: str, every_sec: float) -> None:
        self._loaded = load(model, device="cpu", dtype="float32")
        self._config = lade.Config(reuses_prefix=True)  # here, all questions begin alike
        self._exchange = PoolExchange(RayCollector(collector), every_sec=every_sec)
        self._exchange.start()

    def __del__(self) -> None:
        if hasattr(self, "_exchange"):
            self._exchange.stop()  # sends what is left

    async def __call__(self, request: Request) -> JSONResponse:
        """Answer `POST /answers`, on a thread: Ray looks after the replica meanwhile."""
        asked = request.method, request.url.path
        if asked == ("GET", "/stats"):
            return JSONResponse(self.stats())
        if asked != ("POST", "/answers"):
            return JSONResponse({"detail": "expected POST /answers or GET /stats"}, 404)
        try:
            question = Question.model_validate_json(await request.body())
        except ValidationError as error:
            return JSONResponse({"detail": str(error)}, 422)
        answer = await asyncio.to_thread(self.answer, question)
        return JSONResponse(answer.model_dump())

    def answer(self, question: Question) -> Answer:
        """Answer a question."""
        model, tokenizer, _ = self._loaded
        inputs = encode(tokenizer, question.prompt, model.device)
        output = lade.generate(
            model,
            **inputs,
            pool=self._exchange.pool,
            config=self._config,
            do_sample=False,
            max_new_tokens=question.max_tokens,
            return_dict_in_generate=True,
        )
        ids = output.sequences[0, inputs["input_ids"].shape[1] :]
        return Answer(
            text=tokenizer.decode(ids, skip_special_tokens=True),
            num_tokens=len(ids),
            num_forwards=output.stats.num_steps,
            pid=os.getpid(),
            num_joined_tokens=self._exchange.stats().num_joined_tokens,
        )

    def stats(self) -> dict[str, Any]:
        """Return what the pool of one replica exchanged, whichever is asked."""
        pool = self._exchange.pool
        return {
            "pid": os.getpid(),
            "pool_tokens": len(pool),
            "pool_bytes": pool.nbytes,
            **asdict(self._exchange.stats()),
        }


def app(arguments: Mapping[str, str]) -> Any:
    """Return the application for `serve run`, by its arguments."""
    from ray import serve

    options = {"model": "", "collector": "pools", "replicas": "2", "queue": "16", "every": "5"}
    if unknown := sorted(arguments.keys() - options.keys()):
        raise ValueError(f"expected arguments among {', '.join(options)}, got {unknown[0]!r}")
    options |= arguments
    deployment = serve.deployment(
        name="lade",
        num_replicas=int(options["replicas"]),
        max_ongoing_requests=1,
        max_queued_requests=int(options["queue"]),
        ray_actor_options={"num_cpus": 1},
        health_check_period_s=2,
    )(Replica)
    return deployment.bind(options["model"] or None, options["collector"], float(options["every"]))
