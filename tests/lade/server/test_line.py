"""The line is fair, bounded, and loses no turn, whoever leaves it when."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from lade.server.errors import ApiError, shutting_down
from lade.server.line import Line


async def begun(stage: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    task = asyncio.create_task(stage)
    await asyncio.sleep(0)
    return task


def test_turns_are_given_in_order_and_not_beyond_the_bound() -> None:
    async def run() -> None:
        line = Line(2)
        await line.enter()
        first, second = await begun(line.enter()), await begun(line.enter())
        assert (line.num_running, line.num_waiting) == (1, 2)
        with pytest.raises(ApiError, match="2 requests are waiting") as raised:
            await line.enter()
        assert (raised.value.status, raised.value.code) == (429, "queue_full")
        assert raised.value.retry_after is not None
        assert raised.value.retry_after >= 1
        line.leave()
        await first
        assert not second.done()
        line.leave()
        await second
        line.leave()
        assert (line.num_running, line.num_waiting) == (0, 0)

    asyncio.run(run())


@pytest.mark.parametrize("has_turn", [False, True])
def test_who_leaves_the_line_takes_nobodys_turn(has_turn: bool) -> None:
    async def run() -> None:
        line = Line(9)
        await line.enter()
        leaving, staying = await begun(line.enter()), await begun(line.enter())
        if has_turn:  # it comes at the very moment of leaving
            line.leave()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        if not has_turn:
            assert line.num_waiting == 1
            line.leave()
        await staying
        line.leave()
        assert (line.num_running, line.num_waiting) == (0, 0)

    asyncio.run(run())


def test_a_closed_line_sends_all_away() -> None:
    async def run() -> None:
        line = Line(9)
        await line.enter()
        waiting = await begun(line.enter())
        line.refuse(shutting_down())
        for stage in (waiting, line.enter()):
            with pytest.raises(ApiError, match="shutting down"):
                await stage
        line.leave()
        with pytest.raises(ApiError, match="shutting down"):
            await line.enter()

    asyncio.run(run())
