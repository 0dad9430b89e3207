"""What the kernel counts for a cgroup: processor time, memory, blocks, processes, network.

Files of v2: Documentation/admin-guide/cgroup-v2.rst; of v1: Documentation/admin-guide/cgroup-v1/
(cpuacct, memory, blkio-controller, pids). What has no file, or cannot be read, is not known.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentd.core.usage import Accounted, Usage

MOUNT = Path("/sys/fs/cgroup")
UNIFIED = ""
"""The name of the one hierarchy of v2, where v1 has one for each controller."""
COUNTED_V1 = ("memory", "cpuacct", "cpu", "blkio", "pids")
"""The controllers of v1 that count; the first one tells who is there."""
_NOWHERE = Path("/nonexistent")
_NO_LIMIT = 1 << 60
_MOST_BYTES = 1 << 20
_MOST_BELOW = 1000
"""Groups below a kernel's that are looked into; of one that made more, processes are not known."""
_NO_FOLDERS = 2
_FULL = 2048
"""Such files come by the page of 4,096 bytes: after less than half of one there is no more."""
_NANO, _MICRO = 1e9, 1e6
_counting: set[Path] = set()


@dataclass(frozen=True, slots=True)
class Account:
    """Where one kernel is counted: its folder in each hierarchy, by controller.

    One that `has_network` may have a network namespace of its own.
    """

    folders: Mapping[str, Path] = field(default_factory=dict)
    has_network: bool = False

    def counted(self) -> Accounted:
        """Return what is counted now, and for whom."""
        if not self.folders:
            return Accounted()
        unified = self.folders.get(UNIFIED)
        usage = _of_v2(unified) if unified is not None else _of_v1(self.folders)
        if self.has_network and (pid := self._somebody()) is not None:
            received, sent = _network(pid)
            usage = replace(usage, network_rx_bytes=received, network_tx_bytes=sent)
        return Accounted(usage, frozenset(self._paths()))

    def _somebody(self) -> int | None:
        folder = next(iter(self.folders.values()))
        return _number(f"{folder}/cgroup.procs")

    def _paths(self) -> Iterator[str]:
        for name, folder in self.folders.items():
            top = f"{MOUNT}/{name}" if name else str(MOUNT)
            if str(folder).startswith(top):
                yield f"{name}:{str(folder)[len(top) :]}"


def is_v2(root: Path = MOUNT) -> bool:
    """Tell whether this machine has the one hierarchy of v2 where limits hold."""
    return (root / "cgroup.controllers").exists()


def groups_of(pid: int) -> set[str]:
    """Return the cgroups of a process, each as a hierarchy and a path; none if it is gone.

    Their names are bytes, which whoever has a group of his own may choose.
    """
    found = set()
    with suppress(OSError, ValueError):
        for line in os.fsdecode(Path(f"/proc/{pid}/cgroup").read_bytes()).splitlines():
            number, names, path = line.split(":", 2)
            if number == "0":
                found.add(f"{UNIFIED}:{path}")
            found |= {f"{name}:{path}" for name in names.split(",") if name}
    return found


def account_of(pid: int, mark: str) -> Account:
    """Return where a process is counted; only groups whose path has `mark` in it are its own."""
    parts = (group.partition(":") for group in groups_of(pid))
    groups = {name: path for name, _, path in parts}
    names = (UNIFIED,) if is_v2() else COUNTED_V1
    return Account(
        {
            name: (MOUNT / name if name else MOUNT) / groups[name].lstrip("/")
            for name in names
            if mark in groups.get(name, "")
        }
    )


def _of_v2(folder: Path) -> Usage:
    cpu = _table(f"{folder}/cpu.stat")
    read, written = _blocks_v2(folder)
    return Usage(
        cpu_seconds=_seconds(cpu.get("usage_usec"), _MICRO),
        cpu_throttled_seconds=_seconds(cpu.get("throttled_usec"), _MICRO),
        memory_bytes=_number(f"{folder}/memory.current"),
        memory_peak_bytes=_number(f"{folder}/memory.peak"),
        memory_limit_bytes=_limit(f"{folder}/memory.max"),
        io_read_bytes=read,
        io_write_bytes=written,
        processes=_processes(folder),
    )


def _of_v1(folders: Mapping[str, Path]) -> Usage:
    memory = folders.get("memory", _NOWHERE)
    cpuacct, cpu = folders.get("cpuacct", _NOWHERE), folders.get("cpu", _NOWHERE)
    read, written = _blocks_v1(folders.get("blkio", _NOWHERE))
    return Usage(
        cpu_seconds=_seconds(_number(f"{cpuacct}/cpuacct.usage"), _NANO),
        cpu_throttled_seconds=_seconds(_table(f"{cpu}/cpu.stat").get("throttled_time"), _NANO),
        memory_bytes=_number(f"{memory}/memory.usage_in_bytes"),
        memory_peak_bytes=_number(f"{memory}/memory.max_usage_in_bytes"),
        memory_limit_bytes=_limit(f"{memory}/memory.limit_in_bytes"),
        io_read_bytes=read,
        io_write_bytes=written,
        processes=_processes(next(iter(folders.values()))),
    )


def _blocks_v2(folder: Path) -> tuple[int | None, int | None]:
    lines = _lines(f"{folder}/io.stat")
    if lines is None or not counts_blocks():
        return None, None
    pairs = [pair.partition("=") for line in lines for pair in line.split()[1:]]
    return (
        sum(int(value) for name, _, value in pairs if name == "rbytes"),
        sum(int(value) for name, _, value in pairs if name == "wbytes"),
    )


def _blocks_v1(folder: Path) -> tuple[int | None, int | None]:
    lines = _lines(f"{folder}/blkio.throttle.io_service_bytes")
    if lines is None or not counts_blocks():
        return None, None
    words = [line.split() for line in lines]
    return (
        sum(int(word[2]) for word in words if word[1:2] == ["Read"]),
        sum(int(word[2]) for word in words if word[1:2] == ["Write"]),
    )


def counts_blocks() -> bool:
    """Tell whether blocks are counted here at all: a machine that has a disk has read some.

    It is asked for every kernel, and what was counted once stays counted.
    """
    if MOUNT in _counting:
        return True
    v2 = _lines(f"{MOUNT}/io.stat") or ()
    v1 = _lines(f"{MOUNT}/blkio/blkio.throttle.io_service_bytes") or ()
    is_v1 = any(line.startswith("Total ") and not line.endswith(" 0") for line in v1)
    if is_v1 or any("rbytes" in line for line in v2):
        _counting.add(MOUNT)
    return MOUNT in _counting


def _processes(folder: Path) -> int | None:
    """Count processes, those in groups below too, as a kernel may make some."""
    lines = _lines(f"{folder}/cgroup.procs")
    if lines is None:
        return None
    count, below = len(lines), _groups_in(str(folder))
    for _ in range(_MOST_BELOW):
        if not below:
            return count
        group = below.pop()
        count += len(_lines(f"{group}/cgroup.procs") or ())
        below += _groups_in(group)
    return None


def _groups_in(folder: str) -> list[str]:
    """Return the groups in one; a folder without any has two names, its own and its `.`."""
    try:
        if Path(folder).stat().st_nlink == _NO_FOLDERS:
            return []
        return [entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _network(pid: int) -> tuple[int | None, int | None]:
    """Return what a process's network namespace received and sent, the loopback left out."""
    lines = _lines(f"/proc/{pid}/net/dev")
    if lines is None or _namespace(pid) in (None, _namespace("self")):
        return None, None
    rows = [line.partition(":") for line in lines[2:]]
    numbers = [row[2].split() for row in rows if row[0].strip() != "lo"]
    return sum(int(row[0]) for row in numbers), sum(int(row[8]) for row in numbers)


def _namespace(pid: int | str) -> str | None:
    with suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    return None


def _lines(file: str) -> list[str] | None:
    """Read a file of the kernel's; None if it is not there."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        content = chunk = os.read(descriptor, _MOST_BYTES)
        while len(chunk) >= _FULL:
            content += (chunk := os.read(descriptor, _MOST_BYTES))
        return content.decode("ascii").splitlines()
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


def _number(file: str) -> int | None:
    with suppress(ValueError, IndexError):
        return int((_lines(file) or [])[0])
    return None


def _seconds(count: int | None, unit: float) -> float | None:
    return None if count is None else count / unit


def _limit(file: str) -> int | None:
    number = _number(file)
    return None if number is None or number >= _NO_LIMIT else number


def _table(file: str) -> dict[str, int]:
    words: Iterable[list[str]] = (line.split() for line in _lines(file) or ())
    with suppress(ValueError):
        return {word[0]: int(word[1]) for word in words if len(word) > 1}
    return {}
