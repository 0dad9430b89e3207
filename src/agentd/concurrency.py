"""Deadlines shared by several waits, steps that a cancellation must not interrupt, and threads.

A thread that waits for a dead mount or the name service cannot be cancelled. So what may never
answer has a thread of its own and a deadline, and is named while it is silent. Work that always
ends shares the threads of `start_pool`, and none of these is ever missing.
"""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Generic, Self, TypeVar, cast

import msgspec
from msgspec.structs import replace

ANSWER_TIMEOUT_S = 5.0
"""Seconds in which what is looked up on the host must answer."""
NEXT_TIMEOUT_S = 0.5
"""The same while something else is silent, so that many dead paths do not add up."""
MAX_SILENT = 32
"""Maximum threads that wait for silent ones."""
POOL_THREADS = 8
_T = TypeVar("_T")
_silent: set[AnswerThread[Any]] = set()


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


class NoAnswer(TimeoutError):
    """A path of the host, or its name service, does not answer in time; `filename` names it."""

    def __init__(self, subject: str, timeout_s: float) -> None:
        super().__init__(errno.ETIMEDOUT, f"no answer within {timeout_s:g} s", subject)

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class AnswerThread(threading.Thread, Generic[_T]):
    """A thread for one call that may never end, with the name of what it waits for."""

    def __init__(
        self, subject: str, function: Callable[[], _T], on_end: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(name=subject, daemon=True)
        self._function, self._on_end = function, on_end
        self._outcome: tuple[_T | None, Exception | None] | None = None

    @property
    def is_answered(self) -> bool:
        """Whether the call has ended."""
        return self._outcome is not None

    def start(self) -> None:
        """Start the call.

        Raises:
            BlockingIOError: the host has no process id for a thread.
        """
        try:
            super().start()
        except RuntimeError as error:
            raise BlockingIOError(errno.EAGAIN, str(error), self.name) from None

    def run(self) -> None:
        try:
            self._outcome = self._function(), None
        except Exception as error:  # noqa: BLE001 - raised to the caller
            self._outcome = None, error
        self._on_end()

    def result(self) -> _T:
        """Return the result of a call that has ended, or raise its error."""
        result, error = self._outcome or (None, None)
        if error is not None:
            raise error
        return cast("_T", result)

    def mark_silent(self) -> None:
        """Count this call as silent until it ends."""
        _silent.add(self)


def call_in_time(subject: str, function: Callable[[], _T]) -> _T:
    """Return the result of a function that may never end, from a thread of its own.

    While `subject` is silent, a further call fails at once.

    Raises:
        NoAnswer: there is none within `ANSWER_TIMEOUT_S`.
        BlockingIOError: the host has no process id for a thread.
        Exception: the function raised it.
    """
    silent, timeout_s = silent_subjects(), ANSWER_TIMEOUT_S
    if subject in silent or len(silent) >= MAX_SILENT:
        raise NoAnswer(subject, timeout_s)
    thread = AnswerThread(subject, function)
    thread.start()
    with thread_waiting_for(subject):
        thread.join(min(timeout_s, NEXT_TIMEOUT_S) if silent else timeout_s)
    if not thread.is_answered:
        thread.mark_silent()
        raise NoAnswer(subject, timeout_s)
    return thread.result()


def silent_subjects() -> Sequence[str]:
    """Return what has not answered in time and is still waited for, by name."""
    _silent.difference_update([thread for thread in _silent.copy() if not thread.is_alive()])
    return sorted({thread.name for thread in _silent.copy()})


def start_pool(threads: int = POOL_THREADS) -> ThreadPoolExecutor:
    """Return a pool whose threads have all started.

    A pool that starts them one by one raises an error while the host lacks process ids, and runs
    the work nevertheless, when another thread of it is free.

    Raises:
        RuntimeError: the host lacks process ids.
    """
    pool, all_started = ThreadPoolExecutor(threads, "pool"), threading.Barrier(threads + 1)
    try:
        for _ in range(threads):
            pool.submit(all_started.wait)
    except RuntimeError:
        all_started.abort()
        raise
    all_started.wait()
    return pool
