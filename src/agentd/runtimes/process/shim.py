"""The shim of one process kernel, a program of its own: `python -I -S shim.py`.

It reads its request as JSON from standard input, starts the command, and answers with one line of
JSON: the command's pid and start time, or why it did not start. It outlives the daemon, writes the
kernel's output from a pipe into files of bounded size, and waits until nothing of the kernel is
left. As a subreaper it also sees orphaned descendants of the command. Only then it writes the exit
status. Its working folder is the bundle, so its files stay with a bundle that is moved.

Two rules hold. The kernel's identity is on disk before the command runs: it is linked into place,
which fails if the bundle was removed meanwhile, and then the command never runs. And the bundle's
lock, which the shim inherits and the kernel does not, proves that the shim lives (byte 0) and that
the command may run (byte 1).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import stat
import struct
import sys
import time

SOURCE = os.path.abspath(__file__).rsplit("/", 4)[0]
if __name__ == "__main__":
    sys.path.append(SOURCE)  # `-I` leaves no path of ours
from agentd.runtimes.process.shim_output import CHUNK, KernelOutput  # noqa: E402 - it needs the line above

TYPE_CHECKING = False  # type checkers know this name; importing typing takes 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
F_OFD_SETLK = 37
"""fcntl(2), Linux: a lock of the open file description. Python 3.11 has no name for it."""
SHIM_BYTE, COMMAND_BYTE = 0, 1
"""Bytes of the lock file: the shim lives; its command may run."""
ENDING_BYTES = 4096
"""Bytes reserved for the exit status before the command runs."""
STOPPED_REASON = "its shim was told to stop"
"""By systemd, or at the end of its session; after a reboot it is `the node restarted`."""
DESCENDANTS = "descendants.json"
"""The kernel's processes beside its command, each by pid and start time."""
MIN_NOTE_PAUSE_S, MAX_NOTE_PAUSE_S, MAX_NOTED = 0.01, 5.0, 1000
PIPE_BYTES = 1 << 20
"""Linux's default for fs.pipe-max-size: the maximum content of a pipe."""


def main() -> None:
    """Start the kernel of the request and stay until it has ended."""
    request = receive_request() if stat.S_ISSOCK(os.fstat(0).st_mode) else json.load(sys.stdin)
    hit = load_failpoints()
    os.set_inheritable(request["lock"], False)
    answer = detach()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wakeup = child_signals()
    signal.signal(signal.SIGTERM, Stop.request)
    try:
        os.umask(0o077)
        os.chdir(request["folder"])
        keep_folder()
        output = KernelOutput(request)
        ending = reserve_file("exit.json")
    except OSError as error:
        refuse_start(answer, "bundle", error)
    go_read, go_write = os.pipe()
    error_read, error_write = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        refuse_start(answer, "fork", error)
    if pid == 0:
        os.close(go_write)
        run_command(request, libc, output, go_read, error_write)
    for descriptor in (go_read, error_write, output.writer):
        os.close(descriptor)
    hit("shim.after_fork")
    identity = describe_identity(request, pid)
    try:
        publish_file(
            request["folder"], "identity.json", identity, lambda: hit("shim.before_identity")
        )
        hit("shim.after_identity")
        lock_byte(request["lock"], COMMAND_BYTE)
        os.write(go_write, b"g")
        os.close(go_write)
        hit("shim.after_go")
        failure = read_all(error_read)
    except OSError as error:
        os.kill(pid, signal.SIGKILL)
        failure = json.dumps({"step": "identity", "errno": error.errno}).encode()
    if failure:
        os.waitpid(pid, 0)
        attempt(os.unlink, os.path.join(request["folder"], "identity.json"))
        send_answer(answer, failure)
        os._exit(1)
    hit("shim.before_answer")
    send_answer(answer, json.dumps(identity).encode())
    supervise(request, pid, output, ending, wakeup, hit)


def receive_request() -> dict[str, Any]:
    """Receive the request and the lock over a socket, as a unit of systemd must.

    systemd would keep a descriptor that is passed as a stream, and with it the lock.
    """
    import socket  # noqa: PLC0415 - 3 ms, which a shim that inherits its lock has no use for

    with socket.socket(fileno=os.dup(0)) as control:
        data, descriptors, _, _ = socket.recv_fds(control, CHUNK, 1)
        while not data.endswith(b"\n"):
            if not (chunk := control.recv(CHUNK)):
                os._exit(1)  # the daemon disconnected
            data += chunk
    return {**json.loads(data), "lock": descriptors[0]}


def describe_identity(request: dict[str, Any], pid: int) -> dict[str, Any]:
    """Return the identity of the kernel: its command, which waits to run, and this shim."""
    return {
        "pid": pid,
        "start_time": start_time(pid),
        "boot_id": request["boot_id"],
        "shim_pid": os.getpid(),
        "shim_start_time": start_time(os.getpid()),
        "has_cgroup": bool(request["cgroup_procs"]),
        "started_at": time.time(),
        "kernel_id": os.path.basename(request["folder"]),
    }


def detach() -> int:
    """Detach from the daemon, which may die at any time; return the descriptor for the answer."""
    try:
        if os.fork():
            os._exit(0)
    except OSError as error:
        refuse_start(1, "fork", error)
    os.setsid()
    answer = os.dup(1)
    os.set_inheritable(answer, False)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    return answer


def load_failpoints() -> Callable[[str], None]:
    """Return a function that visits a failpoint; it does nothing unless a test sets some."""
    if "AGENTD_FAILPOINTS" not in os.environ:
        return lambda _: None
    from agentd import failpoints  # noqa: PLC0415 - the shim starts without it

    failpoints.arm(os.environ[failpoints.VARIABLE])
    return failpoints.hit


def lock_byte(descriptor: int, byte: int) -> None:
    """Lock one byte of a file for this open file description (struct flock of fcntl(2))."""
    flock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    fcntl.fcntl(descriptor, F_OFD_SETLK, flock)


class Stop:
    """The stop of the shim's unit by systemd: TERM to the kernel, then KILL after the timeout.

    A shim that is not a unit gets SIGTERM when its session or host stops, as its kernel does.
    """

    requested_at = 0.0

    @classmethod
    def request(cls, *_: object) -> None:
        """Record that the shim was told to stop, for example at shutdown."""
        cls.requested_at = cls.requested_at or time.monotonic()

    def __init__(self, request: dict[str, Any], leader: int) -> None:
        self._request, self.leader = request, leader
        self._is_term_sent = False

    def send_due_signal(self) -> int | None:
        """Send a signal that is due; return the milliseconds until the next check."""
        if not self.requested_at or self._request["stop_timeout"] is None:
            return None
        remaining_s = self.requested_at + self._request["stop_timeout"] - time.monotonic()
        if not self._is_term_sent:
            self._is_term_sent = True
            self._send(signal.SIGTERM)
        elif remaining_s <= 0:
            self._send(signal.SIGKILL)
        return max(50, int(remaining_s * 1000))

    def _send(self, number: int) -> None:
        pids = [pid for path in self._request["cgroup_procs"][:1] for pid in read_pids(path)]
        if self.leader:  # not reaped yet, so its id cannot be reused
            pids.append(-self.leader)
        for pid in pids:
            attempt(os.kill, pid, number)


def child_signals() -> int:
    """Return a descriptor that becomes readable when a child has ended."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reader


def run_command(
    request: dict[str, Any], libc: ctypes.CDLL, output: KernelOutput, go: int, failure: int
) -> None:
    """Become the command in the child, once the shim allows it."""
    step, missing = "start", list[int]()
    try:
        reset_host_limits()
        os.close(request["lock"])
        os.setsid()
        if os.read(go, 1) != b"g":
            os._exit(125)
        step = "cgroup"
        for path in request["cgroup_procs"]:
            write_file(path, str(os.getpid()))
        step = "cpus"
        if request["cpus"] and (missing := missing_cores(request["cpus"])):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        for name, limits in request["ulimits"].items():
            step = "ulimits." + name
            resource.setrlimit(getattr(resource, "RLIMIT_" + name.upper()), tuple(limits))
        os.dup2(output.writer, 1)
        os.dup2(output.writer, 2)
        step = "user"
        if request["user"]:
            os.setgroups(request["user"]["groups"])
            os.setgid(request["user"]["gid"])
            os.setuid(request["user"]["uid"])
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        step = "working_dir"
        os.chdir(request["working_dir"])
        reset_signals()
        step = "command"
        execute(request["command"], request["env"])
    except Exception as error:
        number = getattr(error, "errno", 0)
        answer = {"step": step, "errno": number, "why": str(error), "cores": missing}
        os.write(failure, json.dumps(answer).encode())
    finally:
        os._exit(127)


def missing_cores(cores: list[int]) -> list[int]:
    """Pin this process to cores; return those that are not there (sched_setaffinity(2))."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        if error.errno != errno.EINVAL:  # none of them is there
            raise
        return cores
    return sorted({*cores} - os.sched_getaffinity(0))


def reset_host_limits(oom_score_adj: int = 0, niceness: int = 0) -> None:
    """Reset what a process inherits from the daemon, as far as Linux permits."""
    os.umask(0o022)
    attempt(os.setpriority, os.PRIO_PROCESS, 0, niceness)
    attempt(write_file, "/proc/self/oom_score_adj", str(oom_score_adj))


def reset_signals() -> None:
    """Reset every signal to its default action."""
    signal.set_wakeup_fd(-1)
    for number in range(1, signal.NSIG):
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            pass
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def execute(command: list[str], env: dict[str, str]) -> None:
    """Execute the command, found on its own PATH; imports nothing: the user may not read us."""
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


def supervise(
    request: dict[str, Any],
    leader: int,
    output: KernelOutput,
    ending: int,
    wakeup: int,
    hit: Callable[[str], None],
) -> None:
    """Copy output until nothing of the kernel is left, then write the exit status."""
    status = 0
    stop, descendants = Stop(request, leader), Descendants(request, leader)
    poll = select.poll()
    poll.register(output.reader, select.POLLIN)
    poll.register(wakeup, select.POLLIN)
    while True:
        pauses_ms = stop.send_due_signal(), descendants.note_due()
        ready = dict(poll.poll(min((ms for ms in pauses_ms if ms is not None), default=None)))
        if (
            output.reader in ready
            and not output.copy_chunk()
            and ready[output.reader] & select.POLLHUP
        ):
            poll.unregister(output.reader)
        if wakeup not in ready:
            continue
        os.read(wakeup, 4096)
        try:
            while (result := os.waitpid(-1, os.WNOHANG))[0]:
                if result[0] == leader:
                    status, stop.leader, descendants.due_at = result[1], 0, 0
        except ChildProcessError:
            break
    remaining = PIPE_BYTES
    while remaining > 0 and (copied := output.copy_chunk()):  # another process may keep writing
        remaining -= copied
    write_ending(request, status, ending, hit)


class Descendants:
    """The kernel's processes beside its command, which init inherits if this shim is killed.

    Where no cgroup has them, they are noted when the command has ended and at growing intervals,
    and that takes at most a two hundredth of a core.
    """

    def __init__(self, request: dict[str, Any], leader: int) -> None:
        self._has_cgroup, self._leader = bool(request["cgroup_procs"]), leader
        self._noted: list[dict[str, int]] = []
        self._pause_s, self.due_at = MIN_NOTE_PAUSE_S, 0.0

    def note_due(self) -> int | None:
        """Note them if that is due; return the milliseconds until it is again."""
        if self._has_cgroup:
            return None
        now = time.monotonic()
        if now >= self.due_at:
            attempt(self._note)
            self._pause_s = min(self._pause_s * 2, MAX_NOTE_PAUSE_S)
            self.due_at = max(now + self._pause_s, now + 200 * (time.monotonic() - now))
        return int(max(0, self.due_at - now) * 1000) + 1

    def _note(self) -> None:
        noted: list[dict[str, int]] = []
        pending = [os.getpid()]
        while pending and len(noted) < MAX_NOTED:
            children = children_of(pending.pop())
            pending += children
            noted += [
                {"pid": pid, "start_time": attempt(start_time, pid) or 0}
                for pid in children
                if pid != self._leader
            ]
        if noted != self._noted:
            write_file("." + DESCENDANTS, json.dumps(noted))
            os.replace("." + DESCENDANTS, DESCENDANTS)
            self._noted = noted


def children_of(pid: int) -> list[int]:
    """Return the children of a process, by its threads (proc(5)); none if it has ended."""
    threads = attempt(os.listdir, "/proc/%d/task" % pid) or []
    return [n for t in threads for n in read_pids("/proc/%d/task/%s/children" % (pid, t))]


def read_pids(path: str) -> list[int]:
    """Return the processes that a file lists, none if it cannot be read."""
    return [int(pid) for pid in (attempt(read_file, path) or b"").split()]


def write_ending(
    request: dict[str, Any], status: int, ending: int, hit: Callable[[str], None]
) -> None:
    """Write the exit status into its reserved space, and exit."""
    code = os.waitstatus_to_exitcode(status)
    content = {
        "exit_code": code if code >= 0 else 128 - code,
        "oom_killed": oom_kills(request["oom_file"]) > 0,
        "finished_at": time.time(),
        "reason": STOPPED_REASON if Stop.requested_at else "",
    }
    try:
        os.pwrite(ending, json.dumps(content).encode().ljust(ENDING_BYTES), 0)
        hit("shim.before_exit")
        os.rename(".exit.json", "exit.json")
        hit("shim.after_exit")
    finally:
        os._exit(0)


def keep_folder() -> None:
    """Lock the bundle against systemd-tmpfiles(8), which empties old folders without a lock."""
    attempt(fcntl.flock, os.open(".", os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH | fcntl.LOCK_NB)


def reserve_file(name: str) -> int:
    """Reserve space for a small hidden file and return its descriptor."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open("." + name, flags, 0o600)
    os.posix_fallocate(descriptor, 0, ENDING_BYTES)
    return descriptor


def oom_kills(path: str) -> int:
    """Return the number of OOM kills in the kernel's cgroup: v1 oom_control, v2 events."""
    lines = (attempt(read_file, path) or b"").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(b"oom_kill "))


def start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot: field 22 of proc(5) stat."""
    return int(read_file("/proc/%d/stat" % pid).rpartition(b")")[2].split()[19])


def publish_file(folder: str, name: str, value: object, on_written: Callable[[], None]) -> None:
    """Put a complete file into a folder; fails if the folder is gone, or was set aside."""
    temporary = os.path.join(folder, "." + name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(temporary, flags, 0o600)
    try:
        with open(descriptor, "w") as file:
            json.dump(value, file)
        on_written()
        os.link(temporary, os.path.join(folder, name))
    finally:
        os.unlink(temporary)


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function and return its result, None if it raises an OSError."""
    try:
        return function(*args)
    except OSError:
        return None


def read_file(path: str) -> bytes:
    """Return the content of a file."""
    with open(path, "rb") as file:
        return file.read()


def write_file(path: str, text: str) -> None:
    """Write a text into a file."""
    with open(path, "w") as file:
        file.write(text)


def read_all(descriptor: int) -> bytes:
    """Read a pipe to its end."""
    data = b""
    while chunk := os.read(descriptor, 4096):
        data += chunk
    os.close(descriptor)
    return data


def refuse_start(answer: int, step: str, error: OSError) -> NoReturn:
    """Report why nothing was started, and exit."""
    send_answer(answer, json.dumps({"step": step, "errno": error.errno}).encode())
    os._exit(1)


def send_answer(answer: int, line: bytes) -> None:
    """Answer the daemon, if it still lives."""
    attempt(os.write, answer, line + b"\n")
    os.close(answer)


if __name__ == "__main__":
    main()
