"""Exec in a container, with the engine's own exec API.

API: ExecCreate, ExecStart, ExecInspect, ExecResize. The engine answers a start by handing over the
connection, for input and output; without a terminal it frames the output as it does for logs. It
has no call that ends or signals an exec, so agentd signals the process that the engine names. A
command outlives the client that started it, so each has a mark by which the next daemon finds it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import msgspec

from agentd.concurrency import to_the_end
from agentd.core.kernel.exec_spec import STDERR, STDOUT, ExecSpec
from agentd.errors import AgentdError, CommandNotFound, InvalidRequest, Problem, RuntimeFailure
from agentd.host.cgroups.usage import groups_of
from agentd.host.processes import all_processes, read_env, strike
from agentd.runtimes.docker.engine import CONTAINER_ID, EngineClient
from agentd.runtimes.docker.engine_errors import (
    EngineAnswerLost,
    EngineError,
    EngineUnreachable,
    presentable,
)
from agentd.runtimes.docker.error_translation import translating
from agentd.runtimes.docker.streams import frames
from agentd.runtimes.host.exec import CHUNK, END_OF_INPUT, START_TIMEOUT_S, feed

_FAILURES = (EngineError, EngineUnreachable, EngineAnswerLost)
_SWITCHED = b" 101 "
_NO_COMMAND = (126, 127)
"""Exit codes that the engine uses for a command that is missing or not executable."""
LOOK_S, SLOWEST_LOOK_S = 0.02, 1.0
"""Seconds between polls for the end, at first and at most; the engine has no notification."""
CLOSE_TRIES = 50
DETACH_KEYS = "ctrl-^,ctrl-],ctrl-_,ctrl-^,ctrl-],ctrl-_,ctrl-^,ctrl-]"
"""Keys that nobody types; the engine's default is used by shells and editors (ctrl-p, ctrl-q)."""
MARK = "AGENTD_EXEC"
"""A variable of each command, with the node id as its value."""


class DockerExec:
    """One exec in a container; see `Session`."""

    def __init__(self, engine: EngineClient, exec_id: str, spec: ExecSpec) -> None:
        self._engine = engine
        self._exec_id = exec_id
        self._spec = spec
        self._reader = asyncio.StreamReader()
        self._writer: asyncio.StreamWriter | None = None
        self._is_over = False

    async def begin(self, socket: Path) -> None:
        """Start the command on a connection of its own.

        Raises:
            CommandNotFound: the command does not exist.
            RuntimeFailure: the engine refused.
        """
        self._reader, self._writer = await asyncio.open_unix_connection(str(socket))
        body = msgspec.json.encode({"Detach": False, "Tty": self._spec.tty})
        self._writer.write(
            b"POST /exec/%s/start HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\n"
            b"Upgrade: tcp\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (self._exec_id.encode(), len(body), body)
        )
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise RuntimeFailure("the Docker Engine: unterminated response header") from None
        except asyncio.IncompleteReadError as error:
            raise RuntimeFailure("the Docker Engine closed the connection") from error
        if _SWITCHED not in head.split(b"\r\n")[0]:
            said = await self._reader.read(CHUNK)
            raise RuntimeFailure(f"the Docker Engine: {_text(said)}")
        async for shown in self._looks():
            if shown.get("Pid"):
                return
            if not shown.get("Running") and shown.get("ExitCode") is not None:
                raise await self._not_started(shown.get("ExitCode"))

    async def _inspection(self) -> Any:
        return await self._engine.call("GET", f"/exec/{self._exec_id}/json")

    async def _looks(self) -> AsyncGenerator[Mapping[str, Any]]:
        """Poll the state of the exec at growing intervals."""
        pause_s = LOOK_S
        while True:
            yield await self._inspection()
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.2, SLOWEST_LOOK_S)

    async def _not_started(self, exit_code: object) -> AgentdError:
        """Return why there is no process; the engine prints the reason as output."""
        said = b""
        async with aclosing(self.output()) as chunks:
            async for _, chunk in chunks:
                said += chunk
                if len(said) > CHUNK:
                    break
        why = _text(said)
        if "chdir to cwd" in why:
            return InvalidRequest([Problem("working_dir", why)])
        if exit_code in _NO_COMMAND:
            return CommandNotFound(f"command {self._spec.command[0]!r:.300}: {why:.1000}")
        return RuntimeFailure(f"the Docker Engine: {why}")

    async def output(self) -> AsyncGenerator[tuple[int, bytes]]:
        if self._spec.tty:
            while chunk := await self._reader.read(CHUNK):
                yield STDOUT, chunk
            return
        async for stream, chunk in frames(self._reader):
            yield (STDERR if stream == STDERR else STDOUT), chunk

    async def write(self, data: bytes) -> None:
        if self._writer is not None:
            await feed(self._writer, data)

    async def close_input(self) -> None:
        if self._spec.tty:
            await self.write(END_OF_INPUT)
        elif self._writer is not None:
            with suppress(OSError, RuntimeError):
                self._writer.write_eof()

    async def resize(self, columns: int, rows: int) -> None:
        size = {"h": str(rows), "w": str(columns)}
        with suppress(*_FAILURES):  # an ended command has no terminal
            await self._engine.call("POST", f"/exec/{self._exec_id}/resize", size)

    async def send_signal(self, number: int) -> None:
        with translating():
            process = _running(await self._inspection())
        if process is not None:
            await asyncio.to_thread(_signal_group, *process, number)

    async def ended(self) -> int:
        with translating():
            async for shown in self._looks():
                if not shown.get("Running") and shown.get("ExitCode") is not None:
                    self._is_over = True
                    break
        return int(shown["ExitCode"])

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        if self._is_over:
            return
        with suppress(*_FAILURES, OSError, TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._end()

    async def _end(self) -> None:
        """Kill the command, also while it starts; one that failed to start has an exit code."""
        tries = 0
        async for shown in self._looks():
            tries += 1
            if (process := _running(shown)) is not None:
                await asyncio.to_thread(_kill_session, *process)
            elif shown.get("ExitCode") is not None or tries == CLOSE_TRIES:
                return


def _running(shown: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return the process of an exec and its container while it runs."""
    if shown.get("Running") and (pid := shown.get("Pid")):
        return pid, shown["ContainerID"]
    return None


def _text(said: bytes) -> str:
    return presentable(said.decode(errors="replace").strip()) or "no reason given"


def _signal_group(leader: int, container: str, number: int) -> None:
    """Signal the process group of a command."""
    if _is_in(leader, container):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, number)


def _is_in(pid: int, container: str) -> bool:
    return any(container in group for group in groups_of(pid))


def _kill_session(leader: int, container: str) -> None:
    """Kill the processes of a command; runc makes each exec a session of its own."""
    _strike(
        lambda: {
            process.pid
            for process in all_processes()
            if leader in (process.session, process.pid) and _is_in(process.pid, container)
        }
    )


def end_left_behind(node_id: str, containers: Collection[str]) -> None:
    """Kill the commands that an earlier daemon of this node left in containers.

    Each pass reads the environment of every process once, and the cgroups of the marked ones.
    """
    ours = frozenset(containers)
    _strike(
        lambda: {
            process.pid
            for process in all_processes()
            if read_env(process.pid).get(MARK) == node_id
            and not ours.isdisjoint(CONTAINER_ID.findall("\n".join(groups_of(process.pid))))
        }
    )


def _strike(look: Callable[[], set[int]]) -> None:
    struck: set[int] = set()
    with suppress(OSError):
        while strike(look, struck):
            pass


async def start_exec(
    engine: EngineClient, socket: Path, node_id: str, container: str, spec: ExecSpec
) -> DockerExec:
    """Start a command in a container of a node."""
    env = {**spec.env, MARK: node_id}
    asked = {
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": not spec.tty,
        "Tty": spec.tty,
        "DetachKeys": DETACH_KEYS,
        "Cmd": list(spec.command),
        "Env": [f"{name}={value}" for name, value in env.items()],
        **({"WorkingDir": spec.working_dir} if spec.working_dir else {}),
    }
    made = await engine.call("POST", f"/containers/{container}/exec", None, asked)
    session = DockerExec(engine, made["Id"], spec)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await session.begin(socket)
    except BaseException:
        await to_the_end(session.close())
        raise
    return session
