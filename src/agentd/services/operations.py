"""Which kernels this daemon is working on at the moment.

What a list or an event says of a kernel is out of date while an operation of our own is
under way. It is left out, and looked at again when the operation is over.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class Operations:
    """Busy kernels, one exclusive operation on each, and what was missed meanwhile."""

    def __init__(self) -> None:
        self._busy: Counter[str] = Counter()
        self._locks: dict[str, asyncio.Lock] = {}
        self._missed: set[str] = set()
        self._witnesses: list[set[str]] = []
        self._recheck: asyncio.Queue[str] = asyncio.Queue()

    @contextmanager
    def on(self, kernel_id: str) -> Iterator[None]:
        """Mark a kernel busy."""
        self._busy[kernel_id] += 1
        self._witness(kernel_id)
        try:
            yield
        finally:
            self._busy[kernel_id] -= 1
            self._witness(kernel_id)
            if not self._busy[kernel_id]:
                del self._busy[kernel_id]
                if kernel_id in self._missed:
                    self._missed.discard(kernel_id)
                    self._recheck.put_nowait(kernel_id)

    @asynccontextmanager
    async def alone_on(self, kernel_id: str) -> AsyncIterator[None]:
        """Mark a kernel busy, after whoever else works on it alone is done."""
        with self.on(kernel_id):
            lock = self._locks.setdefault(kernel_id, asyncio.Lock())
            try:
                async with lock:
                    yield
            finally:
                if self._busy[kernel_id] == 1:
                    self._locks.pop(kernel_id, None)

    @contextmanager
    def witnessed(self) -> Iterator[set[str]]:
        """Collect the kernels that are busy at any moment while this context is open."""
        seen = set(self._busy)
        self._witnesses.append(seen)
        try:
            yield seen
        finally:
            self._witnesses = [other for other in self._witnesses if other is not seen]

    def look_again(self, kernel_id: str) -> None:
        """Have a kernel looked at, once nobody works on it; a list under way is out of date."""
        self._witness(kernel_id)
        if kernel_id in self._busy:
            self._missed.add(kernel_id)
        else:
            self._recheck.put_nowait(kernel_id)

    async def to_look_at(self) -> str:
        """Wait for a kernel that has to be looked at."""
        return await self._recheck.get()

    def _witness(self, kernel_id: str) -> None:
        for seen in self._witnesses:
            seen.add(kernel_id)
