"""Observation of a node's kernels in an engine, by inspecting containers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

import structlog
from msgspec.structs import replace

from agentd.core.kernel.observation import Listing, ObservedKernel
from agentd.core.kernel.plan import kernel_name
from agentd.core.kernel.states import LIVE, Kernel, KernelRef, ObservedState
from agentd.core.names import quote_untrusted
from agentd.errors import RuntimeUnavailable
from agentd.host.cgroups.usage import CgroupCounters, find_counters
from agentd.runtimes.docker.container_config import KERNEL_LABEL, NODE_LABEL, RECORD_LABEL
from agentd.runtimes.docker.docker_client import DockerClient
from agentd.runtimes.docker.docker_errors import DockerError, DockerResponseLost
from agentd.runtimes.docker.docker_streams import DESTROY, ContainerEvent
from agentd.runtimes.docker.error_translation import (
    NOT_FOUND,
    errors_as_unavailable,
    suppress_not_found,
)
from agentd.runtimes.docker.inspection import (
    container_kernel_id,
    container_labels,
    parse_inspection,
    summary_as_inspection,
    validate_inspection,
)
from agentd.runtimes.docker.last_seen import OutageLog

log = structlog.get_logger()

MAX_PARALLEL_INSPECTS = 16
INSPECT_TIMEOUT_S = 5.0
"""Seconds that an engine may take to describe one container, or itself."""
LIST_TIMEOUT_S = 20.0
"""Seconds that a list, or the removal of an interrupted create, may take."""


class ContainerObserver:
    """Observes the containers of one node."""

    def __init__(
        self, docker: DockerClient, node_id: str, last_seen: OutageLog | None = None
    ) -> None:
        self._docker = docker
        self._node_id = node_id
        self._last_seen = last_seen or OutageLog()
        self._pids: dict[str, int] = {}
        """The first process of each running container, by id."""
        self._counters: dict[str, CgroupCounters] = {}
        self._misnamed: dict[str, str] = {}
        self._ignored: frozenset[str] = frozenset()

    async def list_kernels(self) -> Listing:
        """Return every kernel; a container that cannot be inspected is as the list describes it."""
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                with errors_as_unavailable():
                    return await self._inspect_all()
        except TimeoutError:
            reason = f"no complete list of the engine's containers within {LIST_TIMEOUT_S:g} s"
            raise RuntimeUnavailable(reason) from None

    async def _inspect_all(self) -> Listing:
        filters = json.dumps({"label": [f"{NODE_LABEL}={self._node_id}"]})
        items = self._docker.iterate_list("/containers/json", {"all": "1", "filters": filters})
        async with aclosing(items):
            summaries = [summary_as_inspection(item) async for item in items]
        node_summaries = [
            s for s in summaries if container_labels(s).get(NODE_LABEL) == self._node_id
        ]
        semaphore = asyncio.Semaphore(MAX_PARALLEL_INSPECTS)
        kernels: dict[str, ObservedKernel] = {}
        misnamed: list[Mapping[str, Any]] = []

        async def inspect(summary: Mapping[str, Any]) -> None:
            async with semaphore:
                inspection = await self._inspect_or_summary(summary)
            if inspection is not None and self._has_own_name(inspection):
                kernel = self.observe_inspection(inspection)
                kernels[kernel.kernel_id] = kernel
            elif inspection is not None:
                misnamed.append(inspection)

        await asyncio.gather(*(inspect(s) for s in node_summaries if container_kernel_id(s)))
        for inspection in misnamed:
            kernel = self.observe_inspection(inspection)
            if kernel.kernel_id not in kernels and await self._was_renamed(inspection):
                kernels[kernel.kernel_id] = kernel
        invalid = (
            s
            for s in node_summaries
            if KERNEL_LABEL in container_labels(s) and container_kernel_id(s) is None
        )
        reasons = tuple(map(_describe_ignored, invalid))
        for reason in set(reasons) - self._ignored:
            log.warning("container.ignored", reason=reason)
        self._ignored = frozenset(reasons)
        return Listing(tuple(kernels.values()), ignored=reasons)

    async def _inspect_or_summary(self, summary: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Inspect one listed container; fall back to the list's view if only this call fails."""
        try:
            return await self.inspect_container(summary["Id"])
        except (TimeoutError, DockerResponseLost):
            pass
        except DockerError as error:
            if error.status == NOT_FOUND:
                return None
        return summary

    async def find(self, ref: KernelRef) -> ObservedKernel | None:
        """Return one kernel, found by handle, by name, or by its latest event.

        None if it does not exist. A container with another name that never ran is not a kernel.
        """
        inspection = await self._inspect_if_exists(ref.handle) if ref.handle else None
        if inspection and self._is_kernel(inspection, ref.kernel_id):
            return self.observe_inspection(inspection)
        inspection = await self._inspect_if_exists(kernel_name(self._node_id, ref.kernel_id))
        if inspection and self._has_own_name(inspection):
            return self.observe_inspection(inspection)
        container = self._misnamed.get(ref.kernel_id)
        if container is None or not (inspection := await self._inspect_if_exists(container)):
            return None
        with errors_as_unavailable():
            if self._is_kernel(inspection, ref.kernel_id) and await self._was_renamed(inspection):
                kernel = self.observe_inspection(inspection)
                return kernel if kernel.state is not ObservedState.CREATED else None
        return None

    def record_event(self, event: ContainerEvent) -> None:
        """Remember the container of a kernel whose name is not its own."""
        if event.name != kernel_name(self._node_id, event.kernel_id):
            self._misnamed[event.kernel_id] = event.container
        if event.action == DESTROY:
            self._pids.pop(event.container, None)
        if event.action == DESTROY and self._misnamed.get(event.kernel_id) == event.container:
            del self._misnamed[event.kernel_id]

    def forget_events(self) -> None:
        """Forget the events, because a list follows."""
        self._misnamed.clear()

    def _is_kernel(self, inspection: Mapping[str, Any], kernel_id: str) -> bool:
        labels = container_labels(inspection)
        return (labels.get(NODE_LABEL), labels.get(KERNEL_LABEL)) == (self._node_id, kernel_id)

    async def _was_renamed(self, inspection: Mapping[str, Any]) -> bool:
        """Return whether a kernel was renamed; if not, its labels come from its image."""
        with suppress_not_found():
            image = await self._docker.call("GET", f"/images/{inspection['Image']}/json")
            inherited = (image.get("Config") or {}).get("Labels") or {}
            return inherited.get(RECORD_LABEL) != container_labels(inspection).get(RECORD_LABEL)
        return True

    async def _inspect_if_exists(self, container: str) -> Mapping[str, Any] | None:
        with errors_as_unavailable(), suppress_not_found():
            return await self.inspect_container(container)
        return None

    async def inspect_container(self, container: str) -> Mapping[str, Any]:
        """Return the inspection of a container."""
        path = f"/containers/{container}/json"
        return validate_inspection(
            await self._docker.call("GET", path, timeout_s=INSPECT_TIMEOUT_S)
        )

    def find_counters(self, kernels: Sequence[Kernel]) -> Mapping[str, CgroupCounters]:
        """Return the cgroup counters of running containers, found by their first processes."""
        handles = {k.kernel_id: k.handle for k in kernels if k.handle and k.state in LIVE}
        by_handle = {h: known for h, known in self._counters.items() if h in handles.values()}
        for handle in handles.values():
            pid = self._pids.get(handle)
            if handle not in by_handle and pid and (counters := find_counters(pid, handle)).folders:
                by_handle[handle] = replace(counters, has_network=True)
        self._counters = by_handle
        return {k: by_handle[handle] for k, handle in handles.items() if handle in by_handle}

    def observe_inspection(self, inspection: Mapping[str, Any]) -> ObservedKernel:
        """Return the kernel of a container, with the reason if the engine ended it."""
        kernel = parse_inspection(inspection)
        if kernel.is_alive:
            self._pids[kernel.handle] = inspection["State"].get("Pid", 0)
            return kernel
        ending = self._last_seen.explain_ending(kernel.ending)
        return kernel if ending is kernel.ending else replace(kernel, ending=ending)

    def _has_own_name(self, inspection: Mapping[str, Any]) -> bool:
        """Return whether a container has the name that its labels demand."""
        kernel_id = container_kernel_id(inspection)
        if kernel_id is None or container_labels(inspection).get(NODE_LABEL) != self._node_id:
            return False
        return bool(inspection["Name"] == f"/{kernel_name(self._node_id, kernel_id)}")


def _describe_ignored(summary: Mapping[str, Any]) -> str:
    """Describe a container that claims to be a kernel and cannot be one."""
    kernel_id = quote_untrusted(container_labels(summary).get(KERNEL_LABEL))
    return (
        f"container {summary['Id'][:12]} is ignored and holds nothing: its label {KERNEL_LABEL}"
        f" is {kernel_id}, expected a kernel id"
    )
