"""The state of a kernel, derived from the manager's properties."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentd.core.kernel.states import ObservedState
from agentd.core.kernel.usage import Usage
from agentd.host.cgroups.usage import MOUNT, has_block_counters
from agentd.os_errors import OsErrorKind, os_error_kind
from agentd.runtimes.systemd.unit_bundle import UnitEnd

OBSERVED_PROPERTIES = (
    "Unit.ActiveState", "Unit.SubState", "Unit.InvocationID", "ControlGroup", "LogExtraFields",
    "Result", "ExecMainCode", "ExecMainStatus", "ExecMainStartTimestamp", "ExecMainExitTimestamp",
    "MainPID", "CPUUsageNSec", "IOReadBytes", "IOWriteBytes",
)  # fmt: skip
UNSET = 2**64 - 1
"""systemd's value for an unknown number."""
LIVE_STATES = frozenset({ObservedState.RUNNING, ObservedState.PAUSED})
_END_KINDS = {1: "exited", 2: "killed", 3: "dumped"}
"""Ends of a process, by the `CLD_` numbers of sigaction(2)."""


def state_of(active: str, sub: str, control_group: str = "", root: Path = MOUNT) -> ObservedState:
    """Return the state that the manager's states and the unit's cgroup amount to.

    A unit that is being stopped lives until it has stopped. A process that is stuck in Linux
    survives even systemd's last SIGKILL: the unit is `failed` then, and its devices are still open.
    """
    if sub.startswith("auto-restart"):
        return ObservedState.RUNNING
    if active == "activating":
        return ObservedState.CREATED
    events = _read_events(f"{root}/{control_group.lstrip('/')}") if control_group else b""
    if b"populated 1" in events:
        return ObservedState.PAUSED if b"frozen 1" in events else ObservedState.RUNNING
    if active in ("failed", "inactive") or (active, sub) == ("active", "exited"):
        return ObservedState.EXITED
    return ObservedState.RUNNING


def _read_events(cgroup: str) -> bytes:
    """Return a cgroup's `cgroup.events` (cgroups(7)), empty if it does not exist."""
    try:
        return Path(cgroup, "cgroup.events").read_bytes()
    except OSError as error:
        if os_error_kind(error) is OsErrorKind.GONE:
            return b""
        raise


def parse_end(properties: Mapping[str, Any]) -> UnitEnd:
    """Return the end of a unit's process from its properties."""
    code = _END_KINDS.get(properties["ExecMainCode"], "")
    finished_at = properties["ExecMainExitTimestamp"] / 1e6 or time.time()
    return UnitEnd(properties["Result"], code, str(properties["ExecMainStatus"]), finished_at)


def parse_usage(properties: Mapping[str, Any]) -> Usage:
    """Return the usage of a unit whose cgroup is gone, as the manager reports it."""
    cpu, read, written = (
        None if properties[name] == UNSET else int(properties[name])
        for name in ("CPUUsageNSec", "IOReadBytes", "IOWriteBytes")
    )
    if not has_block_counters():
        read = written = None
    return Usage(None if cpu is None else cpu / 1e9, io_read_bytes=read, io_write_bytes=written)


def parse_log_fields(raw: Sequence[bytes]) -> dict[str, str]:
    """Return the log fields that PID 1 adds to every line of a unit."""
    pairs = (bytes(item).decode(errors="replace").partition("=") for item in raw)
    return {name: value for name, _, value in pairs}
