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

from agentd.concurrency import complete_shielded
from agentd.core.kernel.exec_spec import STDERR, STDOUT, ExecSpec
from agentd.errors import AgentdError, CommandNotFound, InvalidRequest, Problem, RuntimeFailure
from agentd.host.cgroups.usage import read_cgroups
from agentd.host.processes import all_processes, kill_matching, read_env
from agentd.runtimes.docker.docker_client import CONTAINER_ID, DockerClient
from agentd.runtimes.docker.docker_errors import (
    DockerError,
    DockerResponseLost,
    DockerUnreachable,
    clean_message,
)
from agentd.runtimes.docker.docker_streams import read_frames
from agentd.runtimes.docker.error_translation import translate_errors
from agentd.runtimes.host.host_exec import CHUNK_BYTES, END_OF_INPUT, START_TIMEOUT_S, write_slices

_FAILURES = (DockerError, DockerUnreachable, DockerResponseLost)
_SWITCHING_PROTOCOLS = b" 101 "
_NO_COMMAND_CODES = (126, 127)
"""Exit codes that the engine uses for a command that is missing or not executable."""
POLL_S, MAX_POLL_S = 0.02, 1.0
"""Seconds between polls for the end, at first and at most; the engine has no notification."""
MAX_CLOSE_POLLS = 50
DETACH_KEYS = "ctrl-^,ctrl-],ctrl-_,ctrl-^,ctrl-],ctrl-_,ctrl-^,ctrl-]"
"""Keys that nobody types; the engine's default is used by shells and editors (ctrl-p, ctrl-q)."""
MARK = "AGENTD_EXEC"
"""A variable of each command, with the node id as its value."""


class DockerExec:
    """One exec in a container; see `Session`."""

    def __init__(self, docker: DockerClient, exec_id: str, spec: ExecSpec) -> None:
        self._docker = docker
        self._exec_id = exec_id
        self._spec = spec
        self._reader = asyncio.StreamReader()
        self._writer: asyncio.StreamWriter | None = None
        self._is_over = False

    async def start(self, socket: Path) -> None:
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
        if _SWITCHING_PROTOCOLS not in head.split(b"\r\n")[0]:
            content = await self._reader.read(CHUNK_BYTES)
            raise RuntimeFailure(f"the Docker Engine: {_output_text(content)}")
        async for inspection in self._poll_state():
            if inspection.get("Pid"):
                return
            if not inspection.get("Running") and inspection.get("ExitCode") is not None:
                raise await self._start_error(inspection.get("ExitCode"))

    async def _inspect(self) -> Any:
        return await self._docker.call("GET", f"/exec/{self._exec_id}/json")

    async def _poll_state(self) -> AsyncGenerator[Mapping[str, Any]]:
        """Poll the state of the exec at growing intervals."""
        pause_s = POLL_S
        while True:
            yield await self._inspect()
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.2, MAX_POLL_S)

    async def _start_error(self, exit_code: object) -> AgentdError:
        """Return why there is no process; the engine prints the reason as output."""
        output = b""
        async with aclosing(self.output()) as chunks:
            async for _, chunk in chunks:
                output += chunk
                if len(output) > CHUNK_BYTES:
                    break
        reason = _output_text(output)
        if "chdir to cwd" in reason:
            return InvalidRequest([Problem("working_dir", reason)])
        if exit_code in _NO_COMMAND_CODES:
            return CommandNotFound(f"command {self._spec.command[0]!r:.300}: {reason:.1000}")
        return RuntimeFailure(f"the Docker Engine: {reason}")

    async def output(self) -> AsyncGenerator[tuple[int, bytes]]:
        if self._spec.tty:
            while chunk := await self._reader.read(CHUNK_BYTES):
                yield STDOUT, chunk
            return
        async for stream, chunk in read_frames(self._reader):
            yield (STDERR if stream == STDERR else STDOUT), chunk

    async def write(self, data: bytes) -> None:
        if self._writer is not None:
            await write_slices(self._writer, data)

    async def close_input(self) -> None:
        if self._spec.tty:
            await self.write(END_OF_INPUT)
        elif self._writer is not None:
            with suppress(OSError, RuntimeError):
                self._writer.write_eof()

    async def resize(self, columns: int, rows: int) -> None:
        size = {"h": str(rows), "w": str(columns)}
        with suppress(*_FAILURES):  # an ended command has no terminal
            await self._docker.call("POST", f"/exec/{self._exec_id}/resize", size)

    async def send_signal(self, number: int) -> None:
        with translate_errors():
            process = _running_process(await self._inspect())
        if process is not None:
            await asyncio.to_thread(_signal_group, *process, number)

    async def wait(self) -> int:
        with translate_errors():
            async for inspection in self._poll_state():
                if not inspection.get("Running") and inspection.get("ExitCode") is not None:
                    self._is_over = True
                    break
        return int(inspection["ExitCode"])

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        if self._is_over:
            return
        with suppress(*_FAILURES, OSError, TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._kill_command()

    async def _kill_command(self) -> None:
        """Kill the command, also while it starts; one that failed to start has an exit code."""
        polls = 0
        async for inspection in self._poll_state():
            polls += 1
            if (process := _running_process(inspection)) is not None:
                await asyncio.to_thread(_kill_session, *process)
            elif inspection.get("ExitCode") is not None or polls == MAX_CLOSE_POLLS:
                return


def _running_process(inspection: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return the process of an exec and its container while it runs."""
    if inspection.get("Running") and (pid := inspection.get("Pid")):
        return pid, inspection["ContainerID"]
    return None


def _output_text(output: bytes) -> str:
    return clean_message(output.decode(errors="replace").strip()) or "no reason given"


def _signal_group(leader: int, container: str, number: int) -> None:
    """Signal the process group of a command."""
    if _is_in_container(leader, container):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, number)


def _is_in_container(pid: int, container: str) -> bool:
    return any(container in group for group in read_cgroups(pid))


def _kill_session(leader: int, container: str) -> None:
    """Kill the processes of a command; runc makes each exec a session of its own."""
    _kill_processes(
        lambda: {
            process.pid
            for process in all_processes()
            if leader in (process.session, process.pid) and _is_in_container(process.pid, container)
        }
    )


def kill_orphaned_execs(node_id: str, containers: Collection[str]) -> None:
    """Kill the commands that an earlier daemon of this node left in containers.

    Each pass reads the cgroups of every process once, and the environments of those in containers,
    which may never be readable.
    """
    ids = frozenset(containers)
    _kill_processes(
        lambda: {
            process.pid
            for process in all_processes()
            if not ids.isdisjoint(CONTAINER_ID.findall("\n".join(read_cgroups(process.pid))))
            and read_env(process.pid).get(MARK) == node_id
        }
    )


def _kill_processes(find_pids: Callable[[], set[int]]) -> None:
    killed: set[int] = set()
    with suppress(OSError):
        while kill_matching(find_pids, killed):
            pass


async def start_docker_exec(
    docker: DockerClient, socket: Path, node_id: str, container: str, spec: ExecSpec
) -> DockerExec:
    """Start a command in a container of a node."""
    env = {**spec.env, MARK: node_id}
    request = {
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": not spec.tty,
        "Tty": spec.tty,
        "DetachKeys": DETACH_KEYS,
        "Cmd": list(spec.command),
        "Env": [f"{name}={value}" for name, value in env.items()],
        **({"WorkingDir": spec.working_dir} if spec.working_dir else {}),
    }
    response = await docker.call("POST", f"/containers/{container}/exec", None, request)
    session = DockerExec(docker, response["Id"], spec)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await session.start(socket)
    except BaseException:
        await complete_shielded(session.close())
        raise
    return session
