"""A command inside a container, by the engine's own exec.

API: ExecCreate, ExecStart, ExecInspect, ExecResize. The engine answers a start by handing over the
connection, for input and output; without a terminal it frames the output as it does logs. It has no
call that ends or signals an exec: that is done to its process, which the engine names.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from agentd.core.session import STDERR, STDOUT, ExecSpec
from agentd.errors import AgentdError, CommandNotFound, InvalidRequest, Problem, RuntimeFailure
from agentd.host.accounts import groups_of
from agentd.host.processes import all_processes
from agentd.runtimes.docker.engine import EngineClient

CHUNK = 64 * 1024
_SWITCHED = b" 101 "
_NO_COMMAND = (126, 127)
"""What the engine gives for the exit code of a command that is not there, or cannot be executed."""
LOOK_S = 0.02
"""How often the engine is asked whether it has ended; it tells in no other way."""


class Inside:
    """One exec of an engine; see `Session`."""

    def __init__(self, engine: EngineClient, exec_id: str, spec: ExecSpec) -> None:
        self._engine = engine
        self._exec_id = exec_id
        self._spec = spec
        self._reader = asyncio.StreamReader()
        self._writer: asyncio.StreamWriter | None = None
        self._is_over = False

    async def begin(self, socket: Path) -> None:
        """Start it, on a connection of its own.

        Raises:
            CommandNotFound: there is no such command.
            RuntimeFailure: the engine refused.
        """
        self._reader, self._writer = await asyncio.open_unix_connection(str(socket))
        body = msgspec.json.encode({"Detach": False, "Tty": self._spec.tty})
        self._writer.write(
            b"POST /exec/%s/start HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\n"
            b"Upgrade: tcp\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (self._exec_id.encode(), len(body), body)
        )
        head = await self._reader.readuntil(b"\r\n\r\n")
        if _SWITCHED not in head.split(b"\r\n")[0]:
            said = await self._reader.read(CHUNK)
            raise RuntimeFailure(f"the Docker Engine: {said.decode(errors='replace').strip()}")
        while not (shown := await self._shown()).get("Pid"):
            if not shown.get("Running") and shown.get("ExitCode") is not None:
                raise await self._not_started(shown.get("ExitCode"))
            await asyncio.sleep(LOOK_S)

    async def _shown(self) -> Mapping[str, Any]:
        shown: Mapping[str, Any] = await self._engine.call("GET", f"/exec/{self._exec_id}/json")
        return shown

    async def _not_started(self, exit_code: object) -> AgentdError:
        """Return why there is no process: the engine prints it where the command would print."""
        said = b"".join([chunk async for _, chunk in self.output()])
        why = said.decode(errors="replace").strip() or "it gave no reason"
        if "chdir to cwd" in why:
            return InvalidRequest([Problem("working_dir", why)])
        if exit_code in _NO_COMMAND:
            return CommandNotFound(f"command {self._spec.command[0]!r}: {why}")
        return RuntimeFailure(f"the Docker Engine: {why}")

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        while True:
            if self._spec.tty:
                if not (chunk := await self._reader.read(CHUNK)):
                    return
                yield STDOUT, chunk
                continue
            try:
                header = await self._reader.readexactly(8)
            except asyncio.IncompleteReadError:
                return
            left = int.from_bytes(header[4:], "big")
            while left and (chunk := await self._reader.read(min(left, CHUNK))):
                left -= len(chunk)
                yield (STDERR if header[0] == STDERR else STDOUT), chunk

    async def write(self, data: bytes) -> None:
        if self._writer is not None:
            with suppress(OSError):
                self._writer.write(data)
                await self._writer.drain()

    async def close_input(self) -> None:
        if self._writer is not None:
            if self._spec.tty:
                await self.write(b"\x04")
            else:
                with suppress(OSError, RuntimeError):
                    self._writer.write_eof()

    async def resize(self, columns: int, rows: int) -> None:
        size = {"h": str(rows), "w": str(columns)}
        with suppress(Exception):  # one that has ended has no terminal any more
            await self._engine.call("POST", f"/exec/{self._exec_id}/resize", size)

    async def send_signal(self, number: int) -> None:
        if (pid := await self._process()) is not None:
            with suppress(ProcessLookupError):
                os.killpg(pid, number)

    async def _process(self) -> int | None:
        """Return its process while it runs, if that is one of its container's."""
        shown = await self._shown()
        pid, container = int(shown.get("Pid") or 0), str(shown.get("ContainerID"))
        is_its = any(container in group for group in groups_of(pid))
        return pid if shown.get("Running") and is_its else None

    async def ended(self) -> int:
        while True:
            shown = await self._shown()
            if not shown.get("Running") and shown.get("ExitCode") is not None:
                self._is_over = True
                return int(shown["ExitCode"])
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if not self._is_over:
            with suppress(Exception):  # an engine that is gone has ended it, or will say so
                if (pid := await self._process()) is not None:
                    await asyncio.to_thread(_end_session, pid)


def _end_session(leader: int) -> None:
    """Kill what a command started: runc makes each exec a session of its own."""
    for process in list(all_processes()):
        if leader in (process.session, process.pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)


async def run_inside(engine: EngineClient, socket: Path, container: str, spec: ExecSpec) -> Inside:
    """Run a command inside a container."""
    asked = {
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": not spec.tty,
        "Tty": spec.tty,
        "Cmd": list(spec.command),
        "Env": [f"{name}={value}" for name, value in spec.env.items()],
        **({"WorkingDir": spec.working_dir} if spec.working_dir else {}),
    }
    made = await engine.call("POST", f"/containers/{container}/exec", None, asked)
    session = Inside(engine, str(made["Id"]), spec)
    try:
        await session.begin(socket)
    except BaseException:
        await session.close()
        raise
    return session
