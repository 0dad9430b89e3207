"""Processes and cgroups that claims end with, by identities that are never used again.

The end of a process is its pidfd becoming readable: then its last thread is gone, while a zombie
leader in /proc may still have threads. The end of a cgroup is `populated 0` in cgroup.events, whose
changes the kernel announces by EPOLLPRI (Documentation/admin-guide/cgroup-v2.rst, "[Un]populated
Notification").
"""

from __future__ import annotations

import asyncio
import os
import resource
import select
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from agentd.core.claim.claim import CgroupHolder, ClaimHolder, ProcessHolder
from agentd.host.processes import NO_PROCESS_ERRORS, open_pidfd, read_stat
from agentd.os_errors import OsErrorKind, os_error_kind
from agentd.procfs import read_lines, read_uids

_RECHECK_S = 0.1
"""Seconds from the start or an event to one more check.

Linux defers a notification that follows the last one within 10 ms, and drops it if the cgroup is
removed meanwhile (`CGROUP_FILE_NOTIFY_MIN_INTV` in kernel/cgroup/cgroup.c).
"""
_EDGE_EVENTS = select.EPOLLPRI | select.EPOLLET


def max_process_holders() -> int:
    """Return the maximum of processes that claims end with: half of the file descriptors."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


class NoSuchHolder(Exception):
    """A process or cgroup that is not there, or not the caller's to name."""


class HolderObserver:
    """The processes of agentd's pid namespace, and the cgroups below its cgroup namespace."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def find_process(
        self, pid: int, start_time: int | None, *, caller_pid: int, caller_uid: int | None
    ) -> ProcessHolder:
        """Return a process that a caller names; `caller_uid` None may name any.

        Without a start time it is the caller itself, or a child of it.

        Raises:
            NoSuchHolder: there is none, or it is not the caller's to name.
        """
        no_such_process = NoSuchHolder(f"no process {pid} of yours")
        if not (self._is_in_namespace(caller_pid) and self._is_in_namespace(pid)):
            raise no_such_process
        with suppress(ProcessLookupError), open_pidfd(pid):
            stat = read_stat(pid)
            may_name = start_time is not None or caller_pid in {pid, stat.parent if stat else 0}
            is_same_process = stat is not None and start_time in {None, stat.start_time}
            is_own = caller_uid is None or read_uids(pid) == {caller_uid}
            if stat is not None and may_name and is_same_process and is_own:
                return ProcessHolder(pid, stat.start_time)
        raise no_such_process

    def _is_in_namespace(self, pid: int) -> bool:
        """Return whether a process is in agentd's pid namespace: it has one id.

        See NSpid in proc_pid_status(5).
        """
        try:
            lines = read_lines(self._proc / str(pid) / "status")
        except NO_PROCESS_ERRORS:
            return False
        return any(len(line.split()) == 2 for line in lines if line.startswith("NSpid:"))  # noqa: PLR2004 - the member and one id

    def find_cgroup(
        self, path: str, kernel_pids: Collection[int], containers: Collection[str]
    ) -> CgroupHolder:
        """Return a cgroup of version 2 that has processes, by its path in agentd's namespace.

        `kernel_pids` are first processes of kernels, `containers` ids of their containers.

        Raises:
            NoSuchHolder: there is none, it has no process, or it holds agentd or a kernel.
        """
        root = self._find_mount()
        if root is None:
            raise NoSuchHolder("this host has no cgroups of version 2")
        if not path.startswith("/") or set(path.split("/")[1:]) & {"", ".", ".."}:
            raise NoSuchHolder(f"no cgroup {path}: expected a path as in /proc/PID/cgroup")
        for pid in (os.getpid(), *kernel_pids):
            protected = self._read_cgroup(pid)
            if protected is not None and f"{protected.rstrip('/')}/".startswith(f"{path}/"):
                raise NoSuchHolder(f"cgroup {path} holds agentd or a kernel")
        folder = Path(f"{root}{path}")
        try:
            inode = folder.stat().st_ino
            is_populated = _is_populated((folder / "cgroup.events").read_bytes())
        except OSError as error:
            raise NoSuchHolder(f"no cgroup {path}: {error.strerror}") from None
        if not is_populated:
            raise NoSuchHolder(f"cgroup {path} has no process")
        below = _names_below(folder) if containers else ()
        if any(container in name for name in below for container in containers):
            raise NoSuchHolder(f"cgroup {path} holds agentd or a kernel")
        return CgroupHolder(path, inode)

    def _find_mount(self) -> Path | None:
        """Return where the hierarchy of version 2 is mounted (proc_pid_mountinfo(5))."""
        for line in read_lines(self._proc / "self/mountinfo"):
            mount, _, source = line.partition(" - ")
            if source.startswith("cgroup2 "):
                return Path(mount.split()[4])
        return None

    def _read_cgroup(self, pid: int) -> str | None:
        with suppress(*NO_PROCESS_ERRORS):
            lines = read_lines(self._proc / str(pid) / "cgroup")
            return next((line[3:] for line in lines if line.startswith("0::")), None)
        return None

    def is_alive(self, holder: ClaimHolder) -> bool:
        """Return whether a holder is not proved to have ended."""
        if not isinstance(holder, (ProcessHolder, CgroupHolder)):
            return True
        with suppress(OSError), ExitStack() as stack:
            source = self._open(holder, stack)
            return source is not None and not source.has_ended()
        return True

    def watch(self, holder: ClaimHolder, on_end: Callable[[], None]) -> Callable[[], None]:
        """Call `on_end` once when a process or cgroup has ended, at once if it has; return a stop.

        Raises:
            OSError: it cannot be observed now.
        """
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            source = self._open(holder, stack)
            if source is None:
                return loop.call_soon(on_end).cancel
            watch = stack.pop_all()

        def check() -> None:
            if source.has_ended():
                watch.close()
                on_end()

        def check_twice() -> None:
            checks.pop().cancel()
            checks.append(loop.call_later(_RECHECK_S, check))
            check()

        loop.add_reader(source.descriptor, check_twice)
        watch.callback(loop.remove_reader, source.descriptor)
        checks: list[asyncio.Handle] = [loop.call_soon(check_twice)]  # it may have ended before
        watch.callback(lambda: checks.pop().cancel())
        return watch.close

    def _open(self, holder: ClaimHolder, stack: ExitStack) -> _EndSource | None:
        """Open the source of a holder's end, None if it has ended; `stack` closes it.

        Raises:
            OSError: it cannot be observed now.
        """
        try:
            match holder:
                case ProcessHolder(pid, start_time):
                    return _open_process(pid, start_time, stack)
                case CgroupHolder(path, inode):
                    return _open_cgroup(Path(f"{self._find_mount()}{path}"), inode, stack)
        except OSError as error:
            if os_error_kind(error) is not OsErrorKind.GONE:
                raise
        return None


class _EndSource(msgspec.Struct, frozen=True):
    """A descriptor that becomes readable when a holder may have ended."""

    descriptor: int
    has_ended: Callable[[], bool]


def _open_process(pid: int, start_time: int, stack: ExitStack) -> _EndSource | None:
    descriptor = stack.enter_context(open_pidfd(pid))
    stat = read_stat(pid)
    if stat is None or stat.start_time != start_time:
        return None
    readable = select.poll()
    readable.register(descriptor, select.POLLIN)
    return _EndSource(descriptor, lambda: bool(readable.poll(0)))


def _open_cgroup(folder: Path, inode: int, stack: ExitStack) -> _EndSource | None:
    """Open a cgroup; the event loop itself does not ask for EPOLLPRI."""
    events = os.open(folder / "cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, events)
    changes = stack.enter_context(select.epoll())
    changes.register(events, _EDGE_EVENTS)
    if folder.stat().st_ino != inode:
        return None

    def has_ended() -> bool:
        changes.poll(0)  # until the next change it is not readable
        return not _still_populated(events)

    return _EndSource(changes.fileno(), has_ended)


def _names_below(folder: Path) -> Iterator[str]:
    """Yield the names of a cgroup and all below it; engines name theirs after containers' ids."""
    yield folder.name
    for _, names, _ in os.walk(folder):
        yield from names


def _is_populated(events: bytes) -> bool:
    return b"populated 1" in events.splitlines()


def _still_populated(descriptor: int) -> bool:
    try:
        return _is_populated(os.pread(descriptor, 4096, 0))
    except OSError as error:
        return os_error_kind(error) is not OsErrorKind.GONE
