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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from aiodocker import Docker, DockerError
from aiodocker.containers import DockerContainer

from agentd.adapters.docker_answers import (
    CONFLICT,
    CONNECTION_FAILED,
    NOT_FOUND,
    absent_is_fine,
    is_lost_answer,
    listing,
    translated,
    translating,
    unknown,
)
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
    ImageNotFound,
    InvalidRequest,
    Problem,
    RuntimeFailure,
    RuntimeUnavailable,
)
from agentd.plugin_api import Features

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
        self._features: Features | None = None

    async def close(self) -> None:
        await self._docker.close()
        await self._connector.close()

    async def features(self) -> Features:
        if self._features is None:
            try:
                info = await self._docker.system.info()
            except (DockerError, OSError, aiohttp.ClientError, TimeoutError):
                return Features(self.name)
            cdi_spec_dirs = tuple(map(str, info.get("CDISpecDirs") or ()))
            self._features = Features(
                self.name, bool(cdi_spec_dirs), device_requests=True, cdi_spec_dirs=cdi_spec_dirs
            )
        return self._features

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
        except (DockerError, aiohttp.ClientError, OSError) as error:
            if is_lost_answer(error):
                raise unknown(plan, error) from error
            raise translated(error, plan) from error
        try:
            await _to_the_end(container.start())
            shown = await container.show()
            _verify_devices(shown, plan.edits.device_nodes)
        except BaseException as error:
            await self._undo(container, plan, error)
            raise translated(error, plan) from error
        return self._found(shown)

    async def _create(
        self, plan: KernelPlan, config: dict[str, Any], progress: Callable[[KernelState], None]
    ) -> DockerContainer:
        try:
            return await self._made(plan, config)
        except DockerError as error:
            if error.status != NOT_FOUND:
                raise
        progress(KernelState.PULLING)
        image = plan.spec.image or ""
        try:
            await self._docker.images.pull(image)
        except DockerError as error:
            if error.status == CONNECTION_FAILED:
                raise RuntimeUnavailable(error.message) from error
            raise ImageNotFound(f"image {image}: {error.message}") from error
        progress(KernelState.CREATING)
        return await self._made(plan, config)

    async def _made(self, plan: KernelPlan, config: dict[str, Any]) -> DockerContainer:
        making = asyncio.ensure_future(self._docker.containers.create(config, name=plan.name))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError as error:
            await asyncio.wait([making])
            if making.exception() is None:
                await self._undo(making.result(), plan, error)
            elif is_lost_answer(making.exception()):
                raise unknown(plan, error) from error
            raise

    async def _undo(
        self, container: DockerContainer, plan: KernelPlan, error: BaseException
    ) -> None:
        """Remove a container that was created and is not wanted; by id, never by name.

        Raises:
            OutcomeUnknown: the engine does not confirm that it is gone.
        """
        try:
            await _to_the_end(container.delete(force=True, v=True))
        except (DockerError, aiohttp.ClientError, OSError) as failed:
            if not (isinstance(failed, DockerError) and failed.status == NOT_FOUND):
                raise unknown(plan, error) from error

    async def stop(self, kernel_id: str, handle: str, timeout_s: float | None) -> None:
        grace_s = self._stop_timeout_s if timeout_s is None else timeout_s
        with translating(), absent_is_fine():
            await self._docker.containers.container(handle).stop(t=math.ceil(grace_s))

    async def remove(self, kernel_id: str, handle: str) -> None:
        container = self._docker.containers.container(handle)
        with translating(), absent_is_fine():
            try:
                await container.delete(force=True, v=True)
            except DockerError as error:
                if error.status != CONFLICT:
                    raise
                await container.wait(condition="removed")  # somebody else is removing it

    async def discard(self, kernel_id: str, handle: str) -> bool:
        with translating(), absent_is_fine():
            try:
                await self._docker.containers.container(handle).delete(v=True)
            except DockerError as error:
                if error.status == CONFLICT:
                    return False
                raise
        return True

    async def list(self) -> Sequence[FoundKernel]:
        filters = json.dumps({"label": [f"{NODE_LABEL}={self._node_id}"]})
        places = asyncio.Semaphore(INSPECTS_AT_ONCE)

        async def shown(summary: DockerContainer) -> Mapping[str, Any] | None:
            async with places:
                return await self._shown(summary)

        with listing():
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

    async def find(self, kernel_id: str, handle: str | None = None) -> FoundKernel | None:
        if handle and (shown := await self._inspected(handle)):
            labels = shown["Config"].get("Labels") or {}
            if (labels.get(NODE_LABEL), labels.get(KERNEL_LABEL)) == (self._node_id, kernel_id):
                return self._found(shown)
        shown = await self._inspected(kernel_name(self._node_id, kernel_id))
        return self._found(shown) if shown and self._is_ours(shown) else None

    async def _inspected(self, container: str) -> Mapping[str, Any] | None:
        with listing(), absent_is_fine():
            return await self._docker.containers.container(container).show()
        return None

    async def follow(self) -> AsyncIterator[str]:
        filters = {"type": ["container"], "label": [f"{NODE_LABEL}={self._node_id}"]}
        params = {"filters": json.dumps(filters)}
        with translating():
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
        with translating():
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


async def _to_the_end(step: Awaitable[_T]) -> _T:
    """Let a step of the engine end before a cancellation takes effect."""
    task = asyncio.ensure_future(step)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
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
