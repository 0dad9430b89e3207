"""Work beside other work, and work that is not given up half-done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

_T = TypeVar("_T")


async def to_the_end(step: Awaitable[_T]) -> _T:
    """Let a step end before a cancellation takes effect, however often that comes."""
    task = asyncio.ensure_future(step)
    given_up: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            given_up = error
    if given_up is not None:
        raise given_up
    return task.result()


@asynccontextmanager
async def running(work: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Have work done for as long as the context is open."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
