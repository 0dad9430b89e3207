"""Absences of the engine or the node, which explain how containers ended.

An engine without live-restore ends its containers when it stops. They look as if they had ended by
themselves: exit code 137 or 143, without a reason. Only the time of the end tells the difference,
so this module records the times in which the engine was unavailable. An engine that stops in good
order signals its containers first: signals that agentd did not request count towards the absence
that follows them.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import structlog
from msgspec.structs import replace

from agentd.core.kernel.states import Ending
from agentd.runtimes.host.private_folder import PrivateFolder

log = structlog.get_logger()
NODE, ENGINE = "the node restarted", "the Docker Engine was stopped"
STOPPING_S = 30.0
"""Seconds before its disconnect in which a stopping engine may signal; its own limit is 15 s."""
LATE_S = 5.0
"""Seconds by which the engine may be late to report a signal that agentd requested."""
DOWN_S = 1800.0
"""Seconds that the host may take from the end of its kernels to its next boot."""
TOGETHER_S = 120.0
"""Seconds from the engine's stop to agentd's when the host goes down; systemd waits 90 s."""
SHUTDOWN_S = 10.0
"""Seconds before agentd has stopped in which a host that goes down may end containers already."""
SLACK_S = 0.2
"""Seconds by which agentd may be late to notice a signal or an available engine."""
KEPT = 100
_KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)


class Absence(msgspec.Struct, frozen=True):
    """A period in which the engine was unavailable, in seconds since the epoch."""

    since: float
    until: float
    reason: str
    signalled: dict[str, float] = {}
    """When the engine signalled each kernel before it disconnected."""

    def explains(self, kernel_id: str, started_at: float, ending: Ending) -> bool:
        """Return whether a kernel ended in this period.

        A host that goes down ends containers by a signal, and agentd at the same time.
        """
        since = min(self.since, self.signalled.get(kernel_id, self.since))
        is_of_host = self.reason == NODE and ending.exit_code in _KILLED
        early_s = SHUTDOWN_S if is_of_host else SLACK_S
        finished_at = ending.finished_at or 0.0
        return started_at < since and since - early_s <= finished_at <= self.until + SLACK_S


class _Saved(msgspec.Struct, frozen=True):
    boot_id: str
    closed_at: float | None = None
    open: Absence | None = None
    absences: tuple[Absence, ...] = ()
    signals: dict[str, float] = {}
    """The signals that agentd did not request, shortly before it stopped."""


class Absences:
    """The absences of one node's engine, kept over restarts of agentd."""

    def __init__(self, file: Path | None, boot_id: str) -> None:
        self._file = file
        self._boot_id = boot_id
        self._signals: dict[str, float] = {}
        self._asked: Counter[str] = Counter()
        self._asked_lately: dict[str, float] = {}
        self._closed_at: float | None = None
        before = _read(file)
        self._absences = before.absences if before else ()
        self._open = before.open if before else None
        if before is not None and before.boot_id != boot_id:
            self._absences, self._open = _over_a_boot(before, _booted_at())

    @contextmanager
    def asked(self, kernel_id: str) -> Iterator[None]:
        """Ignore signals to a kernel during a stop that agentd requests."""
        self._asked[kernel_id] += 1
        try:
            yield
        finally:  # the engine reports its signal over another connection
            self._asked[kernel_id] -= 1
            if not self._asked[kernel_id]:
                del self._asked[kernel_id]
            now = time.time()
            self._asked_lately.pop(kernel_id, None)
            self._asked_lately[kernel_id] = now + LATE_S
            while self._asked_lately[oldest := next(iter(self._asked_lately))] <= now:
                del self._asked_lately[oldest]

    def signalled(self, kernel_id: str) -> None:
        """Record a signal to a kernel."""
        now = time.time()
        if kernel_id not in self._asked and self._asked_lately.get(kernel_id, 0.0) < now:
            self._signals = {**self._recent_signals(now), kernel_id: now}

    def went(self, *, ends_kernels: bool) -> None:
        """Begin an absence; with live-restore it ends no kernels."""
        now = time.time()
        stopped, self._signals = self._recent_signals(now), {}
        if ends_kernels and self._open is None:
            self._open = Absence(now, 0.0, ENGINE, stopped)
            self._write()

    def came(self) -> None:
        """End the absence: the engine is available."""
        self._signals = {}
        if self._open is not None:
            ended = replace(self._open, until=time.time())
            self._absences = (*self._absences, ended)[-KEPT:]
            self._open = None
        self._write()

    def close(self) -> None:
        """Save when agentd stopped watching."""
        self._closed_at = time.time()
        self._write()

    def explained(self, kernel_id: str, ending: Ending, started_at: float | None) -> Ending:
        """Return the ending of a container, with a reason if it ended in an absence."""
        if ending.reason or ending.finished_at is None:
            return ending
        for absence in reversed(self._absences):
            if absence.explains(kernel_id, started_at or 0.0, ending):
                return replace(ending, reason=absence.reason)
        return ending

    def _recent_signals(self, now: float) -> dict[str, float]:
        return {k: at for k, at in self._signals.items() if at > now - STOPPING_S}

    def _write(self) -> None:
        if self._file is None:
            return
        signals = self._recent_signals(time.time())
        saved = _Saved(self._boot_id, self._closed_at, self._open, self._absences, signals)
        folder = PrivateFolder(self._file.parent)
        try:
            folder.replace(self._file.name, msgspec.json.encode(saved).decode())
        except OSError as error:
            log.warning("runtime.absence_save_failed", file=str(self._file), reason=error.strerror)


def _over_a_boot(before: _Saved, booted_at: float) -> tuple[tuple[Absence, ...], Absence]:
    """Return the absences before a boot, and the host's own, which began before it.

    An engine that stopped shortly before agentd did so because the host went down.
    """
    since = max(before.closed_at or booted_at, booted_at - DOWN_S)
    last = before.open or Absence(since, 0.0, ENGINE, before.signals)
    if since - last.since <= TOGETHER_S:
        return before.absences, replace(last, since=min(since, last.since), reason=NODE)
    return (*before.absences, replace(last, until=since)), Absence(since, 0.0, NODE)


def _read(file: Path | None) -> _Saved | None:
    if file is None:
        return None
    with suppress(OSError, msgspec.MsgspecError):
        text = PrivateFolder(file.parent).read(file.name)
        return msgspec.json.decode(text, type=_Saved) if text else None
    return None


def _booted_at() -> float:
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
