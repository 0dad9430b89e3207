"""Background tasks of a daemon, gateway or publisher: one that ends early is an error.

Without a vital one the program's answers become wrong, so the program stops, and its supervisor
restarts it. The end of any other one is a condition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import structlog

from agentd.core.conditions import Condition

log = structlog.get_logger()

NOT_VITAL = frozenset(
    {
        "conditions",  # they are not logged
        "host",  # its conditions are old
        "cores",  # each create looks, too
        "unclaimed",  # processes without a claim go unnoticed
        "retention",  # ended kernels pile up
        "status",  # systemd shows an old status
        "log",  # lines were lost, and the log does not say so
        "missing",  # what has come since is not used before a reload
    }
)
"""Tasks whose end is a condition; the program stops with any other one."""


class Background:
    """Runs tasks and detects their ends; `on_failure` is called with the end of a vital one."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self.conditions: list[Condition] = []
        self._on_failure = on_failure
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False

    def run(self, name: str, work: Coroutine[object, object, None]) -> None:
        """Start a task; it is vital unless `NOT_VITAL` has its name."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._on_task_end)
        self._tasks.append(task)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if self._is_closing:
            return
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        end_reason = "was cancelled" if task.cancelled() else "returned"
        end_reason = end_reason if error is None else f"{type(error).__name__}: {error}"
        reason = f"background task {task.get_name()} ended: {end_reason}"
        if task.get_name() in NOT_VITAL:
            self.conditions.append(Condition("host", reason, "restart agentd"))
        else:
            self._on_failure(reason)
        log.error("task.ended", task=task.get_name(), reason=end_reason, exc_info=error)

    async def close(self) -> None:
        """Cancel all tasks and wait for them."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
