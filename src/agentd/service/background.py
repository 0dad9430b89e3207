"""Background tasks of the daemon: one that ends early is an error.

Without a vital one the daemon's answers become wrong, so the daemon stops, and its supervisor
restarts it. The end of any other one is a warning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial

import structlog

from agentd.concurrency import Deadline

log = structlog.get_logger()

VITAL: Mapping[str, bool] = {
    "reconciler": True,  # the state would no longer follow the runtimes
    "claims": True,  # claims would outlive their holders
    "unclaimed": False,  # processes without a claim go unnoticed
    "reload": True,  # a revoked token would stay valid
    "retention": False,  # ended kernels pile up
    "status": False,  # systemd shows an old status
}
"""Every background task, and whether the daemon stops with it."""


class Background:
    """Runs tasks and detects their ends; `failed` is called with the end of a vital one."""

    def __init__(self, failed: Callable[[str], None]) -> None:
        self.warnings: list[str] = []
        self._failed = failed
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False

    def run(self, name: str, work: Coroutine[object, object, None]) -> None:
        """Start a task of `VITAL`."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(partial(self._note_end, VITAL[name]))
        self._tasks.append(task)

    def _note_end(self, is_vital: bool, task: asyncio.Task[None]) -> None:  # noqa: FBT001 - see `run`
        if self._is_closing:
            return
        error = None if task.cancelled() else task.exception()
        why = "was cancelled" if task.cancelled() else "returned"
        why = why if error is None else f"{type(error).__name__}: {error}"
        reason = f"background task {task.get_name()} ended: {why}"
        log.error("task.ended", task=task.get_name(), reason=why, exc_info=error)
        if is_vital:
            self._failed(reason)
        else:
            self.warnings.append(f"{reason}; restart agentd")

    async def close(self, _: Deadline) -> None:
        """Cancel all tasks and wait for them."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
