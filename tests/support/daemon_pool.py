"""Running daemons that tests use one after the other, instead of a start for each test.

For tests that read no totals of the daemon's life and do not damage what it keeps. A daemon is
given to the next test only if it runs and looks as it did when it was new.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from support.daemon import AGENTS, Daemon, gpus
from support.engine import Engine

MAX_IDLE = 6
TWO_AGENTS = AGENTS + gpus()
Serving = Callable[..., Awaitable[Daemon]]
"""Gives a running daemon with a configuration, by default two agents and two devices."""
_Key = tuple[str, str, Path | None]


class DaemonPool:
    """The idle daemons of one worker, by runtime, configuration and engine."""

    def __init__(self) -> None:
        self._idle: dict[_Key, Daemon] = {}
        self._views: dict[Daemon, Any] = {}

    @contextlib.asynccontextmanager
    async def running(
        self, runtime: str, text: str, engine: Engine | None = None
    ) -> AsyncIterator[Daemon]:
        """Give a daemon that runs with this configuration and has no kernels."""
        key = (runtime, text, engine.socket if engine else None)
        daemon = self._idle.pop(key, None) or await self._new(runtime, text, engine)
        daemon.log_from += len(daemon.log)
        ended: Daemon | None = daemon
        try:
            yield daemon
            if daemon.process is not None:
                await daemon.remove_kernels()
                if await _view(daemon) == self._views[daemon]:
                    self._idle[key] = daemon
                    ended = None if len(self._idle) <= MAX_IDLE else self._oldest()
        finally:
            if ended is not None:
                self._views.pop(ended)
                await _end(ended)

    @contextlib.asynccontextmanager
    async def serving(self, runtime: str, engine: Engine | None = None) -> AsyncIterator[Serving]:
        """Give a test its daemons, and take them back when it is over."""
        async with contextlib.AsyncExitStack() as stack:
            yield lambda text=TWO_AGENTS: stack.enter_async_context(
                self.running(runtime, text, engine)
            )

    async def close(self) -> None:
        """End all of them."""
        while self._idle:
            await _end(self._oldest())

    async def _new(self, runtime: str, text: str, engine: Engine | None) -> Daemon:
        folder = Path(tempfile.mkdtemp(prefix="agentd-", dir="/tmp"))
        folder.chmod(0o755)
        daemon = Daemon(folder, runtime, engine)
        await daemon.start(text)
        self._views[daemon] = await _view(daemon)
        return daemon

    def _oldest(self) -> Daemon:
        return self._idle.pop(next(iter(self._idle)))


async def _view(daemon: Daemon) -> list[Any]:
    """Return what one test could leave behind for the next."""
    assert daemon.process is not None
    pages = [await daemon.get(f"/v1/{page}") for page in ("devices", "agents", "plugins")]
    node = await daemon.get("/v1/node")
    return [daemon.process.poll(), daemon.config_file.read_text(), *pages, node["warnings"]]


async def _end(daemon: Daemon) -> None:
    await daemon.close()
    shutil.rmtree(daemon.folder, ignore_errors=True)
