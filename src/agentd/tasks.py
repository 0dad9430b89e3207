"""Work beside other work, and work that is not given up half-done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Generator
from contextlib import asynccontextmanager, suppress
from typing import Generic, Self, TypeVar

_T = TypeVar("_T")


class _Shielded(Generic[_T]):
    """A future seen through a pane: awaited like it, and not cancelled by its waiter's end.

    `cancel` refuses, so asyncio raises the cancellation when the wait is over. A waiter is woken
    in the turn after the future's end; `asyncio.shield` and `asyncio.wait` take one turn more.
    """

    def __init__(self, future: asyncio.Future[_T]) -> None:
        self._future = future
        self._asyncio_future_blocking = False
        self.get_loop = future.get_loop
        self.add_done_callback = future.add_done_callback
        self.result = future.result

    def cancel(self, msg: object = None) -> bool:
        del msg
        return False

    def __await__(self) -> Generator[Self, None, _T]:
        if not self._future.done():
            self._asyncio_future_blocking = True
            yield self
        return self._future.result()


async def to_the_end(step: Awaitable[_T]) -> _T:
    """Let a step end before a cancellation takes effect, however often that comes."""
    return await _Shielded(asyncio.ensure_future(step))


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
