"""The bundle beside a kernel's unit: a folder, mode 0700, below the state folder.

record.json     the kernel's record, written before anything starts
environment     its variables, in the form of EnvironmentFile= (systemd.exec(5)): every user can
                read what is in a unit
identity.json   the unit's invocation id, the boot, and the start time
exit            the exit status: `$SERVICE_RESULT $EXIT_CODE $EXIT_STATUS`, the time, and the state
                of the manager; written by systemd's own ExecStopPost=, or by the daemon
cgroup          the id of its cgroup, which is the inode of that folder
counted         the contents of the cgroup's files at the end, if systemd ended the kernel
positions.json  the positions of some of its lines in the journal, noted while they were read
usage.json      the usage at the end according to the manager, if the kernel ended by itself
"""

from __future__ import annotations

import signal
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec.structs import asdict, replace

from agentd.core.kernel.record import LAST_SECOND, MALFORMED, parse_time, require_record
from agentd.core.kernel.states import NODE_RESTARTED, Ending
from agentd.core.kernel.usage import UNKNOWN_USAGE, Usage
from agentd.host.cgroups.usage import parse_usage_files
from agentd.runtimes.host.private_folder import PrivateFolder

RECORD, ENVIRONMENT, IDENTITY, EXIT = "record.json", "environment", "identity.json", "exit"
USAGE, COUNTED, GROUP, POSITIONS = "usage.json", "counted", "cgroup", "positions.json"

DROP_IN = """\
# Written by agentd: how each kernel ends is written down by systemd itself. It runs with all rights
# and with the kernel's variables (LD_PRELOAD, PATH), so only what is static may look at them.
[Service]
ExecStopPost=+{busybox} sh -c 'export PATH=/usr/sbin:/usr/bin:/sbin:/bin; b={busybox}; \
k=$${{0#{prefix}}}; cd "$$1/$${{k%%.service}}" || exit 0; \
n=; [ -e exit ] || [ ! -e cgroup ] || n=1; \
m=$$($$b env -i PATH=/usr/bin:/bin $$b timeout 5 systemctl {manager} is-system-running); \
[ -e exit ] || {{ printf "%%s %%s %%s %%s %%s\\n" "$$SERVICE_RESULT" \
"$$EXIT_CODE" "$$EXIT_STATUS" "$$($$b env -i $$b date +%%s)" "$$m" >.exit \
&& $$b mv .exit exit; }}; \
IFS= read -r g </proc/self/cgroup; g="/sys/fs/cgroup$${{g#0::}}"; \
[ -n "$$n" ] && [ "$$($$b stat -c %%i "$$g" 2>/dev/null)" = "$$($$b cat cgroup)" ] \
&& (cd "$$g" && for f in cpu.stat io.stat memory.peak; do [ ! -e $$f ] || $$b cat $$f || exit 1; \
done) >.counted && $$b mv .counted counted; true' \
%n {folder}
"""
"""The drop-in for all units of a node: `$$` and `%%` escape `$` and `%`; `%n` is the unit name."""
RESERVED = ("SERVICE_RESULT", "EXIT_CODE", "EXIT_STATUS")
"""Variables in which systemd reports how a unit ended; no request may set them."""
_PT_INTERP, _PHOFF_AT, _PHSIZE_AT = 3, 32, 54


def static_busybox(paths: Sequence[str] = ("/bin/busybox", "/usr/bin/busybox")) -> str | None:
    """Return a static BusyBox, which LD_PRELOAD and the like cannot affect (elf(5))."""
    for path in paths:
        with suppress(OSError, struct.error, IndexError):
            raw = Path(path).read_bytes()
            if raw[:5] != b"\x7fELF\x02":
                continue
            (offset,) = struct.unpack_from("<Q", raw, _PHOFF_AT)
            size, count = struct.unpack_from("<HH", raw, _PHSIZE_AT)
            segment_types = [
                struct.unpack_from("<I", raw, offset + n * size)[0] for n in range(count)
            ]
            if _PT_INTERP not in segment_types:
                return path
    return None


class UnitIdentity(msgspec.Struct, frozen=True):
    """The run of the unit that is the kernel's, and its boot; `started_at` since the epoch.

    `pid` is that of its main process, 0 if unknown.
    """

    invocation_id: str
    boot_id: str
    started_at: Annotated[float, msgspec.Meta(ge=0, le=LAST_SECOND)]
    pid: int = 0


class UnitEnd(msgspec.Struct, frozen=True):
    """The end of a unit according to systemd: `result`, and its process's `code` and `status`.

    `code` is `exited`, `killed` or `dumped`; `status` is a number or the name of a signal
    (systemd.exec(5), "Environment Variables Set or Propagated by the Service Manager").
    """

    result: str
    code: str
    status: str
    finished_at: float
    manager: str = "running"

    @property
    def is_by_unknown_signal(self) -> bool:
        """Whether a signal ended it, and the manager, which may have been stopping, did not say."""
        return self.code == "killed" and self.manager in ("", "offline", "unknown")

    @property
    def ending(self) -> Ending:
        """The ending in the terms of all runtimes."""
        return Ending(
            exit_code=_exit_code(self.code, self.status),
            oom_killed=self.result == "oom-kill",
            finished_at=self.finished_at,
            reason=NODE_RESTARTED if self.manager == "stopping" else "",
        )

    def to_text(self) -> str:
        """Format the end as systemd writes it."""
        return f"{self.result} {self.code} {self.status} {self.finished_at:.6f} {self.manager}\n"


class UnitBundle(PrivateFolder, frozen=True):
    """The folder beside one kernel's unit."""

    def create(self, record: str, env: Mapping[str, str]) -> None:
        """Create the folder.

        Raises:
            FileExistsError: something of that name exists.
            OSError: it cannot be created; the caller removes the remains.
        """
        self.path.parent.mkdir(mode=0o700, exist_ok=True)  # removed while agentd runs
        self.path.mkdir(mode=0o700)
        self.write(RECORD, record)
        self.write(ENVIRONMENT, "".join(f"{name}={quote_value(env[name])}\n" for name in env))

    def read_record(self) -> str:
        """Return the record.

        Raises:
            RecordError: it is missing (`MissingRecordError`), empty or unreadable.
        """
        return require_record(self.read(RECORD))

    def save_identity(self, identity: UnitIdentity) -> None:
        """Save which run of the unit is the kernel's."""
        self.replace(IDENTITY, msgspec.json.encode(identity).decode())

    def read_identity(self) -> UnitIdentity | None:
        """Return the run that is the kernel's, None if it is missing or unreadable."""
        return self.read_json(IDENTITY, UnitIdentity)

    def save_group(self, group: Path) -> None:
        """Save the id of the kernel's cgroup, unless it is saved.

        When a unit ends by itself, its cgroup is removed, and systemd creates another of the same
        name for `ExecStopPost=`, whose counters are zero.
        """
        with suppress(OSError):  # the unit has ended meanwhile
            if self.read(GROUP) is None:
                self.replace(GROUP, f"{group.stat().st_ino}\n")

    def save_end(self, end: UnitEnd) -> None:
        """Save how the kernel ended, unless it is saved."""
        if self.read(EXIT) is None:
            with suppress(OSError):  # systemd keeps it for the rest of this boot
                self.replace(EXIT, end.to_text())

    def read_end(self) -> UnitEnd | None:
        """Return how the kernel ended, None if that is missing or unreadable."""
        try:
            result, code, status, finished_at, manager = (
                (self.read(EXIT) or "").rstrip("\n").split(" ")
            )
            return UnitEnd(result, code, status, parse_time(float(finished_at)), manager)
        except MALFORMED:
            return None

    def save_usage(self, usage: Usage) -> None:
        """Save the usage at the end, unless it is saved."""
        if self.read(USAGE) is None:
            with suppress(OSError):
                self.replace(USAGE, msgspec.json.encode(usage).decode())

    def has_usage(self) -> bool:
        """Return whether the usage is saved."""
        return any(self.read(name) is not None for name in (USAGE, COUNTED))

    def read_usage(self) -> Usage:
        """Return the usage at the end, as far as it is known."""
        reported = self.read_json(USAGE, Usage) or UNKNOWN_USAGE
        counters = asdict(parse_usage_files(self.read(COUNTED) or ""))
        known_counters = {name: value for name, value in counters.items() if value is not None}
        return replace(reported, **known_counters)


def quote_value(value: str) -> str:
    """Quote a value for an EnvironmentFile=."""
    return '"' + "".join(f"\\{c}" if c in '\\"$`' else c for c in value) + '"'


def _exit_code(code: str, status: str) -> int | None:
    """Return an exit code; for a signal 128 plus its number, as in a shell."""
    if status.isdecimal():
        return int(status) + (0 if code == "exited" else 128)
    with suppress(KeyError):
        return 128 + signal.Signals[f"SIG{status}"]
    return None
