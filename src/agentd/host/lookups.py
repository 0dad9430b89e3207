"""Bounded lookups of what may never answer: stale network file systems, FUSE, the name service.

Each has a thread of its own (`start_call`), beside the pool that creates and stops need. The
number of these threads is limited, and callers wait for a bounded time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from agentd.concurrency import ANSWER_TIMEOUT_S, forget_silent, mark_silent, may_ask, start_call
from agentd.errors import RuntimeUnavailable

MAX_AT_ONCE = 4
_T = TypeVar("_T")


class Lookups:
    """Runs lookups beside the event loop, `max_threads` at once.

    A call whose caller has stopped waiting counts until it ends. While all of them are such calls,
    further lookups are refused, but for a few (`may_ask`).
    """

    def __init__(self, max_threads: int = MAX_AT_ONCE) -> None:
        self._max_threads = max_threads
        self._free_threads = asyncio.Semaphore(max_threads)
        self._further_threads = 0
        self._abandoned: dict[Future[Any], tuple[str, float]] = {}
        """Calls that nobody waits for, with their subjects and the time since when."""

    async def call(
        self, subject: str, function: Callable[[], _T], timeout_s: float | None = None
    ) -> _T:
        """Return the result of a function, within `timeout_s` (default: `ANSWER_TIMEOUT_S`).

        `subject` names the object of the lookup in errors.

        Raises:
            RuntimeUnavailable: there is no answer in time, or no thread.
            Exception: the function raised it.
        """
        timeout_s = ANSWER_TIMEOUT_S if timeout_s is None else timeout_s
        if len(self._abandoned) == self._max_threads + self._further_threads:
            if not may_ask([at for _, at in self._abandoned.values()], self._max_threads):
                raise self._busy_error()
            self._further_threads += 1
            self._free_threads.release()
        call, ended = None, asyncio.Event()
        try:
            async with asyncio.timeout(timeout_s):
                await self._free_threads.acquire()
                call = self._start(subject, function, ended)
                await ended.wait()
        except TimeoutError:
            if call is None:  # it had no place
                raise self._busy_error() from None
            mark_silent(call, subject)
            reason = f"{subject} does not answer within {timeout_s:g} s"
            raise RuntimeUnavailable(reason) from None
        finally:
            if call is not None and not call.done():
                self._abandoned[call] = subject, time.monotonic()
        forget_silent([call for call, (name, _) in self._abandoned.items() if name == subject])
        try:
            return call.result()
        except TimeoutError as error:
            raise RuntimeUnavailable(f"{error.filename or subject}: {error.strerror}") from None

    def _busy_error(self) -> RuntimeUnavailable:
        names = (
            ", ".join(sorted({name for name, _ in self._abandoned.values()})) or "too many at once"
        )
        return RuntimeUnavailable(f"earlier lookups do not answer: {names}")

    def _start(self, subject: str, function: Callable[[], _T], ended: asyncio.Event) -> Future[_T]:
        """Start a call in a place that it gives back when it ends."""
        loop = asyncio.get_running_loop()

        def on_end() -> None:
            self._free_threads.release()
            self._abandoned.pop(call, None)
            ended.set()

        def notify(_: Future[_T]) -> None:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(on_end)

        try:
            call = start_call(subject, function)
        except BlockingIOError as error:
            self._free_threads.release()
            reason = f"{subject} cannot be looked up: {error.strerror}"
            raise RuntimeUnavailable(reason) from None
        call.add_done_callback(notify)
        return call
