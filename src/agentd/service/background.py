"""Background tasks of a daemon, gateway or publisher: one that ends early is an error.

Without a vital one the program's answers become wrong, so the program stops, and its supervisor
restarts it. The end of any other one is a warning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import structlog

log = structlog.get_logger()

NOT_VITAL = frozenset(
    {
        "unclaimed",  # processes without a claim go unnoticed
        "retention",  # ended kernels pile up
        "status",  # systemd shows an old status
    }
)
"""Tasks whose end is a warning; the program stops with any other one."""


class Background:
    """Runs tasks and detects their ends; `failed` is called with the end of a vital one."""

    def __init__(self, failed: Callable[[str], None]) -> None:
        self.warnings: list[str] = []
        self._failed = failed
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False

    def run(self, name: str, work: Coroutine[object, object, None]) -> None:
        """Start a task; it is vital unless `NOT_VITAL` has its name."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._note_end)
        self._tasks.append(task)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if self._is_closing:
            return
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        why = "was cancelled" if task.cancelled() else "returned"
        why = why if error is None else f"{type(error).__name__}: {error}"
        reason = f"background task {task.get_name()} ended: {why}"
        if task.get_name() in NOT_VITAL:
            self.warnings.append(f"{reason}; restart agentd")
        else:
            self._failed(reason)
        log.error("task.ended", task=task.get_name(), reason=why, exc_info=error)

    async def close(self) -> None:
        """Cancel all tasks and wait for them."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
