"""Calls that several callers share while they are in progress."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_T = TypeVar("_T")


class SharedCalls(Generic[_K, _T]):
    """Calls in progress by key; one that nobody waits for is cancelled."""

    def __init__(self) -> None:
        self._tasks: dict[_K, asyncio.Task[_T]] = {}
        self._waiting: Counter[asyncio.Task[_T]] = Counter()

    async def call(self, key: _K, start: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Return the result of the call in progress for a key, or of a new one."""
        task = self._tasks.get(key)
        if task is None or task.done():
            task = self._tasks[key] = asyncio.create_task(start())
        self._waiting[task] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting[task] -= 1
            if not self._waiting[task]:
                del self._waiting[task]
                if self._tasks[key] is task:
                    del self._tasks[key]
                task.cancel()
