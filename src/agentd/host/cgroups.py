"""Memory limits for process kernels, by cgroup v1 or v2, where one can be written.

Kernel groups live in a folder at the top of the hierarchy, as those of the Docker Engine's
cgroupfs driver do, and not below the service's own group: kernels outlive the service, and a
v2 group that hands controllers down can hold no process (Documentation/admin-guide/cgroup-v2.rst,
"No Internal Process Constraint"), so the next daemon could not be started in it.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

_PARENT = "agentd-kernels"


@dataclass(frozen=True, slots=True)
class KernelGroup:
    """The cgroup of one kernel."""

    folder: Path

    @property
    def procs(self) -> Path:
        return self.folder / "cgroup.procs"

    @property
    def oom_file(self) -> Path:
        """Where the number of kills for want of memory stands."""
        v1 = self.folder / "memory.oom_control"
        return v1 if v1.exists() else self.folder / "memory.events"

    def members(self) -> set[int]:
        """Return the processes in it; none if it is not there."""
        try:
            return {int(pid) for pid in self.procs.read_text(encoding="ascii").split()}
        except (FileNotFoundError, ProcessLookupError):
            return set()

    async def remove(self) -> None:
        """Remove the group; one whose last process is still on its way out is waited for."""
        for _ in range(40):
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                await asyncio.sleep(0.025)
            else:
                return


@dataclass(frozen=True, slots=True)
class MemoryGroups:
    """Where groups are made, and which file takes the limit."""

    folder: Path
    limit_file: str

    def group(self, name: str) -> KernelGroup:
        """Return a group, which need not be there."""
        return KernelGroup(self.folder / name)

    def names(self) -> list[str]:
        """Return the names of all groups that are there."""
        return [path.name for path in self.folder.iterdir() if path.is_dir()]

    def create(self, group: KernelGroup, limit_bytes: int) -> None:
        """Make a group with a hard limit.

        Raises:
            OSError: the kernel refused.
        """
        group.folder.mkdir(exist_ok=True)
        (group.folder / self.limit_file).write_text(str(limit_bytes), encoding="ascii")


def find_memory_groups(root: Path = Path("/")) -> MemoryGroups | None:
    """Return a place for groups with memory limits; None where there is none to be written."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    controllers = {line.split(":", 2)[1] for line in lines}
    mount = root / "sys/fs/cgroup"
    try:
        if "memory" in controllers:
            return _writable(mount / "memory", "memory.limit_in_bytes")
        if "memory" in (mount / "cgroup.controllers").read_text(encoding="ascii").split():
            _hand_down(mount)
            return _writable(mount, "memory.max")
    except OSError:
        return None
    return None


def _writable(top: Path, limit_file: str) -> MemoryGroups:
    parent = top / _PARENT
    parent.mkdir(exist_ok=True)
    if limit_file == "memory.max":
        _hand_down(parent)
    probe = parent / f"probe-{os.getpid()}"
    probe.mkdir(exist_ok=True)
    try:
        (probe / limit_file).write_text(str(2**30), encoding="ascii")
    finally:
        probe.rmdir()
    return MemoryGroups(parent, limit_file)


def _hand_down(group: Path) -> None:
    control = group / "cgroup.subtree_control"
    if "memory" not in control.read_text(encoding="ascii").split():
        control.write_text("+memory", encoding="ascii")
