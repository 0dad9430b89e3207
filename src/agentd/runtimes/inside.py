"""Runs a command inside a kernel. A program of its own: `python -I -S inside.py`, as root.

Standard input is a socket. It takes an order (one line of JSON) with the command's three streams
over it, answers with one line (`{"pid": …}`, or why it did not start), then takes lines
(`{"signal": …}`) until the command has ended, which it says with its exit code. Whoever hangs up
ends the command.

The command gets what one process of the kernel has, and no more: its cgroups, namespaces, user,
limits, cores and capabilities. That process runs with no_new_privs, so none of it can have been
widened by the kernel itself.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
import termios

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
NAMESPACES = {
    "mnt": 0x00020000,
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "net": 0x40000000,
}
"""`CLONE_NEW…` of clone(2), by their names in `/proc/PID/ns`."""
CHUNK = 64 * 1024
LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


def main() -> None:
    """Start the command that the order describes, and stay until it has ended."""
    control = socket.socket(fileno=os.dup(0))
    order, streams = received(control)
    libc = ctypes.CDLL(None, use_errno=True)
    wakeup, told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    failed, failure = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        control.close()
        become(order, streams, libc, failure)
    os.close(failure)
    for stream in streams:
        os.close(stream)
    os.close(0)
    with open(failed, "rb") as file:
        why = file.read()  # ends as the command is executed
    answer = json.loads(why) if why else {"pid": pid}
    try:
        control.sendall(json.dumps(answer).encode() + b"\n")
    except OSError:
        pass
    stay(control, wakeup, pid)


def received(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Take the order, and the three streams."""
    data, streams, _, _ = socket.recv_fds(control, CHUNK, 3)
    while not data.endswith(b"\n"):
        if not (more := control.recv(CHUNK)):
            os._exit(1)  # whoever asked is gone
        data += more
    for stream in streams:
        os.set_inheritable(stream, False)
    return json.loads(data), streams


def stay(control: socket.socket, wakeup: int, pid: int) -> None:
    """Pass on signals until the command has ended, and say how."""
    poll, unread = select.poll(), b""
    poll.register(control, select.POLLIN)
    poll.register(wakeup, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if control.fileno() in ready:
            try:
                chunk = control.recv(CHUNK)
            except OSError:
                chunk = b""
            if not chunk:
                poll.unregister(control)
                end_session(pid)
            *lines, unread = (unread + chunk).split(b"\n")
            for line in lines:
                try:
                    os.killpg(pid, int(json.loads(line)["signal"]))
                except ProcessLookupError:
                    pass
        if wakeup in ready:
            os.read(wakeup, 4096)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                break
    code = os.waitstatus_to_exitcode(status)
    try:
        answer = {"exit_code": code if code >= 0 else 128 - code}
        control.sendall(json.dumps(answer).encode() + b"\n")
    except OSError:
        pass


def end_session(session: int) -> None:
    """Kill everything in a session; its leader has not been reaped, so the number is its own."""
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{int(name)}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[3]) == session:
                    os.kill(int(name), signal.SIGKILL)
        except (OSError, ValueError):
            continue


class Target:
    """What a process of the kernel has, as it is looked at before anything of it is taken over."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.pid = order["target"]
        self.pidfd = os.pidfd_open(self.pid)
        if start_time(self.pid) != order["start_time"]:
            raise ProcessLookupError(3, "its process has ended")
        self.status = status_of(self.pid)
        self.cores = os.sched_getaffinity(self.pid)
        self.namespaces = other_namespaces(self.pid)
        with open(f"/proc/{self.pid}/environ", "rb") as file:
            pairs = [item.partition(b"=") for item in file.read().split(b"\0") if b"=" in item]
        self.env = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
        self.env |= {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
        self.folder = os.readlink(f"/proc/{self.pid}/cwd")


def become(order: dict[str, Any], streams: list[int], libc: ctypes.CDLL, failure: int) -> None:
    """In the child: become the command."""
    step = "kernel"
    try:
        os.setsid()
        target = Target(order)
        step = "cgroup"
        for path in order["cgroup_procs"]:
            with open(path, "w") as file:
                file.write(str(os.getpid()))
        step = "cpus"
        os.sched_setaffinity(0, target.cores)
        step = "namespaces"
        if target.namespaces and libc.setns(target.pidfd, target.namespaces):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        step = "terminal"
        if order["tty"]:
            fcntl.ioctl(streams[0], termios.TIOCSCTTY, 0)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        step = "user"
        drop(target.status, libc)
        take_limits(target.pid)
        step = "working_dir"
        go_to(order["working_dir"], target.folder)
        reset_signals()
        step = "command"
        execute(order["command"], target.env | order["env"])
    except Exception as error:
        number = getattr(error, "errno", 0) or 0
        why = {"step": step, "errno": number, "why": str(error)}
        os.write(failure, json.dumps(why).encode())
    finally:
        os._exit(127)


def take_limits(pid: int) -> None:
    """Take a process's limits as its user, who may look at them, and may only lower our own."""
    for name in LIMITS:
        try:
            resource.setrlimit(
                getattr(resource, name), resource.prlimit(pid, getattr(resource, name))
            )
        except (OSError, ValueError):
            continue


def go_to(wanted: str | None, folder: str) -> None:
    """Enter the folder that was asked for, else the kernel's own, which may be gone."""
    if wanted:
        os.chdir(wanted)
        return
    try:
        os.chdir(folder)
    except OSError:
        os.chdir("/")


def reset_signals() -> None:
    """Have every signal do what it does by default."""
    signal.set_wakeup_fd(-1)
    for number in range(1, signal.NSIG):
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            pass
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def other_namespaces(target: int) -> int:
    """Return which namespaces of a process are not ours, as flags of setns(2)."""
    wanted = 0
    for name, flag in NAMESPACES.items():
        if os.readlink(f"/proc/{target}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"):
            wanted |= flag
    return wanted


def drop(status: dict[str, str], libc: ctypes.CDLL) -> None:
    """Take the user and the bounds of a process; nothing of root's is left after it."""
    uid, gid = int(status["Uid"].split()[1]), int(status["Gid"].split()[1])
    bounds = int(status["CapBnd"], 16)
    if os.geteuid() == 0:
        for capability in range(64):
            if not bounds >> capability & 1:
                libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        os.setgroups([int(group) for group in status["Groups"].split()])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if (os.geteuid(), os.getegid()) != (uid, gid):
        raise PermissionError(1, f"cannot become user {uid}")


def status_of(pid: int) -> dict[str, str]:
    """Return what stands in `/proc/PID/status`."""
    with open(f"/proc/{pid}/status") as file:
        pairs = [line.partition(":") for line in file]
    return {name: value.strip() for name, _, value in pairs}


def start_time(pid: int) -> int:
    """Return when a process started, in the machine's ticks since it booted."""
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def execute(command: list[str], env: dict[str, str]) -> None:
    """Become the command, found on its own PATH."""
    if "/" in command[0]:
        os.execve(command[0], command, env)
    failure: OSError = FileNotFoundError(2, "not found on PATH")
    for folder in env["PATH"].split(":"):
        try:
            os.execve(f"{folder or '.'}/{command[0]}", command, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            failure = error
    raise failure


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(1)
