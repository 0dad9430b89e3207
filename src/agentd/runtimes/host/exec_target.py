"""Taking over the rights of a kernel's process, on both sides of the fork of `exec_program`."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import termios
from typing import Any

from agentd.runtimes.process.shim import (
    PR_SET_NO_NEW_PRIVS,
    execute,
    read_file,
    reset_host_limits,
    reset_signals,
    start_time,
)

PR_SET_PDEATHSIG, PR_CAPBSET_DROP = 1, 24
NAMESPACES = {
    "mnt": 0x00020000,
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "net": 0x40000000,
}
"""`CLONE_NEW…` flags of clone(2), by their names in `/proc/PID/ns`."""
LIMITS = {
    "Max cpu time": "CPU",
    "Max file size": "FSIZE",
    "Max data size": "DATA",
    "Max stack size": "STACK",
    "Max core file size": "CORE",
    "Max resident set": "RSS",
    "Max processes": "NPROC",
    "Max open files": "NOFILE",
    "Max locked memory": "MEMLOCK",
    "Max address space": "AS",
    "Max pending signals": "SIGPENDING",
    "Max msgqueue size": "MSGQUEUE",
    "Max nice priority": "NICE",
    "Max realtime priority": "RTPRIO",
    "Max realtime timeout": "RTTIME",
}
"""Names of limits in `/proc/PID/limits` (proc(5)) and in `resource`."""
LIMIT_COLUMN = 26
MAX_ENV = 4 << 20
READY = b"r"
"""The message for "root's rights are dropped" and "the command was let in"."""


def describe_failure(step: str, error: Exception) -> dict[str, Any]:
    """Return the failure of a step as JSON."""
    return {"step": step, "errno": getattr(error, "errno", 0) or 0, "why": str(error)}


class Target:
    """The rights of a process of the kernel, read while the process is pinned."""

    def __init__(self, pid: int, recorded_start: int, cgroup_procs: list[str]) -> None:
        """Read and check a process.

        Raises:
            OSError: the process has ended, or its rights cannot be handed on safely.
        """
        self.pidfd = os.pidfd_open(pid)
        if start_time(pid) != recorded_start:
            raise ProcessLookupError(3, "its process has ended")
        for path in cgroup_procs:
            if pid not in map(int, read_file(path).split()):
                raise ProcessLookupError(3, "its process has left it")
        if read_status(pid)["NoNewPrivs"] != "1":
            raise PermissionError(1, "its process could gain privileges")
        self.status = read_status(pid)  # it could not gain privileges before
        self.uid, self.gid = (int(self.status[name].split()[1]) for name in ("Uid", "Gid"))
        self.last_capability = int(read_file("/proc/sys/kernel/cap_last_cap"))
        self.cores = os.sched_getaffinity(pid)
        self.limits = read_limits(pid)
        self.niceness = os.getpriority(os.PRIO_PROCESS, pid)
        self.oom_score_adj = int(read_file(f"/proc/{pid}/oom_score_adj"))
        try:
            self._read_private(pid)
        except PermissionError:
            if os.geteuid() != 0:
                raise
            # Root of a container is not trusted to look at other users' processes
            # (CAP_SYS_PTRACE). The process's own user is.
            own_gid = os.getegid()
            os.setegid(self.gid)
            os.seteuid(self.uid)
            try:
                self._read_private(pid)
            finally:
                os.seteuid(0)
                os.setegid(own_gid)
        signal.pidfd_send_signal(self.pidfd, 0)  # still the same process

    def _read_private(self, pid: int) -> None:
        """Read what only the process's user may, and root that may trace it (ptrace(2))."""
        self.namespaces = differing_namespaces(pid)
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = [p.partition(b"=") for p in file.read(MAX_ENV).split(b"\0") if b"=" in p]
        self.env = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
        self.env |= {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
        self.folder = os.readlink(f"/proc/{pid}/cwd")
        for name in ("user", "pid"):
            # From a user namespace with all capabilities there is no way back.
            if os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"):
                raise PermissionError(1, f"its process is in a {name} namespace of its own")
        is_elsewhere = self.namespaces & NAMESPACES["mnt"]
        if not is_elsewhere and not os.path.samefile(f"/proc/{pid}/root", "/"):
            raise PermissionError(1, "its process has another root folder")


def find_target(request: dict[str, Any]) -> Target:
    """Return the first process of the kernel whose rights a command can take over.

    Raises:
        OSError: there is none.
    """
    failure: OSError = ProcessLookupError(3, "no process left")
    for pid, recorded_start in request["targets"]:
        try:
            return Target(pid, recorded_start, request["cgroup_procs"])
        except OSError as error:
            failure = error
    raise failure


def lend_streams(streams: list[int], target: Target, *, is_terminal: bool) -> None:
    """Allow the kernel's user to open the streams by name (/dev/stdout, /dev/tty)."""
    if os.geteuid() != 0:
        return
    if is_terminal:
        os.fchmod(streams[0], 0o620)  # while it is root's: later it would take CAP_FOWNER
    for stream in streams:
        os.fchown(stream, target.uid, target.gid)


def exec_as_target(
    request: dict[str, Any],
    target: Target,
    streams: list[int],
    libc: ctypes.CDLL,
    channels: tuple[int, int, int],
) -> None:
    """Drop rights in the child, wait to be let in, and execute the command."""
    messages, go, parent_pid = channels
    step = "kernel"
    try:
        os.setsid()
        reset_host_limits(max(0, target.oom_score_adj), max(0, target.niceness))
        step = "namespaces"
        if target.namespaces and libc.setns(target.pidfd, target.namespaces):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        step = "terminal"
        if request["tty"]:
            fcntl.ioctl(streams[0], termios.TIOCSCTTY, 0)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        step = "user"
        drop_rights(target, libc)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.write(messages, READY)
        if not os.read(go, 1) or os.getppid() != parent_pid:
            os._exit(127)
        step = "cpus"
        os.sched_setaffinity(0, target.cores)
        set_limits(target.limits)
        step = "working_dir"
        change_folder(request["working_dir"], target.folder)
        reset_signals()
        step = "command"
        execute(request["command"], target.env | request["env"])
    except Exception as error:
        os.write(messages, json.dumps(describe_failure(step, error)).encode())
    finally:
        os._exit(127)


def read_limits(pid: int) -> dict[int, tuple[int, int]]:
    """Return a process's soft and hard limits, by resource number."""
    limits = {}
    with open(f"/proc/{pid}/limits", errors="replace") as file:
        for line in file:
            if (name := LIMITS.get(line[:LIMIT_COLUMN].strip())) is not None:
                soft, hard = (
                    resource.RLIM_INFINITY if word == "unlimited" else int(word)
                    for word in line[LIMIT_COLUMN:].split()[:2]
                )
                limits[getattr(resource, f"RLIMIT_{name}")] = (soft, hard)
    return limits


def set_limits(limits: dict[int, tuple[int, int]]) -> None:
    """Set limits; lower limits of this process stay, since only root could raise them."""
    for number, limit in limits.items():
        hard = lower_limit(limit[1], resource.getrlimit(number)[1])
        resource.setrlimit(number, (lower_limit(limit[0], hard), hard))


def lower_limit(limit: int, other_limit: int) -> int:
    """Return the lower of two limits; either may be infinite."""
    return min(limit, other_limit, key=lambda value: (value == resource.RLIM_INFINITY, value))


def change_folder(requested: str | None, folder: str) -> None:
    """Change to the requested folder, or to the kernel's own, which may be gone."""
    if requested:
        os.chdir(requested)
        return
    try:
        os.chdir(folder)
    except OSError:
        os.chdir("/")


def differing_namespaces(target: int) -> int:
    """Return the namespaces of a process that differ from ours, as flags of setns(2)."""
    flags = 0
    for name, flag in NAMESPACES.items():
        if os.readlink(f"/proc/{target}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"):
            flags |= flag
    return flags


def drop_rights(target: Target, libc: ctypes.CDLL) -> None:
    """Switch to the user and bounds of a process; no right of root's remains."""
    if os.geteuid() == 0:
        bounds = int(target.status["CapBnd"], 16)
        if target.uid == 0:
            bounds &= int(target.status["CapPrm"], 16)
        excess = int(read_status("self")["CapBnd"], 16) & ~bounds
        for capability in range(target.last_capability + 1):
            if excess >> capability & 1 and libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
                raise PermissionError(1, "cannot drop capabilities that its process lacks")
        groups = [int(group) for group in target.status["Groups"].split()]
        if groups != os.getgroups():  # a user namespace may forbid to set any
            os.setgroups(groups)
        os.setresgid(target.gid, target.gid, target.gid)
        os.setresuid(target.uid, target.uid, target.uid)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise PermissionError(1, "cannot set no_new_privs")
    if (os.geteuid(), os.getegid()) != (target.uid, target.gid):
        raise PermissionError(1, f"cannot become user {target.uid}")


def read_status(pid: int | str) -> dict[str, str]:
    """Return the fields of `/proc/PID/status`."""
    with open(f"/proc/{pid}/status", errors="replace", newline="\n") as file:
        pairs = [line.partition(":") for line in file]
    return {name: value.strip() for name, _, value in pairs}


def read_stat_fields(pid: int) -> list[bytes]:
    """Return the fields of `/proc/PID/stat` after the name, beginning with the state."""
    return read_file(f"/proc/{pid}/stat").rpartition(b")")[2].split()
