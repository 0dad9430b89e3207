"""Turns: at most `MAX_AT_ONCE` requests of one caller are read, decided or rendered at once.

The next ones wait in order, and nothing is read from their connections meanwhile. A caller is a
token, or a user on a unix socket, with all its connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from weakref import WeakValueDictionary

from aiohttp import web

MAX_AT_ONCE = 16
MAX_TURN_S = 1.0
"""Seconds after which a request is assumed to wait for a runtime or a plugin."""


class _CallerTurns(asyncio.Semaphore):
    """The turns of one caller; one begins at a time."""

    def __init__(self) -> None:
        super().__init__(MAX_AT_ONCE)
        self.beginning = asyncio.Lock()


_TURN = web.RequestKey("turn", _CallerTurns)


class RequestTurns:
    """The turns of all callers."""

    def __init__(self) -> None:
        self._callers = WeakValueDictionary[Hashable, _CallerTurns]()

    async def begin(self, request: web.Request, caller: Hashable) -> None:
        """Wait for a request's turn; `end_turn` ends it."""
        turns = self._callers.setdefault(caller, _CallerTurns())
        with _reading_paused(request) if turns.locked() else nullcontext():
            await turns.acquire()
        request[_TURN] = turns
        async with turns.beginning:
            await asyncio.sleep(0)  # others are served between two requests of a caller


@contextmanager
def _reading_paused(request: web.Request) -> Iterator[None]:
    transport = request.transport
    if transport is None or not transport.is_reading():
        yield
        return
    transport.pause_reading()
    try:
        yield
    finally:
        transport.resume_reading()


@contextmanager
def limit_turn(request: web.Request) -> Iterator[None]:
    """End the turn of a request that takes longer than `MAX_TURN_S`."""
    timer = asyncio.get_running_loop().call_later(MAX_TURN_S, end_turn, request)
    try:
        yield
    finally:
        timer.cancel()


def end_turn(request: web.Request) -> None:
    """End a request's turn: it is answered, or waits for a runtime, a plugin or a stream."""
    turns = request.pop(_TURN, None)
    if turns is not None:
        turns.release()
