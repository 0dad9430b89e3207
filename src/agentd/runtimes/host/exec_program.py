"""The exec helper: a program that runs as root if the daemon does, and starts one command.

Standard input is a socket. The helper reads a request (one line of JSON) with the command's three
streams, and answers with one line (`{"pid": …}`, or why the command did not start). Then it reads
lines (`{"signal": …}`) until the command ends, and sends the exit code. A disconnect ends the
command.

The command gets the rights of one process of the kernel, and no more: its cgroups, namespaces,
user, limits, cores and capabilities. That process must run with no_new_privs, so the kernel cannot
have widened them. The command's process first drops its own rights. Only then its parent, which
stays outside, adds it to the kernel's cgroups: everything in a cgroup may pass for a process of the
kernel, so no process with root's rights is ever in one.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from agentd.runtimes.host.exec_target import (
    READY,
    describe_failure,
    exec_as_target,
    find_target,
    lend_streams,
    read_stat_fields,
)
from agentd.runtimes.process.shim import attempt

CHUNK = 64 * 1024
KILL_ROUNDS = 100


def main() -> None:
    """Start the command of the request and stay until it has ended."""
    control = socket.socket(fileno=os.dup(0))
    request, streams = receive_request(control)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        target = find_target(request)
        lend_streams(streams, target, is_terminal=request["tty"])
        groups = [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in request["cgroup_procs"]]
    except OSError as error:
        send_answer(control, describe_failure("kernel", error))
        return
    wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    messages, messages_write = os.pipe2(os.O_CLOEXEC)
    go_read, go_write = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        for descriptor in (control.detach(), messages, go_write, *groups):
            os.close(descriptor)
        exec_as_target(request, target, streams, libc, (messages_write, go_read, parent))
    for descriptor in (messages_write, go_read, 0, *streams):
        os.close(descriptor)
    ExecParent(control, pid, groups, go_write, target.pidfd).supervise(messages, wakeup)


def receive_request(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive the request and the three streams."""
    data, streams, _, _ = socket.recv_fds(control, CHUNK, 3)
    while not data.endswith(b"\n"):
        if not (chunk := control.recv(CHUNK)):
            os._exit(1)  # the client disconnected
        data += chunk
    for stream in streams:
        os.set_inheritable(stream, False)
    return json.loads(data), streams


def send_answer(control: socket.socket, answer: dict[str, Any]) -> None:
    """Send an answer to the client, if it is still connected."""
    attempt(control.sendall, json.dumps(answer).encode() + b"\n")


class ExecParent:
    """The parent of a command, outside of the kernel; it lets the command in and reports its end.

    The command enters the kernel's cgroups once it has dropped root's rights: from then on the
    kernel's processes can reach it.
    """

    def __init__(
        self, control: socket.socket, pid: int, groups: list[int], go_write: int, target: int
    ) -> None:
        self._control = control
        self._pid = pid
        self._groups = groups
        self._go_write = go_write
        self._target = target
        self._unread = b""
        self._failure: dict[str, Any] = {}
        self._is_reported = False

    def supervise(self, messages: int, wakeup: int) -> None:
        """Serve until the command has ended, and report the exit code."""
        poll = select.poll()
        for source in (self._control.fileno(), messages, wakeup, self._target):
            poll.register(source, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if messages in ready and not self.handle_child_message(os.read(messages, CHUNK)):
                poll.unregister(messages)
            if self._control.fileno() in ready and not self.forward_signals():
                poll.unregister(self._control)
                kill_session(self._pid)
            if self._target in ready:  # the reference process of the kernel has ended
                poll.unregister(self._target)
                kill_session(self._pid)
            if wakeup in ready:
                os.read(wakeup, 4096)
                ended_pid, status = os.waitpid(self._pid, os.WNOHANG)
                if ended_pid:
                    break
        if (message := os.read(messages, CHUNK)) != READY:
            self.handle_child_message(message)
        code = os.waitstatus_to_exitcode(status)
        exit_status = {"exit_code": code if code >= 0 else 128 - code}
        send_answer(self._control, self._failure or exit_status)

    def handle_child_message(self, message: bytes) -> bool:
        """Handle a message of the command: it is ready, failed, or was executed."""
        if message == READY:
            self.admit_child()
        elif message:
            self._failure = json.loads(message)
        elif not self._failure and not self._is_reported:
            send_answer(self._control, {"pid": self._pid})
            self._is_reported = True
        return bool(message)

    def admit_child(self) -> None:
        """Add the command to the kernel's cgroups and let it continue."""
        try:
            for group in self._groups:
                os.write(group, str(self._pid).encode())
            if has_ended(self._target):
                raise ProcessLookupError(3, "its process has ended")
            os.write(self._go_write, READY)
        except OSError as error:
            self._failure = describe_failure("kernel", error)
            os.kill(self._pid, signal.SIGKILL)

    def forward_signals(self) -> bool:
        """Deliver the requested signals; return False once the client has disconnected."""
        chunk = attempt(self._control.recv, CHUNK) or b""
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for line in lines:
            attempt(os.killpg, self._pid, int(json.loads(line)["signal"]))
        return bool(chunk)


def kill_session(leader: int) -> None:
    """Kill a session; its leader is not reaped yet, so its id cannot be reused."""
    os.kill(leader, signal.SIGKILL)
    for _ in range(KILL_ROUNDS):
        alive = [
            pid
            for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
            if is_in_session(pid, leader)
        ]
        if not alive:
            return
        for pid in alive:
            if (descriptor := attempt(os.pidfd_open, pid)) is None:
                continue
            if is_in_session(pid, leader):
                attempt(signal.pidfd_send_signal, descriptor, signal.SIGKILL)
            os.close(descriptor)


def has_ended(pidfd: int) -> bool:
    """Return whether a process has ended (pidfd_open(2): its descriptor is readable then)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def is_in_session(pid: int, session: int) -> bool:
    """Return whether a process belongs to a session and has not ended."""
    fields = attempt(read_stat_fields, pid)
    return bool(fields) and fields[0] not in b"ZX" and int(fields[3]) == session


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(1)
