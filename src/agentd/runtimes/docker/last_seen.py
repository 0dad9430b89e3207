"""The time at which agentd last saw the engine, which explains how containers ended.

A host that goes down and an engine without live-restore end the containers. These look as if
somebody had stopped them: an exit code, and no reason. Only the time of the end tells the
difference: it lies after the last event or list, and before the engine was available again.
"""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog
from msgspec.structs import replace

from agentd.core.kernel.states import NODE_RESTARTED, Ending
from agentd.runtimes.host.private_folder import PrivateFolder

log = structlog.get_logger()
ENGINE_STOPPED = "the engine was stopped"
SAVE_PAUSE_S = 60.0
"""Minimum seconds between two writes of the file, except at a stop and around an outage."""
_STOP_MARGIN_S = 30.0
"""Seconds before the loss of the connection in which the engine may have ended containers.

An engine that stops ends its containers first, within 15 s, and closes its connections after that.
"""
_MAX_OUTAGES = 100
_ENDED_BY_OTHERS = (128 + signal.SIGKILL, 128 + signal.SIGTERM, 255)
"""Exit codes of signals, and of containers that an engine found dead when it started."""


class Outage(msgspec.Struct, frozen=True):
    """A period in which kernels ended for a reason, in seconds since the epoch."""

    since: float
    until: float
    reason: str


class _State(msgspec.Struct, frozen=True):
    boot_id: str
    """The boot in which agentd was last connected to the engine."""
    seen_at: float
    outages: tuple[Outage, ...] = ()
    is_lost: bool = False
    """Whether the event stream ended, or could not be opened, and was not opened since."""
    keeps_containers: bool = True


class OutageLog:
    """The time of the last event or list of one node's engine, kept over restarts of agentd."""

    def __init__(self, file: Path | None = None, boot_id: str = "") -> None:
        self._file = file
        self._boot_id = boot_id
        self._state = _read(file) or _State(boot_id, time.time())
        self._save_timer: asyncio.TimerHandle | None = None

    def update(self) -> None:
        """Record an event or a list; in an outage a list proves nothing about its end."""
        if self._state.is_lost or self._has_rebooted:
            return
        self._state = replace(self._state, seen_at=time.time())
        if self._save_timer is None:
            self._save_timer = asyncio.get_running_loop().call_later(SAVE_PAUSE_S, self.save)

    def mark_lost(self) -> None:
        """Record at once that the event stream ended, or could not be opened."""
        if self._state.is_lost:
            return
        seen_at = min(self._state.seen_at, time.time() - _STOP_MARGIN_S)
        self._state = replace(self._state, seen_at=seen_at, is_lost=True)
        self.save()

    def mark_connected(self, *, keeps_containers: bool) -> None:
        """Record at once that the event stream is open.

        `keeps_containers`: containers outlive the engine. They outlived the outage if that holds
        before and after it: an engine ends them when it stops, or when it starts and finds them.
        """
        saved, now = self._state, time.time()
        outages = saved.outages
        outlived = saved.keeps_containers and keeps_containers
        if self._has_rebooted or (saved.is_lost and not outlived):
            reason = NODE_RESTARTED if self._has_rebooted else ENGINE_STOPPED
            outages = (*outages, Outage(saved.seen_at, now, reason))[-_MAX_OUTAGES:]
        self._state = _State(self._boot_id, now, outages, keeps_containers=keeps_containers)
        self.save()

    @property
    def _has_rebooted(self) -> bool:
        return self._state.boot_id != self._boot_id

    def explain_ending(self, ending: Ending) -> Ending:
        """Return the ending of a container, with a reason if it ended in an outage."""
        is_explained = bool(ending.reason) or ending.oom_killed
        if is_explained or ending.exit_code not in _ENDED_BY_OTHERS:
            return ending
        for outage in reversed(self._state.outages):
            if outage.since <= (ending.finished_at or 0.0) <= outage.until:
                return replace(ending, reason=outage.reason)
        return ending

    def save(self) -> None:
        """Write the file."""
        if self._save_timer is not None:
            self._save_timer.cancel()
            self._save_timer = None
        if self._file is None:
            return
        try:
            text = msgspec.json.encode(self._state).decode()
            PrivateFolder(self._file.parent).replace(self._file.name, text)
        except OSError as error:
            log.warning("runtime.absence_save_failed", file=str(self._file), reason=error.strerror)


def _read(file: Path | None) -> _State | None:
    if file is None:
        return None
    with suppress(OSError, msgspec.MsgspecError):
        text = PrivateFolder(file.parent).read(file.name)
        return msgspec.json.decode(text, type=_State) if text else None
    return None
