"""Processes and cgroups that claims end with, by identities that are never used again.

The end of a process is its pidfd becoming readable: then its last thread is gone, while a zombie
leader in /proc may still have threads. The end of a cgroup is `populated 0` in cgroup.events, whose
changes the kernel announces by EPOLLPRI (Documentation/admin-guide/cgroup-v2.rst, "[Un]populated
Notification").
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

from agentd.core.claim.claim import CgroupHolder, ClaimOwner, ProcessHolder
from agentd.host.processes import NOT_THERE, opened, read_stat, read_uids
from agentd.procfs import read_lines
from agentd.services.claims.protocols import NoSuchHolder

_GONE = (errno.ENOENT, errno.ENODEV)
_CHANGED = select.EPOLLPRI | select.EPOLLET


class HostHolders:
    """The processes of agentd's pid namespace, and the cgroups below its cgroup namespace."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._changes: select.epoll | None = None
        self._groups: dict[int, Callable[[], None]] = {}

    def process(
        self, pid: int, start_time: int | None, *, caller_pid: int, caller_uid: int | None
    ) -> ProcessHolder:
        none = NoSuchHolder(f"no process {pid} of yours")
        if not (self._is_in_namespace(caller_pid) and self._is_in_namespace(pid)):
            raise none
        with suppress(ProcessLookupError), opened(pid):
            stat = read_stat(pid)
            is_named = start_time is not None or caller_pid in {pid, stat.parent if stat else 0}
            is_same = stat is not None and start_time in {None, stat.start_time}
            is_own = caller_uid is None or read_uids(pid) == {caller_uid}
            if stat is not None and is_named and is_same and is_own:
                return ProcessHolder(pid, stat.start_time)
        raise none

    def _is_in_namespace(self, pid: int) -> bool:
        """Return whether a process is in agentd's pid namespace: it has one id.

        See NSpid in proc_pid_status(5).
        """
        try:
            lines = (self._proc / str(pid) / "status").read_bytes().splitlines()
        except NOT_THERE:
            return False
        return any(len(line.split()) == 2 for line in lines if line.startswith(b"NSpid:"))  # noqa: PLR2004 - the member and one id

    def cgroup(
        self, path: str, kernel_pids: Collection[int], containers: Collection[str]
    ) -> CgroupHolder:
        root = self._root()
        if root is None:
            raise NoSuchHolder("this host has no cgroups of version 2")
        if not path.startswith("/") or set(path.split("/")[1:]) & {"", ".", ".."}:
            raise NoSuchHolder(f"no cgroup {path}: expected a path as in /proc/PID/cgroup")
        for pid in (os.getpid(), *kernel_pids):
            own = self._cgroup_of(pid)
            if own is not None and f"{own.rstrip('/')}/".startswith(f"{path}/"):
                raise NoSuchHolder(f"cgroup {path} holds agentd or a kernel")
        folder = Path(f"{root}{path}")
        try:
            inode = folder.stat().st_ino
            is_populated = _is_populated((folder / "cgroup.events").read_bytes())
        except OSError as error:
            raise NoSuchHolder(f"no cgroup {path}: {error.strerror}") from None
        if not is_populated:
            raise NoSuchHolder(f"cgroup {path} has no process")
        if containers and any(_names_one(containers, name) for name in _names_below(folder)):
            raise NoSuchHolder(f"cgroup {path} holds agentd or a kernel")
        return CgroupHolder(path, inode)

    def _root(self) -> Path | None:
        """Return where the hierarchy of version 2 is mounted (proc_pid_mountinfo(5))."""
        for line in read_lines(self._proc / "self/mountinfo"):
            mount, _, source = line.partition(" - ")
            if source.startswith("cgroup2 "):
                return Path(mount.split()[4])
        return None

    def _cgroup_of(self, pid: int) -> str | None:
        with suppress(*NOT_THERE):
            lines = read_lines(self._proc / str(pid) / "cgroup")
            return next((line[3:] for line in lines if line.startswith("0::")), None)
        return None

    def lives(self, holder: ClaimOwner) -> bool:
        match holder:
            case ProcessHolder(pid, start_time):
                with suppress(ProcessLookupError), opened(pid) as descriptor:
                    stat = read_stat(pid)
                    ended = select.poll()
                    ended.register(descriptor, select.POLLIN)
                    return stat is not None and stat.start_time == start_time and not ended.poll(0)
                return False
            case CgroupHolder(path, inode):
                folder = Path(f"{self._root()}{path}")
                with suppress(FileNotFoundError):
                    events = (folder / "cgroup.events").read_bytes()
                    return folder.stat().st_ino == inode and _is_populated(events)
                return False
        return True

    def watch(self, holder: ClaimOwner, ended: Callable[[], None]) -> Callable[[], None]:
        watched: Callable[[], None] | None = None
        match holder:
            case ProcessHolder():
                watched = _watch_process(holder, ended)
            case CgroupHolder():
                watched = self._watch_cgroup(holder, ended)
        if watched is None:
            handle = asyncio.get_running_loop().call_soon(ended)
            return handle.cancel
        return watched

    def _watch_cgroup(
        self, holder: CgroupHolder, ended: Callable[[], None]
    ) -> Callable[[], None] | None:
        """Observe a cgroup until it has no process; None if it has none, or is another one."""
        folder = Path(f"{self._root()}{holder.cgroup}")
        try:
            descriptor = os.open(folder / "cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise
        try:
            is_same = folder.stat().st_ino == holder.inode
            self._poller().register(descriptor, _CHANGED)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _GONE:
                return None
            raise
        if not is_same:
            os.close(descriptor)
            return None

        def stop() -> None:
            if self._groups.pop(descriptor, None) is not None:
                os.close(descriptor)

        def changed() -> None:
            if not _still_populated(descriptor):
                stop()
                ended()

        self._groups[descriptor] = changed
        asyncio.get_running_loop().call_soon(changed_if_watched, self._groups, descriptor)
        return stop

    def _poller(self) -> select.epoll:
        """Return what announces changes of cgroups; the loop itself asks for no EPOLLPRI."""
        if self._changes is None:
            self._changes = select.epoll()
            asyncio.get_running_loop().add_reader(self._changes, self._take_changes)
        return self._changes

    def _take_changes(self) -> None:
        for descriptor, _ in self._poller().poll(0):
            changed_if_watched(self._groups, descriptor)

    def close(self) -> None:
        """Stop observing cgroups."""
        if self._changes is not None:
            asyncio.get_running_loop().remove_reader(self._changes)
            self._changes.close()


def changed_if_watched(groups: dict[int, Callable[[], None]], descriptor: int) -> None:
    """Look at a cgroup again, if it is still observed."""
    if (changed := groups.get(descriptor)) is not None:
        changed()


def _names_below(folder: Path) -> Iterator[str]:
    """Yield the name of a cgroup and of all below it."""
    yield folder.name
    for _, names, _ in os.walk(folder):
        yield from names


def _names_one(containers: Collection[str], name: str) -> bool:
    """Return whether a cgroup is a container's: engines name it after the container's id."""
    return any(container in name for container in containers)


def _is_populated(events: bytes) -> bool:
    return b"populated 1" in events.splitlines()


def _still_populated(descriptor: int) -> bool:
    try:
        return _is_populated(os.pread(descriptor, 4096, 0))
    except OSError as error:
        return error.errno not in _GONE


def _watch_process(holder: ProcessHolder, ended: Callable[[], None]) -> Callable[[], None] | None:
    """Observe a process until it ends; None if it has."""
    try:
        descriptor = os.pidfd_open(holder.pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):
            return None
        raise
    try:
        stat = read_stat(holder.pid)
    except OSError:
        os.close(descriptor)
        raise
    if stat is None or stat.start_time != holder.start_time:
        os.close(descriptor)
        return None
    loop = asyncio.get_running_loop()

    def stop() -> None:
        nonlocal descriptor
        if descriptor >= 0:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            descriptor = -1

    def has_ended() -> None:
        stop()
        ended()

    loop.add_reader(descriptor, has_ended)
    return stop
