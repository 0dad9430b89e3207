"""Bounded lookups of what may never answer: stale network file systems, FUSE, the name service.

Each has a thread of its own (`AnswerThread`), beside the pool that creates and stops need. The
number of these threads is limited, and callers wait for a bounded time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from agentd.concurrency import ANSWER_TIMEOUT_S, AnswerThread, NoAnswer
from agentd.errors import RuntimeUnavailable

MAX_AT_ONCE = 4
_T = TypeVar("_T")


class Lookups:
    """Runs lookups beside the event loop, `max_threads` at once.

    A thread whose caller has stopped waiting counts until it ends. While all of them are such
    threads, further lookups are refused.
    """

    def __init__(self, max_threads: int = MAX_AT_ONCE) -> None:
        self._max_threads = max_threads
        self._free_threads = asyncio.Semaphore(max_threads)
        self._abandoned: set[AnswerThread[Any]] = set()

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
        if len(self._abandoned) == self._max_threads:
            raise self._busy_error()
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def on_end() -> None:
            self._free_threads.release()
            self._abandoned.discard(thread)
            ended.set()

        def notify() -> None:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(on_end)

        thread = AnswerThread(subject, function, notify)
        try:
            async with asyncio.timeout(timeout_s):
                await self._free_threads.acquire()
                self._start(thread)
                try:
                    await ended.wait()
                finally:
                    if not thread.is_answered:
                        self._abandoned.add(thread)
        except TimeoutError:
            if thread.ident is None:  # it had no place
                raise self._busy_error() from None
            thread.mark_silent()
            reason = f"{thread.name} does not answer within {timeout_s:g} s"
            raise RuntimeUnavailable(reason) from None
        try:
            return thread.result()
        except NoAnswer as error:
            raise RuntimeUnavailable(str(error)) from None

    def _busy_error(self) -> RuntimeUnavailable:
        names = ", ".join(sorted({thread.name for thread in self._abandoned})) or "too many at once"
        return RuntimeUnavailable(f"earlier lookups do not answer: {names}")

    def _start(self, thread: AnswerThread[_T]) -> None:
        try:
            thread.start()
        except BlockingIOError as error:
            self._free_threads.release()
            reason = f"{thread.name} cannot be looked up: {error.strerror}"
            raise RuntimeUnavailable(reason) from None
