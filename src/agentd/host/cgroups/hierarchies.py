"""Cgroups for process kernels, v1 or v2, where agentd can create them.

They live in a folder of agentd's own at the top of each hierarchy, like those of the Docker
Engine's cgroupfs driver, and not below the service's own group: kernels outlive the service, and a
v2 group that delegates controllers cannot hold processes
(Documentation/admin-guide/cgroup-v2.rst, "No Internal Process Constraint").

A group is identified by its full path: a user with a delegated subtree can create groups of any
name there, but none here. Attributes are stored as `trusted.*`, which only root can set (xattr(7)).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from agentd.host.cgroups.usage import UNIFIED, CgroupCounters
from agentd.os_errors import OsErrorKind, os_error_kind
from agentd.procfs import read_lines

_PARENT = "agentd-kernels"
_ATTRIBUTE = "trusted.agentd."
_REMOVE_TRIES, _REMOVE_PAUSE_S = 40, 0.025

MEMORY, PIDS = "memory", "pids"
"""The controllers with limits: bytes of memory and number of processes."""

COUNTING_CONTROLLERS = frozenset({"cpuacct", "blkio", "io"})
"""Controllers that only count: processor time of v1 (v2 always counts it), and blocks."""

_LIMIT_FILES: Mapping[int, Mapping[str, tuple[str, ...]]] = {
    1: {MEMORY: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), PIDS: ("pids.max",)},
    2: {MEMORY: ("memory.max",), PIDS: ("pids.max",)},
}
_NO_SWAP = ("memory.swap.max", "memory.swappiness")
"""Swap limits of v2 and v1, set to 0; v1 needs one unless Linux counts swap."""


class Hierarchy(msgspec.Struct, frozen=True):
    """A folder for groups, and the controllers that work there."""

    folder: Path
    version: int
    controllers: frozenset[str]
    keeps_attributes: bool
    """Whether `trusted.*` attributes can be set there; needs CAP_SYS_ADMIN."""
    is_writable: bool = True
    """Whether groups can be created there."""


class Cgroup(msgspec.Struct, frozen=True):
    """The cgroup of one kernel: a folder in each hierarchy.

    In a hierarchy of v1 that became writable after the kernel began, it has none.
    """

    folders: tuple[Path, ...]

    @property
    def procs_files(self) -> list[Path]:
        """The files that take the id of a process to be added."""
        return [folder / "cgroup.procs" for folder in self.folders]

    @property
    def oom_file(self) -> Path:
        """The file that counts out-of-memory kills."""
        for name in ("memory.oom_control", "memory.events"):
            for folder in self.folders:
                if (folder / name).exists():
                    return folder / name
        return self.folders[0] / "memory.events"

    def exists(self) -> bool:
        """Return whether the group is known to exist."""
        return any(folder.exists() for folder in self.folders)

    def members(self) -> set[int]:
        """Return the member processes, none if the group does not exist.

        Raises:
            OSError: a temporary failure.
        """
        pids: set[int] = set()
        for file in self.procs_files:
            try:
                pids |= {int(pid) for pid in read_lines(file)}
            except OSError as error:
                if os_error_kind(error) is not OsErrorKind.GONE:
                    raise
        return pids

    def kill(self) -> None:
        """Kill all members at once, if Linux supports it (v2, since Linux 5.14) and permits it."""
        with suppress(OSError):  # without O_CREAT: v1 has no such file
            descriptor = os.open(self.folders[0] / "cgroup.kill", os.O_WRONLY | os.O_CLOEXEC)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write("1")

    def attribute(self, name: str) -> str:
        """Return an attribute, empty if it is missing or unsupported."""
        for folder in self.folders:
            with suppress(OSError):
                return os.getxattr(folder, _ATTRIBUTE + name).decode(errors="replace")
        return ""

    async def remove(self) -> None:
        """Remove the group, waiting briefly for its last process to exit."""
        for folder in self.folders:
            for _ in range(_REMOVE_TRIES):
                try:
                    folder.rmdir()
                except OSError as error:
                    if os_error_kind(error) in (OsErrorKind.GONE, OsErrorKind.DISK):
                        break
                    await asyncio.sleep(_REMOVE_PAUSE_S)


class Cgroups(msgspec.Struct, frozen=True):
    """The hierarchies in which this host has kernel groups."""

    hierarchies: tuple[Hierarchy, ...]

    @property
    def controllers(self) -> frozenset[str]:
        """The controllers with limits for new groups."""
        writable = (item.controllers for item in self.hierarchies if item.is_writable)
        return frozenset[str]().union(*writable)

    @property
    def is_writable(self) -> bool:
        """Whether groups can be created."""
        return self.hierarchies[0].is_writable

    @property
    def keeps_attributes(self) -> bool:
        """Whether groups can have attributes."""
        return self.hierarchies[0].keeps_attributes

    def group(self, name: str) -> Cgroup:
        """Return a group, which need not exist."""
        return Cgroup(tuple(item.folder / name for item in self.hierarchies))

    def counters(self, name: str) -> CgroupCounters:
        """Return the counters of a group."""
        return CgroupCounters(
            {
                UNIFIED if item.version != 1 else controller: f"{item.folder}/{name}"
                for item in self.hierarchies
                for controller in sorted(item.controllers)
            }
        )

    def names(self) -> list[str]:
        """Return the names of all existing groups."""
        existing: set[str] = set()
        for hierarchy in self.hierarchies:
            with suppress(FileNotFoundError):
                existing |= {path.name for path in hierarchy.folder.iterdir() if path.is_dir()}
        return sorted(existing)

    def create(
        self, group: Cgroup, limits: Mapping[str, int], attributes: Mapping[str, str]
    ) -> None:
        """Create a group with limits by controller; attributes are set if permitted.

        Raises:
            OSError: Linux refused.
        """
        for hierarchy, folder in zip(self.hierarchies, group.folders, strict=True):
            folder.mkdir(parents=True, exist_ok=True)
            for controller in hierarchy.controllers & limits.keys():
                for name in _LIMIT_FILES[hierarchy.version][controller]:
                    _write(folder / name, str(limits[controller]), name.startswith("memory.memsw"))
            if MEMORY in hierarchy.controllers:
                for name in _NO_SWAP:
                    _write(folder / name, "0", may_miss=True)
        if self.keeps_attributes:
            for name, value in attributes.items():
                os.setxattr(group.folders[0], _ATTRIBUTE + name, value.encode())


def _write(file: Path, text: str, may_miss: bool = False) -> None:  # noqa: FBT001, FBT002 - of two kinds
    if not may_miss or file.exists():
        file.write_text(text, encoding="ascii")


def find_existing_cgroups(root: Path = Path("/")) -> Cgroups | None:
    """Return the hierarchies with existing groups, without creating anything; None if none."""
    hierarchies = [
        Hierarchy(mount / _PARENT, version, controllers, False, is_writable=False)
        for mount, version, controllers in _find_mounts(root)
        if (mount / _PARENT).is_dir()
    ]
    return Cgroups(tuple(hierarchies)) if hierarchies else None


def find_cgroups(root: Path = Path("/")) -> Cgroups | None:
    """Return the hierarchies in which groups can have limits, None if there is none."""
    mounts = _find_mounts(root)
    candidates = [
        _prepare_hierarchy(top, version, controllers) for top, version, controllers in mounts
    ]
    hierarchies = tuple(item for item in candidates if item is not None and item.controllers)
    has_limits = any(item.controllers - COUNTING_CONTROLLERS for item in hierarchies)
    return Cgroups(hierarchies) if has_limits else None


def _find_mounts(root: Path) -> list[tuple[Path, int, frozenset[str]]]:
    """Return each hierarchy with its version and the controllers used there."""
    try:
        lines = read_lines(root / "proc/self/cgroup")
    except OSError:
        return []
    mount = root / "sys/fs/cgroup"
    on_v1 = {name for line in lines for name in line.split(":", 2)[1].split(",")}
    names = [name for name in (MEMORY, PIDS, *sorted(COUNTING_CONTROLLERS)) if name in on_v1]
    if on_v1 & {MEMORY, PIDS}:
        return [(mount / name, 1, frozenset({name})) for name in names]
    return [(mount, 2, frozenset({MEMORY, PIDS, *COUNTING_CONTROLLERS}))]


def _prepare_hierarchy(top: Path, version: int, controllers: frozenset[str]) -> Hierarchy | None:
    """Create agentd's folder in a hierarchy; return it with its working controllers."""
    parent = top / _PARENT
    try:
        if version != 1:
            controllers &= frozenset(
                (top / "cgroup.controllers").read_text(errors="replace").split()
            )
            controllers = _delegate(top, controllers)
        parent.mkdir(mode=0o755, exist_ok=True)
        if version != 1:
            controllers = _delegate(parent, controllers)
        probe = parent / f"probe-{os.getpid()}"
        probe.mkdir(exist_ok=True)
        try:
            for controller in controllers - COUNTING_CONTROLLERS:
                _write(probe / _LIMIT_FILES[version][controller][0], str(2**20))
            keeps_attributes = _supports_attributes(probe)
        finally:
            probe.rmdir()
    except OSError:
        return None
    return Hierarchy(parent, version, controllers, keeps_attributes)


def _supports_attributes(folder: Path) -> bool:
    try:
        os.setxattr(folder, f"{_ATTRIBUTE}probe", b"1")
    except OSError:
        return False
    return True


def _delegate(group: Path, controllers: frozenset[str]) -> frozenset[str]:
    """Delegate controllers to the groups below, even if a counting one fails; return them."""
    control = group / "cgroup.subtree_control"
    missing = controllers - set(control.read_text(errors="replace").split())
    for part in (missing - COUNTING_CONTROLLERS, missing & COUNTING_CONTROLLERS):
        try:
            if part:
                control.write_text(" ".join(f"+{name}" for name in sorted(part)), encoding="ascii")
        except OSError:
            if not part <= COUNTING_CONTROLLERS:
                raise
            controllers -= part
    return controllers
