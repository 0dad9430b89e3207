"""Kernels as containers of a Docker Engine, through aiodocker.

The labels on a container are the truth about it. A container is ours only if its name is
the one that its labels call for: an image made from a kernel inherits the labels, and
not the name. Only a "not found" from the engine proves that a container is gone;
everything else that goes wrong is a state of the engine.

API: https://docs.docker.com/reference/api/engine/version/v1.41/
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from aiodocker import Docker, DockerError
from aiodocker.containers import DockerContainer

from agentd.adapters.docker_config import (
    AGENT_LABEL,
    DEVICES_LABEL,
    KERNEL_LABEL,
    NODE_LABEL,
    RECORD_LABEL,
    container_config,
    mount_problems,
)
from agentd.core.edits import DeviceNode
from agentd.core.kernel import Ending, KernelSpec, KernelState
from agentd.core.plan import KernelPlan, kernel_name
from agentd.core.reconcile import FoundKernel, FoundState
from agentd.errors import (
    AgentdError,
    CommandNotFound,
    ImageNotFound,
    InvalidRequest,
    OutcomeUnknown,
    Problem,
    RuntimeFailure,
    RuntimeUnavailable,
)

CONNECTION_FAILED = 900
"""The status that aiodocker gives to a request without an answer."""

NOT_FOUND, CONFLICT = 404, 409
INSPECTS_AT_ONCE = 16
_EVENTS = {"start", "die", "oom", "pause", "unpause", "destroy", "rename"}
_STATES = {
    "created": FoundState.CREATED,
    "running": FoundState.RUNNING,
    "restarting": FoundState.RUNNING,
    "paused": FoundState.PAUSED,
}
_T = TypeVar("_T")


class DockerRuntime:
    """Runs containers; see `agentd.services.interfaces.Runtime`."""

    name = "docker"
    minimum_memory_bytes = 6 * 2**20
    """The engine refuses less (Engine 20.10, "Minimum memory limit allowed is 6MB")."""

    unenforced: frozenset[str] = frozenset()

    def __init__(
        self,
        socket: Path,
        node_id: str,
        network: str,
        allowed_mounts: Sequence[Path],
        stop_timeout_s: float,
    ) -> None:
        self._node_id = node_id
        self._network = network
        self._allowed_mounts = tuple(allowed_mounts)
        self._stop_timeout_s = stop_timeout_s
        self._connector = aiohttp.UnixConnector(str(socket), limit=0)
        self._docker = Docker("unix://localhost", connector=self._connector)

    async def close(self) -> None:
        await self._docker.close()
        await self._connector.close()

    async def check(self, spec: KernelSpec) -> None:
        problems = list(mount_problems(spec.mounts, self._allowed_mounts))
        if not spec.image:
            problems.append(Problem("image", "is missing; the docker runtime runs images"))
        if problems:
            raise InvalidRequest(problems)

    async def create(
        self, plan: KernelPlan, progress: Callable[[KernelState], None]
    ) -> FoundKernel:
        progress(KernelState.CREATING)
        config = container_config(plan, self._network)
        try:
            container = await self._create(plan, config, progress)
            await _uninterrupted(container.start())
            shown = await container.show()
            _verify_devices(shown, plan.edits.device_nodes)
        except BaseException as error:
            await self._undo(plan, error)
            raise _translated(error, plan) from error
        return self._found(shown)

    async def _create(
        self, plan: KernelPlan, config: dict[str, Any], progress: Callable[[KernelState], None]
    ) -> DockerContainer:
        containers = self._docker.containers
        try:
            return await _uninterrupted(containers.create(config, name=plan.name))
        except DockerError as error:
            if error.status != NOT_FOUND:
                raise
        progress(KernelState.PULLING)
        image = plan.spec.image or ""
        try:
            await self._docker.images.pull(image)
        except DockerError as error:
            if error.status == CONNECTION_FAILED:
                raise
            raise ImageNotFound(f"image {image}: {error.message}") from error
        progress(KernelState.CREATING)
        return await _uninterrupted(containers.create(config, name=plan.name))

    async def _undo(self, plan: KernelPlan, error: BaseException) -> None:
        """Leave nothing of a create that failed.

        Raises:
            OutcomeUnknown: the engine was asked, and may have a container, or make one yet.
        """
        if isinstance(error, ImageNotFound) or _never_asked(error) or _is_refused_name(error):
            return
        try:
            await asyncio.shield(self._docker.containers.container(plan.name).delete(force=True))
        except DockerError as failed:
            is_settled = failed.status == NOT_FOUND and not _is_lost_answer(error)
            if not is_settled:
                kernel_id = plan.spec.kernel_id
                raise OutcomeUnknown(
                    f"the engine did not say what became of kernel {kernel_id}: {error}"
                ) from error

    async def stop(self, kernel_id: str, handle: str, timeout_s: float | None) -> None:
        grace_s = self._stop_timeout_s if timeout_s is None else timeout_s
        with _translating(), _absent_is_fine():
            await self._docker.containers.container(handle).stop(t=math.ceil(grace_s))

    async def remove(self, kernel_id: str, handle: str) -> None:
        container = self._docker.containers.container(handle)
        with _translating(), _absent_is_fine():
            try:
                await container.delete(force=True, v=True)
            except DockerError as error:
                if error.status != CONFLICT:
                    raise
                await container.wait(condition="removed")  # somebody else is removing it

    async def list(self) -> Sequence[FoundKernel]:
        filters = json.dumps({"label": [f"{NODE_LABEL}={self._node_id}"]})
        places = asyncio.Semaphore(INSPECTS_AT_ONCE)

        async def shown(summary: DockerContainer) -> Mapping[str, Any] | None:
            async with places:
                return await self._shown(summary)

        with _translating():
            summaries = await self._docker.containers.list(all=True, filters=filters)
            answers = await asyncio.gather(*(shown(summary) for summary in summaries))
        ours = [answer for answer in answers if answer is not None and self._is_ours(answer)]
        return [self._found(answer) for answer in ours]

    async def _shown(self, summary: DockerContainer) -> Mapping[str, Any] | None:
        """Inspect one container of a list; what the list said of it if that fails alone."""
        try:
            return await self._docker.containers.container(summary.id).show()
        except DockerError as error:
            if error.status == NOT_FOUND:
                return None
            if error.status == CONNECTION_FAILED:
                raise
        listed = summary._container  # noqa: SLF001 - aiodocker has no other way to the list's entry
        return {
            "Id": summary.id,
            "Name": (listed.get("Names") or [""])[0],
            "State": {"Status": listed.get("State", "running")},
            "Config": {"Labels": listed.get("Labels", {})},
        }

    async def find(self, kernel_id: str) -> FoundKernel | None:
        name = kernel_name(self._node_id, kernel_id)
        with _translating():
            try:
                shown = await self._docker.containers.container(name).show()
            except DockerError as error:
                if error.status == NOT_FOUND:
                    return None
                raise
        return self._found(shown) if self._is_ours(shown) else None

    async def follow(self) -> AsyncIterator[str]:
        filters = {"type": ["container"], "label": [f"{NODE_LABEL}={self._node_id}"]}
        params = {"filters": json.dumps(filters)}
        with _translating():
            async with self._docker._query(  # noqa: SLF001 - its events drop the moment of connection
                "events", params=params, timeout=aiohttp.ClientTimeout()
            ) as response:
                try:
                    yield ""
                    async for line in response.content:
                        event = json.loads(line)
                        attributes = event.get("Actor", {}).get("Attributes", {})
                        if event.get("Action") in _EVENTS and KERNEL_LABEL in attributes:
                            yield attributes[KERNEL_LABEL]
                finally:
                    response.close()

    async def logs(
        self, kernel_id: str, handle: str, *, follow: bool, tail: int | None
    ) -> AsyncIterator[bytes]:
        params = {
            "stdout": "1",
            "stderr": "1",
            "follow": "1" if follow else "0",
            "tail": "all" if tail is None else str(tail),
        }
        with _translating():
            async with self._docker._query(  # noqa: SLF001 - aiodocker decodes logs as UTF-8
                f"containers/{handle}/logs", params=params, timeout=aiohttp.ClientTimeout()
            ) as response:
                try:
                    async for chunk in _payloads(response.content):
                        yield chunk
                finally:
                    response.close()

    def _is_ours(self, shown: Mapping[str, Any]) -> bool:
        labels = shown["Config"].get("Labels") or {}
        expected = kernel_name(self._node_id, labels.get(KERNEL_LABEL, ""))
        return labels.get(NODE_LABEL) == self._node_id and shown["Name"] == f"/{expected}"

    def _found(self, shown: Mapping[str, Any]) -> FoundKernel:
        labels, state = shown["Config"].get("Labels") or {}, shown["State"]
        limits = shown.get("HostConfig", {})
        cores = limits.get("CpusetCpus")
        return FoundKernel(
            kernel_id=labels[KERNEL_LABEL],
            agent_id=labels.get(AGENT_LABEL, ""),
            runtime=self.name,
            handle=shown["Id"],
            state=_STATES.get(state["Status"], FoundState.EXITED),
            record=labels.get(RECORD_LABEL, ""),
            statement=labels.get(DEVICES_LABEL, ""),
            started_at=_seconds(state.get("StartedAt")),
            ending=Ending(
                exit_code=state.get("ExitCode"),
                oom_killed=bool(state.get("OOMKilled")),
                finished_at=_seconds(state.get("FinishedAt")),
                reason=state.get("Error") or "",
            ),
            cores=tuple(cores.split(",")) if cores else None,
            memory_bytes=limits.get("Memory") or None,
        )


def _verify_devices(shown: Mapping[str, Any], nodes: Sequence[DeviceNode]) -> None:
    """See from inside that every device file is there.

    Raises:
        RuntimeFailure: one is not; the engine dropped it.
    """
    pid = shown["State"].get("Pid")
    for node in nodes if pid else ():
        path = f"/proc/{pid}/root/{node.container_path.lstrip('/')}"
        with suppress(PermissionError, ProcessLookupError):
            if not _exists(path) and _exists(f"/proc/{pid}/root"):
                raise RuntimeFailure(f"the engine started it without {node.container_path}")


def _exists(path: str) -> bool:
    """Tell whether a path is there; PermissionError where that cannot be told."""
    try:
        Path(path).stat()
    except FileNotFoundError:
        return False
    return True


async def _uninterrupted(step: Awaitable[_T]) -> _T:
    """Let a step of the engine end before a cancellation takes effect."""
    task = asyncio.ensure_future(step)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _never_asked(error: BaseException) -> bool:
    return isinstance(error.__context__, aiohttp.ClientConnectorError)


def _is_lost_answer(error: BaseException) -> bool:
    if isinstance(error, DockerError):
        return error.status == CONNECTION_FAILED
    return isinstance(error, (aiohttp.ClientError, OSError, TimeoutError))


def _is_refused_name(error: BaseException) -> bool:
    return isinstance(error, DockerError) and error.status == CONFLICT


def _translated(error: BaseException, plan: KernelPlan | None = None) -> BaseException:
    """Return the error of agentd that says what the engine's means."""
    if isinstance(error, DockerError):
        if error.status == CONNECTION_FAILED:
            return RuntimeUnavailable(error.message)
        message = error.message
        if plan is not None and _is_no_command(message):
            command = plan.spec.command[0] if plan.spec.command else "the image's command"
            return CommandNotFound(f"command {command!r}: {message.rpartition('exec: ')[2]}")
        return RuntimeFailure(message)
    if isinstance(error, AgentdError) or not isinstance(error, Exception):
        return error
    if isinstance(error, (aiohttp.ClientError, OSError, TimeoutError)):
        return RuntimeUnavailable(f"{type(error).__name__}: {error}")
    return error


def _is_no_command(message: str) -> bool:
    return "exec: " in message and any(
        why in message
        for why in ("executable file not found", "no such file or directory", "permission denied")
    )


@contextmanager
def _translating() -> Iterator[None]:
    try:
        yield
    except (DockerError, aiohttp.ClientError, OSError, TimeoutError) as error:
        raise _translated(error) from error


@contextmanager
def _absent_is_fine() -> Iterator[None]:
    try:
        yield
    except DockerError as error:
        if error.status != NOT_FOUND:
            raise


def _seconds(text: str | None) -> float | None:
    """Read the engine's time, nanoseconds and all; None for its zero time."""
    if not text or text.startswith("0001-"):
        return None
    whole, _, rest = text.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{rest or 0}")


async def _payloads(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Take the frames off a log: 8 bytes of header (stream, 0, 0, 0, big-endian length)."""
    while True:
        try:
            header = await stream.readexactly(8)
            left = int.from_bytes(header[4:], "big")
            while left:
                chunk = await stream.read(min(left, 64 * 1024))
                if not chunk:
                    return
                left -= len(chunk)
                yield chunk
        except asyncio.IncompleteReadError:
            return
