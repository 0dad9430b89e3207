"""Waiting: with one deadline for several waits, and for steps that must not end half-done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Generic, NamedTuple, Self, TypeVar

_T = TypeVar("_T")


class Deadline(NamedTuple):
    """A moment that several waits share, in seconds of its clock."""

    at: float
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(cls, seconds: float, clock: Callable[[], float] = time.monotonic) -> Self:
        """Return the moment that comes in so many seconds."""
        return cls(clock() + seconds, clock)

    def left_s(self, most_s: float = float("inf")) -> float:
        """Return the seconds that are left, at most `most_s`; 0 once it has passed."""
        return min(max(0.0, self.at - self.clock()), most_s)

    def earlier(self, seconds: float) -> Self:
        """Return a moment before this one."""
        return self._replace(at=self.at - seconds)


def is_being_cancelled() -> bool:
    """Return whether this task was cancelled; a library may raise CancelledError by itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


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
