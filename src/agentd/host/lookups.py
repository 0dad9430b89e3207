"""Bounded lookups of files that may never answer: stale network file systems, FUSE.

A thread that waits for one cannot be cancelled. So it is a daemon thread, their number is limited,
and callers wait for a bounded time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from agentd.errors import RuntimeUnavailable

MOST_AT_ONCE = 4
ANSWER_TIMEOUT_S = 5.0
_T = TypeVar("_T")


class Lookups:
    """Runs lookups beside the event loop."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(MOST_AT_ONCE)

    async def look(self, what: str, function: Callable[[], _T]) -> _T:
        """Return the result of a function; `what` names the object of the lookup in errors.

        Raises:
            RuntimeUnavailable: there is no answer in time.
            Exception: the function raised it.
        """
        loop = asyncio.get_running_loop()
        found: asyncio.Future[_T] = loop.create_future()

        def ended(answer: Callable[[], None]) -> None:
            self._free.release()
            if not found.done():
                answer()

        def run() -> None:
            try:
                answer = partial(found.set_result, function())
            except Exception as error:  # noqa: BLE001 - raised to the caller
                answer = partial(found.set_exception, error)
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(ended, answer)

        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._free.acquire()
                threading.Thread(target=run, name="lookup", daemon=True).start()
                return await found
        except TimeoutError:
            why = f"{what} does not answer within {ANSWER_TIMEOUT_S:g} s"
            raise RuntimeUnavailable(why) from None
