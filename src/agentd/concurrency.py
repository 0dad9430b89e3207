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
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, Self, TypeVar

import msgspec
from msgspec.structs import replace

ANSWER_TIMEOUT_S = 5.0
"""Seconds in which what is looked up on the host must answer."""
NEXT_TIMEOUT_S = 0.5
"""The same after another one of a walk was silent, so that many dead paths do not add up."""
MAX_SILENT = 32
"""Maximum silent ones that a walk meets before it goes on without the others."""
SILENT_PAUSE_S, PAUSE_FACTOR, MAX_FURTHER = 30.0, 8, 3
"""Seconds until one more thread asks what is silent, as of a mount that was replaced under the old
ones; the factor of the next pause; and how many further threads there are."""
POOL_THREADS = 8
_T = TypeVar("_T")
_silent: dict[Future[Any], tuple[str, float]] = {}
"""Calls that did not answer in time, with their subjects and the time when that was noticed."""


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


def start_call(subject: str, function: Callable[[], _T]) -> Future[_T]:
    """Start a call that may never end, in a thread with the name of what it waits for.

    Raises:
        BlockingIOError: the host has no process id for a thread.
    """
    call: Future[_T] = Future()
    call.set_running_or_notify_cancel()  # no caller that goes away can cancel it

    def run() -> None:
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 - raised to the caller
            call.set_exception(error)
        else:
            call.set_result(result)

    try:
        threading.Thread(target=run, name=subject, daemon=True).start()
    except RuntimeError as error:
        raise BlockingIOError(errno.EAGAIN, str(error), subject) from None
    return call


class Walk:
    """A walk through many subjects that may never answer; those of others cost it nothing."""

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self.has_waited = False


def call_in_time(subject: str, function: Callable[[], _T], walk: Walk | None = None) -> _T:
    """Return the result of a function that may never end, from a thread of its own.

    While `subject` is silent, a further call fails at once, but for a few (`may_ask`).

    Raises:
        TimeoutError: there is none within `ANSWER_TIMEOUT_S`; its `filename` is the subject.
        BlockingIOError: the host has no process id for a thread.
        Exception: the function raised it.
    """
    walk, timeout_s = walk or Walk(), ANSWER_TIMEOUT_S
    if len(walk.silent) >= MAX_SILENT:
        raise TimeoutError(errno.ETIMEDOUT, f"{MAX_SILENT} others do not answer", subject)
    silent = {call: at for call, (name, at) in _silent.copy().items() if name == subject}
    if may_ask([at for call, at in silent.items() if not call.done()]):
        call = start_call(subject, function)
        wait([call], min(timeout_s, NEXT_TIMEOUT_S) if walk.has_waited else timeout_s)
        if call.done():
            forget_silent(silent)
            return call.result()
        mark_silent(call, subject)
        walk.has_waited = True
    walk.silent.add(subject)
    raise TimeoutError(errno.ETIMEDOUT, f"no answer within {timeout_s:g} s", subject)


def may_ask(silent_since: Sequence[float], threads: int = 1) -> bool:
    """Return whether one more thread may ask, while others are silent since these times.

    What is silent is asked by so many `threads`, and by further ones after a pause each.
    """
    further = len(silent_since) - threads
    pause_s = SILENT_PAUSE_S * PAUSE_FACTOR ** max(0, further)
    is_over = further < 0 or time.monotonic() >= silent_since[-1] + pause_s
    return is_over and further < MAX_FURTHER


def mark_silent(call: Future[Any], subject: str) -> None:
    """Count a call as silent from now until it ends, or a later one answers."""
    _silent[call] = subject, time.monotonic()


def forget_silent(calls: Iterable[Future[Any]]) -> None:
    """Count calls as silent no longer."""
    for call in calls:
        _silent.pop(call, None)


def silent_subjects() -> Sequence[str]:
    """Return what has not answered in time and is still waited for, by name."""
    forget_silent([call for call in _silent.copy() if call.done()])
    return sorted({subject for subject, _ in _silent.copy().values()})


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
