"""Bounded lookups of what may never answer: stale network file systems, FUSE, the name service.

A thread that waits for one cannot be cancelled. So it is a daemon thread of its own, beside the
pool that creates and stops need, the number of these threads is limited, and callers wait for a
bounded time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from agentd.errors import RuntimeUnavailable

MAX_AT_ONCE = 4
ANSWER_TIMEOUT_S = 5.0
_T = TypeVar("_T")


class Lookups:
    """Runs lookups beside the event loop, `max_threads` at once.

    A thread whose caller has stopped waiting counts until it ends. While all of them are such
    threads, further lookups are refused.
    """

    def __init__(self, max_threads: int = MAX_AT_ONCE) -> None:
        self._max_threads = max_threads
        self._free_threads = asyncio.Semaphore(max_threads)
        self._abandoned: set[threading.Thread] = set()

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
        loop = asyncio.get_running_loop()
        result: asyncio.Future[_T] = loop.create_future()
        has_ended = False

        def on_end(set_answer: Callable[[], None]) -> None:
            nonlocal has_ended
            has_ended = True
            self._free_threads.release()
            self._abandoned.discard(thread)
            if not result.done():
                set_answer()

        def run() -> None:
            try:
                set_answer = partial(result.set_result, function())
            except Exception as error:  # noqa: BLE001 - raised to the caller
                set_answer = partial(result.set_exception, error)
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(on_end, set_answer)

        thread = threading.Thread(target=run, name=subject, daemon=True)
        try:
            async with asyncio.timeout(timeout_s):
                await self._free_threads.acquire()
                self._start(thread, subject)
                try:
                    return await result
                finally:
                    if not has_ended:
                        self._abandoned.add(thread)
        except TimeoutError:
            if thread.ident is None:  # it had no place
                raise self._busy_error() from None
            reason = f"{thread.name} does not answer within {timeout_s:g} s"
            raise RuntimeUnavailable(reason) from None

    def _busy_error(self) -> RuntimeUnavailable:
        names = ", ".join(sorted({thread.name for thread in self._abandoned})) or "too many at once"
        return RuntimeUnavailable(f"earlier lookups do not answer: {names}")

    def _start(self, thread: threading.Thread, subject: str) -> None:
        try:
            thread.start()
        except RuntimeError as error:  # no free process id
            self._free_threads.release()
            raise RuntimeUnavailable(f"{subject} cannot be looked up: {error}") from None
