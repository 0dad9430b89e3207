"""Turns: how many requests of one caller are served at once."""

import asyncio
from collections import UserDict
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from agentd.http.connections import request_turns
from agentd.http.connections.request_turns import (
    MAX_AT_ONCE,
    RequestTurns,
    end_turn,
    limit_turn,
)
from support.waiting import until


class Request(UserDict[str, Any]):
    """A request over a connection that can be read, or not."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self) -> None:
        super().__init__()
        self.is_read = True
        self.transport = SimpleNamespace(
            is_reading=lambda: self.is_read,
            pause_reading=lambda: self._read(is_read=False),
            resume_reading=lambda: self._read(is_read=True),
        )

    def _read(self, *, is_read: bool) -> None:
        self.is_read = is_read


tasks: list[asyncio.Task[None]] = []


def requests(number: int) -> list[web.Request]:
    return [cast("web.Request", Request()) for _ in range(number)]


async def begun(turns: RequestTurns, asked: list[web.Request], caller: str) -> list[web.Request]:
    """Begin requests; return those whose turn has come, in this order."""
    found: list[web.Request] = []

    async def begin(request: web.Request) -> None:
        await turns.begin(request, caller)
        found.append(request)

    tasks.extend(asyncio.create_task(begin(request)) for request in asked)
    for _ in range(4 * MAX_AT_ONCE):
        await asyncio.sleep(0)
    return found


async def test_requests_beyond_the_turns_of_a_caller_wait_in_order() -> None:
    turns, asked = RequestTurns(), requests(3 * MAX_AT_ONCE)
    found = await begun(turns, asked, "a")
    for number in range(2 * MAX_AT_ONCE):
        assert found == asked[: MAX_AT_ONCE + number]
        assert [request.is_read for request in asked] == [  # type: ignore[attr-defined]
            request in found for request in asked
        ]
        end_turn(found[number])
        end_turn(found[number])
        for _ in range(3):
            await asyncio.sleep(0)
    assert found == asked


async def test_others_are_served_between_requests_of_a_caller() -> None:
    turns, log = RequestTurns(), list[str]()

    async def begin(caller: str, request: web.Request) -> None:
        await turns.begin(request, caller)
        log.append(caller)

    async with asyncio.TaskGroup() as group:
        for caller, request in zip("aaaaaaaab", requests(9), strict=True):
            group.create_task(begin(caller, request))
    assert log.index("b") <= 2


async def test_callers_do_not_wait_for_each_other() -> None:
    turns = RequestTurns()
    await begun(turns, requests(2 * MAX_AT_ONCE), "flood")
    assert len(await begun(turns, requests(3), "other")) == 3


async def test_a_request_that_waits_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_turns, "MAX_TURN_S", 0.0)
    turns, asked = RequestTurns(), requests(MAX_AT_ONCE + 1)
    found = await begun(turns, asked, "a")
    with limit_turn(found[0]):
        await until(lambda: len(found) != MAX_AT_ONCE)
    assert found == asked
