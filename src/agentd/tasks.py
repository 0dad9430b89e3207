"""Waiting: with one deadline for several waits, and for steps that must not end half-done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, NamedTuple, Self, TypeVar

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

    def __init__(self, future: asyncio.Future[_T], *, is_blocking: bool = False) -> None:
        self._future = future
        self._asyncio_future_blocking = is_blocking
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


class _Uninterrupted(Generic[_T]):
    """A coroutine run in its waiter's task; the task's cancellation is put off to its end."""

    def __init__(self, step: Coroutine[Any, Any, _T]) -> None:
        self._step = step

    def __await__(self) -> Generator[_Shielded[Any] | None, None, _T]:
        cancelled: asyncio.CancelledError | None = None
        while True:
            try:
                future = self._step.send(None)
            except StopIteration as end:
                if cancelled is not None:
                    raise cancelled from None
                result: _T = end.value
                return result
            except BaseException as error:
                if cancelled is not None:
                    raise cancelled from error
                raise
            try:
                if future is None:
                    yield None
                else:
                    future._asyncio_future_blocking = False
                    yield _Shielded(future, is_blocking=True)
            except GeneratorExit:
                self._step.close()
                raise
            except asyncio.CancelledError as error:
                if future is None or not future.cancelled():
                    cancelled = error
            except BaseException:  # noqa: S110 - the step meets it as it goes on: it asks the future
                pass


async def uninterrupted(step: Coroutine[Any, Any, _T]) -> _T:
    """Let a step end before a cancellation takes effect, without a task of its own.

    For steps that bound their own waits by other means than a cancellation: `asyncio.timeout`
    has no effect within.
    """
    return await _Uninterrupted(step)
