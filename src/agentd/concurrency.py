"""Deadlines shared by several waits, steps that a cancellation must not interrupt, thread names."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self, TypeVar

import msgspec
from msgspec.structs import replace

_T = TypeVar("_T")


class Deadline(msgspec.Struct, frozen=True):
    """A deadline that several waits share, in seconds of its clock."""

    at: float
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(cls, seconds: float, clock: Callable[[], float] = time.monotonic) -> Self:
        """Return the deadline `seconds` from now."""
        return cls(clock() + seconds, clock)

    def remaining_s(self, most_s: float = float("inf")) -> float:
        """Return the remaining seconds, at most `most_s`; 0 after the deadline."""
        return min(max(0.0, self.at - self.clock()), most_s)

    def earlier(self, seconds: float) -> Self:
        """Return an earlier deadline."""
        return replace(self, at=self.at - seconds)


def is_being_cancelled() -> bool:
    """Return whether this task was cancelled; a library may raise CancelledError by itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def complete_shielded(step: Coroutine[Any, Any, _T]) -> _T:
    """Complete a step before a cancellation takes effect, however often it is repeated."""
    task = asyncio.ensure_future(step)
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    return task.result()


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


async def wait_event(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event for a limited time, and return whether it is set."""
    if not event.is_set() and seconds > 0:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
    return event.is_set()


@contextmanager
def thread_waiting_for(subject: str) -> Iterator[None]:
    """Name this thread after what it waits for; if that never answers, errors name it."""
    thread = threading.current_thread()
    if thread is threading.main_thread():
        yield
        return
    previous, thread.name = thread.name, subject
    try:
        yield
    finally:
        thread.name = previous
