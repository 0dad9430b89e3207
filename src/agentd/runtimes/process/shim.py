"""The keeper of one process kernel. Run as a program of its own: `python -I -S shim.py`.

It reads its order as JSON from standard input, starts the command, and answers with one
line of JSON: the command's pid and start time, or why it did not start. It outlives the
daemon, and waits until nothing of the kernel is left (as a subreaper, so that what
the command started and left behind counts), and only then writes how it ended.

The rule: who the kernel is stands on disk before the command runs. The identity is linked
into place, so it fails if the folder has been taken away meanwhile, and then the command
never runs.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time

TYPE_CHECKING = False  # the name that type checkers know; importing typing takes 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38


def main() -> None:
    """Start the kernel that the order describes, and keep it."""
    order = json.load(sys.stdin)
    hit = failpoints()
    answer = detached()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    go_read, go_write = os.pipe()
    error_read, error_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go_write)
        run(order, libc, go_read, error_write)
    os.close(go_read)
    os.close(error_write)
    hit("keeper.after_fork")
    identity = {
        "pid": pid,
        "start_time": start_time(pid),
        "boot_id": order["boot_id"],
        "keeper_pid": os.getpid(),
        "keeper_start_time": start_time(os.getpid()),
        "started_at": time.time(),
    }
    try:
        publish(order["folder"], "identity.json", identity, lambda: hit("keeper.before_identity"))
        hit("keeper.after_identity")
        os.write(go_write, b"g")
        os.close(go_write)
        hit("keeper.after_go")
        failure = read_all(error_read)
    except OSError as error:
        os.kill(pid, signal.SIGKILL)
        failure = json.dumps({"step": "identity", "errno": error.errno}).encode()
    if failure:
        os.waitpid(pid, 0)
        withdraw(order["folder"], "identity.json")
        tell(answer, failure)
        os._exit(1)
    hit("keeper.before_answer")
    tell(answer, json.dumps(identity).encode())
    keep(order, pid, hit)


def detached() -> int:
    """Leave the daemon, which may die without a trace; return where its answer is written."""
    if os.fork():
        os._exit(0)
    os.setsid()
    answer = os.dup(1)
    os.set_inheritable(answer, False)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return answer


def failpoints() -> Callable[[str], None]:
    """Return what visits a point: nothing, unless a test has set some."""
    if "AGENTD_FAILPOINTS" not in os.environ:
        return lambda _: None
    source = os.path.abspath(__file__)
    for _ in range(4):
        source = os.path.dirname(source)
    sys.path.append(source)
    from agentd import failpoints  # noqa: PLC0415 - the keeper starts without it

    failpoints.arm(os.environ[failpoints.VARIABLE])
    return failpoints.hit


def run(order: dict[str, Any], libc: ctypes.CDLL, go: int, failure: int) -> None:
    """In the child: become the command, once the keeper says so."""
    step = "start"
    try:
        os.setsid()
        if os.read(go, 1) != b"g":
            os._exit(125)
        step = "cgroup"
        if order["cgroup_procs"]:
            with open(order["cgroup_procs"], "w") as file:
                file.write(str(os.getpid()))
        step = "cpus"
        if order["cpus"]:
            os.sched_setaffinity(0, order["cpus"])
        step = "ulimits"
        for name, limits in order["ulimits"].items():
            resource.setrlimit(getattr(resource, "RLIMIT_" + name.upper()), tuple(limits))
        step = "log"
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        step = "user"
        if order["user"]:
            os.setgroups(order["user"]["groups"])
            os.setgid(order["user"]["gid"])
            os.setuid(order["user"]["uid"])
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        step = "working_dir"
        os.chdir(order["working_dir"])
        for number in range(1, signal.NSIG):
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):
                pass
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        step = "command"
        execute(order["command"], order["env"])
    except Exception as error:
        number = getattr(error, "errno", 0)
        os.write(failure, json.dumps({"step": step, "errno": number, "why": str(error)}).encode())
    finally:
        os._exit(127)


def execute(command: list[str], env: dict[str, str]) -> None:
    """Become the command, found on its own PATH; imports nothing, the user may not read us."""
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


def keep(order: dict[str, Any], leader: int, hit: Callable[[str], None]) -> None:
    """Wait until nothing of the kernel is left, then write how its command ended."""
    status = 0
    while True:
        try:
            pid, ended = os.wait()
        except ChildProcessError:
            break
        except InterruptedError:
            continue
        if pid == leader:
            status = ended
    code = os.waitstatus_to_exitcode(status)
    ending = {
        "exit_code": code if code >= 0 else 128 - code,
        "oom_killed": oom_kills(order["oom_file"]) > 0,
        "finished_at": time.time(),
    }
    try:
        publish(order["folder"], "exit.json", ending, lambda: hit("keeper.before_exit"))
        hit("keeper.after_exit")
    finally:
        os._exit(0)


def oom_kills(path: str) -> int:
    """Return how often the kernel's cgroup ran out of memory: v1 oom_control, v2 events."""
    if not path:
        return 0
    try:
        with open(path) as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    except (OSError, ValueError):
        return 0


def start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot: field 22 of proc(5) stat."""
    with open("/proc/%d/stat" % pid, "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def publish(folder: str, name: str, value: object, written: Callable[[], None]) -> None:
    """Put a complete file into a folder that must still be there, or raise."""
    temporary = os.path.join(folder, ".%s.%d" % (name, os.getpid()))
    with open(temporary, "w") as file:
        json.dump(value, file)
    try:
        written()
        os.link(temporary, os.path.join(folder, name))
    finally:
        os.unlink(temporary)


def withdraw(folder: str, name: str) -> None:
    """Take back what was published, if it was."""
    try:
        os.unlink(os.path.join(folder, name))
    except OSError:
        pass


def read_all(descriptor: int) -> bytes:
    """Read a pipe to its end."""
    data = b""
    while chunk := os.read(descriptor, 4096):
        data += chunk
    os.close(descriptor)
    return data


def tell(answer: int, line: bytes) -> None:
    """Answer the daemon, if it is still there."""
    try:
        os.write(answer, line + b"\n")
    except OSError:
        pass
    os.close(answer)


if __name__ == "__main__":
    main()
