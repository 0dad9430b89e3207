"""The probe: cores and memory of this host that this process may use.

Sources: the affinity mask (sched_getaffinity(2)), /sys/devices/system/node for NUMA,
/sys/devices/system/cpu for physical cores, /proc/meminfo, and the memory limits of the
process's own cgroups, v1 and v2.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from agentd.core.devices import MEMORY, Device, DeviceId
from agentd.core.slots import CPU, MEM, ONE, SlotKind
from agentd.procfs import read_lines


class Host(msgspec.Struct, frozen=True):
    """The result of a probe: core -> NUMA node (None if unknown), and bytes of memory.

    `physical` names the physical core of each hardware thread, if known.
    """

    cores: dict[int, int | None]
    memory_bytes: int
    physical: dict[int, str] = {}

    def devices(self, cpus: int | None = None, memory_bytes: int | None = None) -> list[Device]:
        """Return the built-in devices, probed or declared; declared cores are all alike."""
        ids = sorted(self.cores)
        if cpus is not None:  # those that are missing are invented
            ids = [*ids, *(core for core in range(cpus) if core not in self.cores)][:cpus]
        cores = [
            Device(
                DeviceId(CPU, str(core)),
                f"cpu-{core}",
                CPU,
                SlotKind.COUNT,
                ONE,
                numa_node=self.cores.get(core),
                parent=self.physical.get(core) if cpus is None else None,
            )
            for core in ids
        ]
        size = self.memory_bytes if memory_bytes is None else memory_bytes
        return [*cores, Device(MEMORY, "mem-root", MEM, SlotKind.BYTES, size)]

    @property
    def real_cores(self) -> frozenset[str]:
        """Ids of the cores that a kernel can be pinned to."""
        return frozenset(str(core) for core in self.cores)


def is_port_free(address: str, protocol: str, port: int) -> bool:
    """Return whether no process listens on a port of this host; True if unknown."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    kind = socket.SOCK_DGRAM if protocol == "udp" else socket.SOCK_STREAM
    with socket.socket(family, kind) as probe:
        if kind == socket.SOCK_STREAM:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def probe(root: Path = Path("/")) -> Host:
    """Probe this host; `root` contains its /sys and /proc."""
    nodes = dict(_read_numa_nodes(root / "sys/devices/system/node"))
    cores = {core: nodes.get(core) for core in os.sched_getaffinity(0)}
    limits = [_read_total_memory(root), *_read_memory_limits(root)]
    physical = _read_physical_cores(root / "sys/devices/system/cpu", cores)
    return Host(cores, min(limits), physical)


def _read_physical_cores(folder: Path, cores: Iterable[int]) -> dict[int, str]:
    """Return the physical core of each hardware thread, as far as it is known.

    Core ids are unique within a package (Documentation/admin-guide/cputopology.rst).
    """
    physical_by_core = {}
    for core in cores:
        topology = folder / f"cpu{core}" / "topology"
        try:
            package, number = (
                int((topology / name).read_text(encoding="ascii"))
                for name in ("physical_package_id", "core_id")
            )
        except (OSError, ValueError):
            continue
        physical_by_core[core] = f"core-{package}-{number}"
    return physical_by_core


def _read_numa_nodes(folder: Path) -> Iterator[tuple[int, int]]:
    for path in folder.glob("node[0-9]*/cpulist"):
        node = int(path.parent.name.removeprefix("node"))
        for core in parse_cpu_list(path.read_text(encoding="ascii")):
            yield core, node


def numa_nodes(cores: Iterable[str], root: Path = Path("/")) -> list[int]:
    """Return the NUMA nodes of some cores, as far as they are known."""
    nodes = dict(_read_numa_nodes(root / "sys/devices/system/node"))
    return sorted({nodes[int(core)] for core in cores if int(core) in nodes})


def parse_cpu_list(text: str) -> list[int]:
    """Parse Linux's list format, `0-3,8` (Documentation/admin-guide/cputopology.rst)."""
    cores: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores += range(int(first), int(last or first) + 1)
    return cores


def _read_total_memory(root: Path) -> int:
    for line in read_lines(root / "proc/meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{root}proc/meminfo has no MemTotal")


def _read_memory_limits(root: Path) -> Iterator[int]:
    """Yield the memory limits of this process's cgroups and their ancestors."""
    try:
        lines = read_lines(root / "proc/self/cgroup")
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif controllers == "memory":
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        for ancestor in (folder, *folder.parents):
            with suppress(OSError, ValueError):
                yield int((ancestor / name).read_bytes())
            if ancestor == base:
                break


def derive_node_id(machine_id: Path = Path("/etc/machine-id")) -> str:
    """Return a node id that survives a change of the host name.

    The machine id is hashed with agentd's name, as machine-id(5) asks, so that it is not
    exposed.

    Raises:
        OSError: the host has no machine id.
    """
    text = machine_id.read_bytes().decode(errors="replace").strip()
    if text in ("", "uninitialized") or not text.isascii():
        raise OSError(f"{machine_id} has no machine id")
    return "node-" + hashlib.sha256(f"agentd:{text}".encode()).hexdigest()[:12]
