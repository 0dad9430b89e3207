"""Exec in a kernel that consists of processes on the host: see `exec_program`."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import termios
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agentd.concurrency import complete_shielded
from agentd.core.kernel.exec_spec import STDERR, STDOUT, ExecSpec
from agentd.errors import (
    AgentdError,
    KernelConflict,
    RuntimeFailure,
)
from agentd.host.processes import Proc
from agentd.os_errors import os_error_as_refusal
from agentd.runtimes.host import exec_program
from agentd.runtimes.host.execve_errors import command_refusal, folder_refusal

if TYPE_CHECKING:
    from agentd.host.systemd.dbus import SystemdManager, UnitProperty

CHUNK_BYTES = 64 * 1024
START_TIMEOUT_S = 30.0
DRAIN_S = 0.2
"""Seconds of silence after which the streams of an ended command are closed."""
MAX_DRAIN_S = 2.0
"""Total seconds to wait for those streams."""
MAX_TARGETS = 16
KILLED = 128 + signal.SIGKILL
END_OF_INPUT = b"\x04"
"""The end of input for a terminal (termios(3), VEOF)."""
SLICE = "agentd.slice"
_COMMAND = [sys.executable, "-I", "-m", exec_program.__name__]


class ExecTarget(msgspec.Struct, frozen=True):
    """A kernel for exec: its processes, and the files that add a process to its cgroups."""

    members: Sequence[Proc]
    cgroup_procs: Sequence[Path]


class HostExec:
    """An exec in a kernel, through its helper program; see `Session`."""

    def __init__(self, spec: ExecSpec) -> None:
        self._spec = spec
        self._control, self._helper_end = socket.socketpair()
        self._control.setblocking(False)
        self._streams = _Streams(is_terminal=spec.tty)
        self._exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._outputs: list[tuple[int, asyncio.StreamReader]] = []
        self._input: asyncio.StreamWriter | None = None
        self._transports: list[asyncio.BaseTransport] = []
        self._unread = b""
        self._watch_task: asyncio.Task[None] | None = None

    async def start(self, target: ExecTarget, manager: SystemdManager | None, unit: str) -> None:
        """Start the command.

        Raises:
            AgentdError: the command did not start.
            OSError: this process lacks a resource.
        """
        with self._helper_end:
            await _start_helper(self._helper_end, manager, unit)
        loop = asyncio.get_running_loop()
        message = json.dumps(_exec_request(target, self._spec)).encode() + b"\n"
        socket.send_fds(
            self._control, [message[:1]], [stream.fileno() for stream in self._streams.command_ends]
        )
        await loop.sock_sendall(self._control, message[1:])
        self._streams.hand_over()
        for number, stream in self._streams.outputs:
            self._outputs.append((number, await self._open_reader(stream)))
        self._input = await self._open_writer(self._streams.input)
        answer = await self._read_message()
        if "pid" not in answer:
            raise _start_error(self._spec, answer)
        self._watch_task = asyncio.create_task(self._watch_end())

    async def _read_message(self) -> dict[str, Any]:
        """Return the helper's next message, or a failure if it has ended."""
        loop = asyncio.get_running_loop()
        while b"\n" not in self._unread:
            try:
                chunk = await loop.sock_recv(self._control, CHUNK_BYTES)
            except OSError:
                chunk = b""
            if not chunk:
                return {"step": "helper", "why": "it has ended"}
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        content: dict[str, Any] = json.loads(line)
        return content

    async def _watch_end(self) -> None:
        answer = await self._read_message()
        self._exit_code.set_result(int(answer.get("exit_code", KILLED)))

    async def _open_reader(self, stream: FileIO) -> asyncio.StreamReader:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=CHUNK_BYTES)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), stream
        )
        self._transports.append(transport)
        return reader

    async def _open_writer(self, stream: FileIO) -> asyncio.StreamWriter:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.connect_write_pipe(
            lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), stream
        )
        self._transports.append(transport)
        return asyncio.StreamWriter(transport, protocol, None, loop)

    async def output(self) -> AsyncGenerator[tuple[int, bytes]]:
        """Yield the output; once the command has ended, others may hold its streams for good."""
        loop, remaining_s = asyncio.get_running_loop(), MAX_DRAIN_S
        reads = {
            loop.create_task(reader.read(CHUNK_BYTES)): (n, reader) for n, reader in self._outputs
        }
        try:
            while reads:
                events: set[asyncio.Future[Any]] = {*reads, self._exit_code}
                await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
                if self._exit_code.done():
                    started_s, timeout_s = loop.time(), max(0, min(DRAIN_S, remaining_s))
                    await asyncio.wait(
                        reads, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
                    )
                    remaining_s -= loop.time() - started_s
                done = [read for read in reads if read.done()]
                if not done:
                    return
                for read in done:
                    number, reader = reads.pop(read)
                    is_read = read.exception() is None  # else all have closed the terminal
                    if is_read and (chunk := read.result()):
                        yield number, chunk
                        reads[loop.create_task(reader.read(CHUNK_BYTES))] = number, reader
        finally:
            for read in reads:
                read.cancel()

    async def write(self, data: bytes) -> None:
        if self._input is not None:
            await write_slices(self._input, data)

    async def close_input(self) -> None:
        if self._streams.terminal is not None:
            await self.write(END_OF_INPUT)
        elif self._input is not None:
            self._input.close()

    async def resize(self, columns: int, rows: int) -> None:
        if self._streams.terminal is not None:
            size = struct.pack("HHHH", rows, columns, 0, 0)
            with suppress(OSError, ValueError):
                fcntl.ioctl(self._streams.terminal, termios.TIOCSWINSZ, size)

    async def send_signal(self, number: int) -> None:
        if not self._exit_code.done():
            message = json.dumps({"signal": number}).encode() + b"\n"
            with suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(self._control, message)

    async def wait(self) -> int:
        return await asyncio.shield(self._exit_code)

    async def close(self) -> None:
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.wait([self._watch_task])
        for transport in self._transports:
            transport.close()
        if self._input is not None and self._input.transport.get_write_buffer_size():
            self._input.transport.abort()  # unread input is lost
        self._control.close()  # closing it ends the command
        self._helper_end.close()
        self._streams.close()
        if not self._exit_code.done():
            self._exit_code.set_result(KILLED)


async def write_slices(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write in slices to limit the buffer; writes to a closed stream are dropped."""
    with suppress(OSError):
        for start in range(0, len(data), CHUNK_BYTES):
            if writer.is_closing():
                return
            writer.write(data[start : start + CHUNK_BYTES])
            await writer.drain()


class _Streams:
    """Both ends of a command's streams."""

    def __init__(self, *, is_terminal: bool) -> None:
        self.terminal: FileIO | None = None
        if is_terminal:
            master, slave = os.openpty()
            read_end, self.terminal = FileIO(master, "r"), FileIO(slave, "r+")
            # Keep one of the command's ends open: reading a terminal without any is an error,
            # which would hide the last output.
            self.outputs = [(STDOUT, read_end)]
            self.input = FileIO(os.dup(master), "w")
            self.command_ends = [FileIO(os.dup(slave), "r") for _ in range(3)]
            return
        (stdin, self.input), *output_pipes = [_open_pipe() for _ in range(3)]
        self.outputs = [(STDOUT, output_pipes[0][0]), (STDERR, output_pipes[1][0])]
        self.command_ends = [stdin, *(writing for _, writing in output_pipes)]

    def hand_over(self) -> None:
        """Close the command's ends after it has inherited them."""
        for stream in self.command_ends:
            stream.close()

    def close(self) -> None:
        """Close all remaining ends."""
        self.hand_over()
        for stream in (self.input, self.terminal, *(stream for _, stream in self.outputs)):
            if stream is not None:
                stream.close()


def _open_pipe() -> tuple[FileIO, FileIO]:
    """Return both ends of a pipe; each closes when it is dropped."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    return FileIO(read_end, "r"), FileIO(write_end, "w")


def exec_unit_name(name: str) -> str:
    """Return a unique unit name for an exec in a kernel's unit `name`."""
    return f"{name.replace('agentd-', 'agentd-exec-', 1)}-{uuid.uuid4().hex[:8]}.service"


async def start_host_exec(
    target: ExecTarget, spec: ExecSpec, manager: SystemdManager | None, unit: str
) -> HostExec:
    """Start a command in a kernel, as a unit if there is a manager.

    Raises:
        AgentdError: the command did not start.
    """
    try:
        session = HostExec(spec)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await session.start(target, manager, unit)
        except BaseException:
            await complete_shielded(session.close())
            raise
    except OSError as error:
        late = OSError(errno.ETIMEDOUT, f"no answer within {START_TIMEOUT_S:g} s")
        failure = error if error.args else late
        raise os_error_as_refusal(failure, "the command did not start") from error
    return session


def _exec_request(target: ExecTarget, spec: ExecSpec) -> dict[str, Any]:
    """Return the request for the helper program."""
    oldest = sorted(target.members, key=lambda process: process.start_time)
    return {
        "targets": [[process.pid, process.start_time] for process in oldest[:MAX_TARGETS]],
        "cgroup_procs": [str(file) for file in target.cgroup_procs],
        "command": list(spec.command),
        "tty": spec.tty,
        "env": {**({"TERM": "xterm"} if spec.tty else {}), **spec.env},
        "working_dir": spec.working_dir,
    }


async def _start_helper(control: socket.socket, manager: SystemdManager | None, unit: str) -> None:
    if manager is None:
        await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=control.fileno(),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )
        return
    from agentd.host.systemd.dbus import UnitExists, UnitRefused  # noqa: PLC0415 - where D-Bus is used

    properties: list[UnitProperty] = [
        ("Description", "s", "exec in a kernel (agentd)"),
        ("Slice", "s", SLICE),
        ("Type", "s", "exec"),
        ("CollectMode", "s", "inactive-or-failed"),
        ("ExecStart", "a(sasb)", [[_COMMAND[0], _COMMAND, False]]),
        ("StandardInputFileDescriptor", "h", 0),
        ("StandardOutput", "s", "null"),
        ("StandardError", "s", "null"),
    ]
    try:
        # Keep the descriptor open until it is sent.
        await complete_shielded(manager.start(unit, properties, [control.fileno()]))
    except (UnitExists, UnitRefused) as error:
        raise RuntimeFailure(f"systemd: {error}") from error


def _start_error(spec: ExecSpec, answer: dict[str, Any]) -> AgentdError:
    number = int(answer.get("errno", 0))
    reason = os.strerror(number) if number else str(answer.get("why", "it was killed"))
    step = answer.get("step")
    if (
        step == "command"
        and (refusal := command_refusal(spec.command[0], number, reason)) is not None
    ):
        return refusal
    if (
        step == "working_dir"
        and (refusal := folder_refusal(spec.working_dir, number, reason)) is not None
    ):
        return refusal
    match step:
        case "kernel":
            reason = str(answer.get("why", reason))
            return KernelConflict(f"no running process to attach to: {reason}")
        case _:
            failure = OSError(number, reason)
            return os_error_as_refusal(failure, f"the command did not start; {step}")
