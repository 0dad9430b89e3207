"""Running a command inside a kernel that is processes of this machine: see `inside`."""

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
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentd.core.session import STDERR, STDOUT, ExecSpec
from agentd.errors import (
    AgentdError,
    CommandNotFound,
    InvalidRequest,
    KernelConflict,
    Problem,
    RuntimeFailure,
)
from agentd.host.units import Manager, Property, UnitExists, UnitRefused
from agentd.runtimes import inside

CHUNK = 64 * 1024
START_TIMEOUT_S = 30.0
DRAIN_S = 0.2
"""How long the streams of a command that has ended may be silent: others may hold them open."""
SLICE = "agentd.slice"
_COMMAND = [sys.executable, "-I", "-S", inside.__file__]


@dataclass(frozen=True, slots=True)
class Target:
    """One process of a kernel, and the files that put others into its cgroups."""

    pid: int
    start_time: int
    cgroup_procs: tuple[Path, ...]


class Entered:
    """A command inside a kernel, by the program that started it; see `Session`."""

    def __init__(self, control: socket.socket, ends: _Ends) -> None:
        self._control_socket = control
        self._ends = ends
        self._exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._control: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._outputs: list[tuple[int, asyncio.StreamReader]] = []
        self._input: asyncio.StreamWriter | None = None
        self._transports: list[asyncio.BaseTransport] = []
        self._watch: asyncio.Task[None] | None = None

    async def begin(self, order: dict[str, Any], command: str) -> None:
        """Have the program start the command.

        Raises:
            AgentdError: it did not.
        """
        self._control_socket.setblocking(False)  # noqa: FBT003 - the library's
        self._control = await asyncio.open_connection(sock=self._control_socket)
        reader, _ = self._control
        for number, descriptor in self._ends.outputs:
            self._outputs.append((number, await self._reading(descriptor)))
        self._input = await self._writing(self._ends.input)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = _content(await reader.readline())
        except TimeoutError:
            answer = {"step": "helper", "why": "it does not answer"}
        if "pid" not in answer:
            raise _failure(order, command, answer)
        self._watch = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        if self._control is not None:
            answer = _content(await self._control[0].readline())
            self._exit_code.set_result(int(answer.get("exit_code", 128 + signal.SIGKILL)))

    async def _reading(self, descriptor: int) -> asyncio.StreamReader:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=CHUNK)
        file = os.fdopen(descriptor, "rb", 0)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), file
        )
        self._transports.append(transport)
        return reader

    async def _writing(self, descriptor: int) -> asyncio.StreamWriter:
        loop = asyncio.get_running_loop()
        file = os.fdopen(descriptor, "wb", 0)
        transport, protocol = await loop.connect_write_pipe(
            lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), file
        )
        self._transports.append(transport)
        return asyncio.StreamWriter(transport, protocol, None, loop)

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        found: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue(maxsize=1)

        async def read(number: int, reader: asyncio.StreamReader) -> None:
            while chunk := await self._chunk(reader):
                await found.put((number, chunk))

        tasks = [asyncio.create_task(read(*output)) for output in self._outputs]
        reading = asyncio.gather(*tasks)
        try:
            while not reading.done() or not found.empty():
                taking = asyncio.ensure_future(found.get())
                first: list[asyncio.Future[Any]] = [taking, reading]
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                if taking.done():
                    yield taking.result()
                else:
                    taking.cancel()
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading

    async def _chunk(self, reader: asyncio.StreamReader) -> bytes:
        """Return what comes next; nothing at the end, or where nothing follows the command's."""
        waiting = asyncio.ensure_future(reader.read(CHUNK))
        try:
            first: list[asyncio.Future[Any]] = [waiting, self._exit_code]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([waiting], timeout=DRAIN_S)
            return waiting.result() if waiting.done() else b""
        finally:
            waiting.cancel()

    async def write(self, data: bytes) -> None:
        if self._input is not None and not self._input.is_closing():
            with suppress(OSError):
                self._input.write(data)
                await self._input.drain()

    async def close_input(self) -> None:
        if self._input is None:
            return
        if self._ends.terminal is not None:
            await self.write(b"\x04")  # what a terminal takes for the end of its input
        else:
            with suppress(OSError):
                self._input.close()

    async def resize(self, columns: int, rows: int) -> None:
        if self._ends.terminal is not None:
            size = struct.pack("HHHH", rows, columns, 0, 0)
            with suppress(OSError):
                fcntl.ioctl(self._ends.terminal, termios.TIOCSWINSZ, size)

    async def send_signal(self, number: int) -> None:
        if self._control is not None and not self._exit_code.done():
            with suppress(OSError):
                self._control[1].write(json.dumps({"signal": number}).encode() + b"\n")
                await self._control[1].drain()

    async def ended(self) -> int:
        return await asyncio.shield(self._exit_code)

    async def close(self) -> None:
        for transport in self._transports:
            transport.close()
        if self._watch is not None:
            self._watch.cancel()
        if self._control is not None:
            self._control[1].close()  # which ends the command
        self._ends.close()


class _Ends:
    """Our ends of a command's streams, and the command's own."""

    def __init__(self, *, is_terminal: bool) -> None:
        self.terminal: int | None = None
        if is_terminal:
            master, slave = os.openpty()
            # One end of theirs stays open: a terminal that nobody has any more is an error to
            # read, which would hide what was printed last.
            self.terminal = slave
            self.input, self.outputs = os.dup(master), [(STDOUT, master)]
            self.theirs = [os.dup(slave) for _ in range(3)]
            return
        stdin, self.input = os.pipe2(os.O_CLOEXEC)
        stdout_read, stdout = os.pipe2(os.O_CLOEXEC)
        stderr_read, stderr = os.pipe2(os.O_CLOEXEC)
        self.outputs = [(STDOUT, stdout_read), (STDERR, stderr_read)]
        self.theirs = [stdin, stdout, stderr]

    def hand_over(self) -> None:
        """Close the command's ends, which it has by now."""
        while self.theirs:
            os.close(self.theirs.pop())

    def close(self) -> None:
        """Close what nobody else does."""
        self.hand_over()
        if self.terminal is not None:
            os.close(self.terminal)
            self.terminal = None


def exec_unit(name: str) -> str:
    """Return a name for the unit of a command inside a kernel, which has this name itself."""
    return f"{name.replace('agentd-', 'agentd-exec-', 1)}-{uuid.uuid4().hex[:8]}.service"


async def enter(target: Target, spec: ExecSpec, manager: Manager | None, unit: str) -> Entered:
    """Run a command beside a process of a kernel, by a unit of systemd's where there is a manager.

    Raises:
        AgentdError: it did not start.
    """
    order = {
        "target": target.pid,
        "start_time": target.start_time,
        "cgroup_procs": [str(file) for file in target.cgroup_procs],
        "command": list(spec.command),
        "tty": spec.tty,
        "env": {**({"TERM": "xterm"} if spec.tty else {}), **spec.env},
        "working_dir": spec.working_dir,
    }
    ours, theirs = socket.socketpair()
    ends = _Ends(is_terminal=spec.tty)
    made = Entered(ours, ends)
    try:
        with theirs:
            await _started(theirs, manager, unit)
        told = json.dumps(order).encode() + b"\n"
        socket.send_fds(ours, [told[:1]], ends.theirs)
        ours.sendall(told[1:])
        ends.hand_over()
        await made.begin(order, spec.command[0])
    except BaseException as error:
        await made.close()
        ours.close()
        if isinstance(error, OSError):
            raise RuntimeFailure(f"the command did not start: {error}") from error
        raise
    return made


async def _started(control: socket.socket, manager: Manager | None, unit: str) -> None:
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
    properties: list[Property] = [
        ("Description", "s", "a command inside a kernel (agentd)"),
        ("Slice", "s", SLICE),
        ("Type", "s", "exec"),
        ("CollectMode", "s", "inactive-or-failed"),
        ("ExecStart", "a(sasb)", [[_COMMAND[0], _COMMAND, False]]),
        ("StandardInputFileDescriptor", "h", 0),
        ("StandardOutput", "s", "null"),
        ("StandardError", "s", "null"),
    ]
    try:
        await manager.start(unit, properties, [control.fileno()])
    except (UnitExists, UnitRefused) as error:
        raise RuntimeFailure(f"systemd: {error}") from error


def _content(line: bytes) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(line)
    except ValueError:
        return {"step": "helper", "why": "it has gone"}
    return content


def _failure(order: dict[str, Any], command: str, answer: dict[str, Any]) -> AgentdError:
    number = int(answer.get("errno", 0))
    why = os.strerror(number) if number else str(answer.get("why", "it gave no reason"))
    match answer.get("step"):
        case "command" if number in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR):
            return CommandNotFound(f"command {command!r}: {why}")
        case "working_dir":
            return InvalidRequest([Problem("working_dir", f"{order['working_dir']!r}: {why}")])
        case "kernel":
            return KernelConflict(f"the kernel does not run any more: {why}")
        case step:
            return RuntimeFailure(f"the command did not start; {step}: {why}")


def target_of(pids: Sequence[int], cgroup_procs: Sequence[Path]) -> Target:
    """Return the first of a kernel's processes that lives.

    Raises:
        KernelConflict: none does.
    """
    for pid in pids:
        with suppress(OSError):
            return Target(pid, inside.start_time(pid), tuple(cgroup_procs))
    raise KernelConflict("the kernel has no process that a command could join")
