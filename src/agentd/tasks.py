"""Waiting: with one deadline for several waits, and for steps that must not end half-done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Self, TypeVar

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
        if not task.cancelled():
            task.exception()  # its caller asked for the cancellation, and hears of that alone
        raise given_up
    return task.result()
