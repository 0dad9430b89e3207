"""Counters of cgroups: processor time, memory, blocks, processes and network.

Files of v2: Documentation/admin-guide/cgroup-v2.rst; of v1: Documentation/admin-guide/cgroup-v1/
(cpuacct, memory, blkio-controller, pids). A missing or unreadable file means unknown.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from agentd.core.kernel.usage import Usage, UsageReading
from agentd.procfs import read_lines

MOUNT = Path("/sys/fs/cgroup")
UNIFIED = ""
"""The name of v2's single hierarchy; v1 has one for each controller."""
COUNTING_CONTROLLERS_V1 = ("memory", "cpuacct", "cpu", "blkio", "pids")
"""The counting controllers of v1; the first one lists the members."""
_NOWHERE = "/nonexistent"
_NO_LIMIT = 1 << 60
_MAX_SUBGROUPS = 1000
"""Maximum groups below a kernel's that are read; beyond it the number of processes is unknown."""
_NANO, _MICRO = 1e9, 1e6


class CgroupCounters(msgspec.Struct, frozen=True):
    """The folders of one kernel's counters, by hierarchy or controller.

    One that `has_network` may have a network namespace of its own.
    """

    folders: Mapping[str, str] = {}
    has_network: bool = False

    @property
    def groups(self) -> frozenset[str]:
        """The folders as hierarchies and paths, like `UsageReading.groups`."""
        tops = [(name, f"{MOUNT / name}", folder) for name, folder in self.folders.items()]
        return frozenset(
            f"{name}:{folder.removeprefix(top)}"
            for name, top, folder in tops
            if folder.startswith(top)
        )


def read_usages(counters_by_kernel: Mapping[str, CgroupCounters]) -> dict[str, UsageReading]:
    """Return the current counters and cgroups of each kernel."""
    has_blocks = has_block_counters()
    return {
        name: _read_usage(counters, has_blocks) for name, counters in counters_by_kernel.items()
    }


def _read_usage(counters: CgroupCounters, has_blocks: bool) -> UsageReading:  # noqa: FBT001 - of the machine
    if not counters.folders:
        return UsageReading()
    unified = counters.folders.get(UNIFIED)
    usage = _read_v1(counters.folders) if unified is None else _read_v2(unified)
    if not has_blocks:
        usage = replace(usage, io_read_bytes=None, io_write_bytes=None)
    if counters.has_network and (
        processes := _read_lines(f"{next(iter(counters.folders.values()))}/cgroup.procs")
    ):
        received, sent = _read_network(int(processes[0]))
        usage = replace(usage, network_rx_bytes=received, network_tx_bytes=sent)
    return UsageReading(usage, counters.groups)


def parse_usage_files(text: str) -> Usage:
    """Parse the concatenated files `cpu.stat`, `io.stat` and `memory.peak` (v2)."""
    lines = text.splitlines()
    cpu = _parse_pairs(lines)
    read, written = _sum_blocks(lines if "rbytes=" in text else None)
    return Usage(
        cpu_seconds=_seconds(cpu.get("usage_usec"), _MICRO),
        cpu_throttled_seconds=_seconds(cpu.get("throttled_usec"), _MICRO),
        memory_peak_bytes=next((int(line) for line in lines if line.isdecimal()), None),
        io_read_bytes=read,
        io_write_bytes=written,
    )


def read_cgroups(pid: int) -> set[str]:
    """Return the cgroups of a process as hierarchies and paths, none if it has ended.

    Names are bytes, chosen by the owner of a group.
    """
    groups = set()
    with suppress(OSError, ValueError):
        for line in read_lines(f"/proc/{pid}/cgroup"):
            hierarchy, controllers, path = line.split(":", 2)
            if hierarchy == "0":
                groups.add(f"{UNIFIED}:{path}")
            groups |= {f"{name}:{path}" for name in controllers.split(",") if name}
    return groups


def find_counters(pid: int, mark: str) -> CgroupCounters:
    """Return the counters of a process, only of groups whose path contains `mark`."""
    parts = (group.partition(":") for group in read_cgroups(pid))
    groups = {name: path for name, _, path in parts}
    names = (UNIFIED,) if (MOUNT / "cgroup.controllers").exists() else COUNTING_CONTROLLERS_V1
    return CgroupCounters(
        {
            name: f"{MOUNT / name / groups[name].lstrip('/')}"
            for name in names
            if mark in groups.get(name, "")
        }
    )


def _read_v2(folder: str) -> Usage:
    cpu = _read_pairs(f"{folder}/cpu.stat")
    read, written = _sum_blocks(_read_lines(f"{folder}/io.stat"))
    return Usage(
        cpu_seconds=_seconds(cpu.get("usage_usec"), _MICRO),
        cpu_throttled_seconds=_seconds(cpu.get("throttled_usec"), _MICRO),
        memory_bytes=_read_number(f"{folder}/memory.current"),
        memory_peak_bytes=_read_number(f"{folder}/memory.peak"),
        memory_limit_bytes=_read_limit(f"{folder}/memory.max"),
        io_read_bytes=read,
        io_write_bytes=written,
        processes=_count_processes(folder),
    )


def _read_v1(folders: Mapping[str, str]) -> Usage:
    memory = folders.get("memory", _NOWHERE)
    cpuacct, cpu = folders.get("cpuacct", _NOWHERE), folders.get("cpu", _NOWHERE)
    read, written = _read_blocks_v1(folders.get("blkio", _NOWHERE))
    return Usage(
        cpu_seconds=_seconds(_read_number(f"{cpuacct}/cpuacct.usage"), _NANO),
        cpu_throttled_seconds=_seconds(_read_pairs(f"{cpu}/cpu.stat").get("throttled_time"), _NANO),
        memory_bytes=_read_number(f"{memory}/memory.usage_in_bytes"),
        memory_peak_bytes=_read_number(f"{memory}/memory.max_usage_in_bytes"),
        memory_limit_bytes=_read_limit(f"{memory}/memory.limit_in_bytes"),
        io_read_bytes=read,
        io_write_bytes=written,
        processes=_count_processes(next(iter(folders.values()))),
    )


def _sum_blocks(lines: Iterable[str] | None) -> tuple[int | None, int | None]:
    """Sum the bytes read and written of all disks in `io.stat`."""
    if lines is None:
        return None, None
    pairs = [pair.partition("=") for line in lines for pair in line.split()[1:]]
    return (
        sum(int(value) for name, _, value in pairs if name == "rbytes"),
        sum(int(value) for name, _, value in pairs if name == "wbytes"),
    )


def _read_blocks_v1(folder: str) -> tuple[int | None, int | None]:
    lines = _read_lines(f"{folder}/blkio.throttle.io_service_bytes")
    if lines is None:
        return None, None
    words = [line.split() for line in lines]
    return (
        sum(int(word[2]) for word in words if word[1:2] == ["Read"]),
        sum(int(word[2]) for word in words if word[1:2] == ["Write"]),
    )


def has_block_counters() -> bool:
    """Return whether this host counts blocks at all: every host with a disk has read some."""
    v2 = _read_lines(f"{MOUNT}/io.stat") or ()
    v1 = _read_lines(f"{MOUNT}/blkio/blkio.throttle.io_service_bytes") or ()
    is_v1 = any(line.startswith("Total ") and not line.endswith(" 0") for line in v1)
    return is_v1 or any("rbytes" in line for line in v2)


def _count_processes(folder: str) -> int | None:
    """Count processes, including those of nested groups that a kernel may create."""
    members = _read(f"{folder}/cgroup.procs")
    if members is None:
        return None
    count, pending = members.count(b"\n"), _list_subgroups(folder)
    for _ in range(_MAX_SUBGROUPS):
        if not pending:
            return count
        group = pending.pop()
        count += (_read(f"{group}/cgroup.procs") or b"").count(b"\n")
        pending += _list_subgroups(group)
    return None


def _list_subgroups(folder: str) -> list[str]:
    """Return the groups in a group."""
    try:
        return [entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _read_network(pid: int) -> tuple[int | None, int | None]:
    """Return the bytes received and sent in a process's network namespace, without loopback."""
    lines = _read_lines(f"/proc/{pid}/net/dev")
    if lines is None or _namespace(pid) in (None, _namespace("self")):
        return None, None
    rows = [line.partition(":") for line in lines[2:]]
    numbers = [row[2].split() for row in rows if row[0].strip() != "lo"]
    return sum(int(row[0]) for row in numbers), sum(int(row[8]) for row in numbers)


def _namespace(pid: int | str) -> str | None:
    with suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    return None


def _read(file: str) -> bytes | None:
    """Read a file of Linux; None if it is missing or unreadable."""
    try:
        with open(file, "rb") as stream:  # noqa: PTH123 - called for thousands
            return stream.read()
    except OSError:
        return None


def _read_lines(file: str) -> list[str] | None:
    with suppress(OSError):
        return read_lines(file)
    return None


def _read_number(file: str) -> int | None:
    with suppress(ValueError):
        return int(_read(file) or b"")
    return None


def _seconds(count: int | None, unit: float) -> float | None:
    return None if count is None else count / unit


def _read_limit(file: str) -> int | None:
    number = _read_number(file)
    return None if number is None or number >= _NO_LIMIT else number


def _read_pairs(file: str) -> dict[str, int]:
    return _parse_pairs(_read_lines(file) or ())


def _parse_pairs(lines: Iterable[str]) -> dict[str, int]:
    words = (line.split() for line in lines)
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdecimal()}
