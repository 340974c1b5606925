"""The line is fair, bounded, and loses no turn, whoever leaves it when."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from lade.server.errors import ApiError, shutting_down
from lade.server.line import Leave, Line, Shares, Workers


async def begun(stage: Coroutine[Any, Any, Leave]) -> "asyncio.Task[Leave]":
    task = asyncio.create_task(stage)
    await asyncio.sleep(0)
    return task


def test_turns_are_given_in_order_and_not_beyond_the_bound() -> None:
    async def run() -> None:
        line = Line(2, 1, 1)
        leave = await line.enter()
        first, second = await begun(line.enter()), await begun(line.enter())
        assert (line.num_running, line.num_waiting) == (1, 2)
        with pytest.raises(ApiError, match="2 requests are waiting") as raised:
            await line.enter()
        assert (raised.value.status, raised.value.code) == (429, "queue_full")
        assert raised.value.retry_after == 5
        leave()
        leave = await first
        assert not second.done()
        leave()
        (await second)()
        assert (line.num_running, line.num_waiting) == (0, 0)

    asyncio.run(run())


def test_a_place_is_given_back_once() -> None:
    """Else each time would let one more in than there are places."""

    async def run() -> None:
        line = Line(2, 1, 1)
        leave = await line.enter()
        first, second = await begun(line.enter()), await begun(line.enter())
        leave()
        leave()
        await first
        assert not second.done()
        assert (line.num_running, line.num_waiting) == (1, 1)
        second.cancel()

    asyncio.run(run())


@pytest.mark.parametrize("has_turn", [False, True])
def test_who_leaves_the_line_takes_nobodys_turn(has_turn: bool) -> None:
    async def run() -> None:
        line = Line(9, 1, 1)
        leave = await line.enter()
        leaving, staying = await begun(line.enter()), await begun(line.enter())
        if has_turn:  # it comes at the very moment of leaving
            leave()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        if not has_turn:
            assert line.num_waiting == 1
            leave()
        (await staying)()
        assert (line.num_running, line.num_waiting) == (0, 0)

    asyncio.run(run())


def test_a_closed_line_sends_all_away() -> None:
    async def run() -> None:
        line = Line(9, 1, 1)
        leave = await line.enter()
        waiting = await begun(line.enter())
        line.refuse(shutting_down())
        for stage in (waiting, line.enter()):
            with pytest.raises(ApiError, match="shutting down"):
                await stage
        leave()
        with pytest.raises(ApiError, match="shutting down"):
            await line.enter()

    asyncio.run(run())


def test_one_key_has_half_of_the_threads() -> None:
    async def run() -> None:
        workers, go_on = Workers(4, 9), threading.Event()
        jobs = [asyncio.create_task(workers.run("one", go_on.wait)) for _ in range(6)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(workers.run("two", lambda: 3), 60) == 3
        go_on.set()
        assert all(await asyncio.gather(*jobs))

    asyncio.run(run())


def test_shares_leave_something_for_others() -> None:
    shares = Shares(4, 2)
    assert [shares.take("one") for _ in "123"] == [True, True, False]
    assert shares.take("two", 2)
    assert not shares.take("three")
    shares.give("two", 2)
    assert shares.take("three", 2)
