"""Deadlines shared by several waits, steps that a cancellation must not interrupt, thread names."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, NamedTuple, Self, TypeVar

_T = TypeVar("_T")


class Deadline(NamedTuple):
    """A deadline that several waits share, in seconds of its clock."""

    at: float
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(cls, seconds: float, clock: Callable[[], float] = time.monotonic) -> Self:
        """Return the deadline `seconds` from now."""
        return cls(clock() + seconds, clock)

    def left_s(self, most_s: float = float("inf")) -> float:
        """Return the remaining seconds, at most `most_s`; 0 after the deadline."""
        return min(max(0.0, self.at - self.clock()), most_s)

    def earlier(self, seconds: float) -> Self:
        """Return an earlier deadline."""
        return self._replace(at=self.at - seconds)


def is_being_cancelled() -> bool:
    """Return whether this task was cancelled; a library may raise CancelledError by itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _Shielded(Generic[_T]):
    """A view of a future: awaited like it, and not cancelled with its waiter.

    `cancel` refuses, so asyncio raises the cancellation after the wait. A waiter is woken in the
    turn after the future's end; `asyncio.shield` and `asyncio.wait` take one turn more.
    """

    def __init__(self, future: asyncio.Future[_T]) -> None:
        self._future = future
        self._asyncio_future_blocking = False
        self.get_loop = future.get_loop
        self.add_done_callback = future.add_done_callback
        self.result = future.result

    @classmethod
    def taken_over(cls, future: asyncio.Future[_T]) -> Self:
        """Return the view of a future that a coroutine has just begun to await."""
        made = cls(future)
        future._asyncio_future_blocking = False  # noqa: SLF001 - asyncio's protocol of a wait
        made._asyncio_future_blocking = True
        return made

    def cancel(self, msg: object = None) -> bool:
        del msg
        return False

    def __await__(self) -> Generator[Self, None, _T]:
        if not self._future.done():
            self._asyncio_future_blocking = True
            yield self
        return self._future.result()


async def to_the_end(step: Awaitable[_T]) -> _T:
    """Complete a step before a cancellation takes effect, however often it is repeated."""
    return await _Shielded(asyncio.ensure_future(step))


class _Uninterrupted(Generic[_T]):
    """A coroutine run in its waiter's task; the task's cancellation is deferred to its end."""

    def __init__(self, step: Coroutine[Any, Any, _T], meanwhile: Callable[[], None] | None) -> None:
        self._step = step
        self._meanwhile = meanwhile
        self._cancelled: asyncio.CancelledError | None = None

    def __await__(self) -> Generator[_Shielded[Any] | None, None, _T]:
        try:
            result = yield from self._driven()
        except Exception as error:
            if self._cancelled is not None:
                raise self._cancelled from error
            raise
        if self._cancelled is not None:
            raise self._cancelled
        return result

    def _driven(self) -> Generator[_Shielded[Any] | None, None, _T]:
        while True:
            try:
                future = self._step.send(None)
            except StopIteration as end:
                result: _T = end.value
                return result
            meanwhile, self._meanwhile = self._meanwhile, None
            if meanwhile is not None:
                try:
                    meanwhile()
                except BaseException:
                    self._step.close()
                    raise
            try:
                yield None if future is None else _Shielded.taken_over(future)
            except GeneratorExit:
                self._step.close()
                raise
            except asyncio.CancelledError as error:
                if future is None or not future.cancelled():
                    self._cancelled = error
            except Exception:  # noqa: BLE001, S112 - the step gets it from the future
                continue


async def uninterrupted(
    step: Coroutine[Any, Any, _T], meanwhile: Callable[[], None] | None = None
) -> _T:
    """Complete a step before a cancellation takes effect, without a task of its own.

    `meanwhile` is called once, as soon as the step waits; never, if it does not wait. The step must
    bound its waits by other means than a cancellation: `asyncio.timeout` has no effect inside.
    """
    return await _Uninterrupted(step, meanwhile)


async def run_endless(*loops: Coroutine[Any, Any, None]) -> None:
    """Run loops concurrently until cancelled; the end of one, for whatever reason, ends all.

    Raises:
        ExceptionGroup: a loop failed, returned, or was cancelled by a library.
    """
    async with asyncio.TaskGroup() as group:
        for loop in loops:
            group.create_task(_endless(loop))


async def _endless(loop: Coroutine[Any, Any, None]) -> None:
    try:
        await loop
    except asyncio.CancelledError:
        if is_being_cancelled():
            raise
    name = getattr(loop, "__qualname__", "a loop")
    raise RuntimeError(f"{name} ended")


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event for a limited time, and return whether it is set."""
    if not event.is_set() and seconds > 0:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
    return event.is_set()


@contextmanager
def asking(what: str) -> Iterator[None]:
    """Name this thread after what it waits for; if that never answers, errors name it."""
    thread = threading.current_thread()
    if thread is threading.main_thread():
        yield
        return
    before, thread.name = thread.name, what
    try:
        yield
    finally:
        thread.name = before
