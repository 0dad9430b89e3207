"""When the engine, or the whole node, was away: containers that ended then say so.

An engine without live-restore ends its containers when it stops, and they look as if they had ended
by themselves: exit code 137 or 143, and no word about why. What tells them apart is when they
ended, so the times in which the engine was away are written down. One that stops in good order
first signals its containers: signals that nobody asked agentd for count to the absence that
follows them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import structlog

from agentd.core.kernel import Ending

log = structlog.get_logger()
NODE, ENGINE = "the node restarted", "the Docker Engine was stopped"
STOPPING_S = 30.0
"""How long before it hangs up an engine may signal its containers; its own limit is 15 s."""
SLACK_S = 0.2
"""How late agentd may learn of a signal, or of an engine that is there."""
KEPT = 100


class Absence(msgspec.Struct, frozen=True):
    """One time in which the engine was away; seconds since the epoch."""

    since: float
    until: float
    reason: str


class _Saved(msgspec.Struct, frozen=True):
    boot_id: str
    closed_at: float | None = None
    absences: tuple[Absence, ...] = ()


class Absences:
    """Knows when the engine of one node was away, over restarts of agentd too."""

    def __init__(self, file: Path | None, boot_id: str) -> None:
        self._file = file
        self._boot_id = boot_id
        self._signals: dict[str, float] = {}
        self._asked: set[str] = set()
        self._open: tuple[float, str] | None = None
        before = _read(file)
        self._absences = before.absences if before else ()
        if before is not None and before.boot_id != boot_id:
            self._open = (before.closed_at or _booted_at(), NODE)

    @contextmanager
    def asked(self, kernel_id: str) -> Iterator[None]:
        """Let signals to a kernel pass meanwhile: agentd was asked to end it."""
        self._asked.add(kernel_id)
        try:
            yield
        finally:
            self._asked.discard(kernel_id)

    def signalled(self, kernel_id: str) -> None:
        """Note a signal to a kernel."""
        if kernel_id not in self._asked:
            self._signals[kernel_id] = time.time()

    def went(self) -> None:
        """Note that the engine is away from now on, or has been since it began to stop."""
        now = time.time()
        stopped = [at for at in self._signals.values() if at > now - STOPPING_S]
        self._open = self._open or (min(stopped, default=now), ENGINE)
        self._signals.clear()

    def came(self) -> None:
        """Note that the engine is there."""
        self._signals.clear()
        if self._open is not None:
            since, reason = self._open
            ended = Absence(since, time.time(), reason)
            self._absences = (*self._absences, ended)[-KEPT:]
            self._open = None
        self._write(None)

    def close(self) -> None:
        """Note that nobody looks any more."""
        self._write(time.time())

    def explained(self, ending: Ending, started_at: float | None) -> Ending:
        """Return how a container ended, with the reason if it ended in an absence."""
        if ending.reason or ending.finished_at is None:
            return ending
        for absence in reversed(self._absences):
            earliest, latest = absence.since - SLACK_S, absence.until + SLACK_S
            is_within = earliest <= ending.finished_at <= latest
            if is_within and (started_at or 0) < absence.since:
                why = absence.reason
                return Ending(ending.exit_code, ending.oom_killed, ending.finished_at, why)
        return ending

    def _write(self, closed_at: float | None) -> None:
        if self._file is None:
            return
        saved = _Saved(self._boot_id, closed_at, self._absences)
        made = self._file.with_suffix(".new")
        try:
            made.write_bytes(msgspec.json.encode(saved))
            made.chmod(0o600)
            made.replace(self._file)
        except OSError as error:
            log.warning("runtime.absence_not_saved", file=str(self._file), reason=error.strerror)


def _read(file: Path | None) -> _Saved | None:
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(file.read_bytes(), type=_Saved) if file else None
    return None


def _booted_at() -> float:
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
