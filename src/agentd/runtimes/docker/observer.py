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
from agentd.core.names import shortened
from agentd.host.cgroups.usage import CgroupCounters, counters_of
from agentd.runtimes.docker.container_config import KERNEL_LABEL, NODE_LABEL, RECORD_LABEL
from agentd.runtimes.docker.engine import EngineClient
from agentd.runtimes.docker.engine_errors import EngineAnswerLost, EngineError
from agentd.runtimes.docker.error_translation import NOT_FOUND, absent_is_fine, proving
from agentd.runtimes.docker.inspection import (
    inspected,
    kernel_of,
    labels_of,
    observed_kernel,
    summarized,
)
from agentd.runtimes.docker.last_seen import LastSeen
from agentd.runtimes.docker.streams import DESTROY, ContainerEvent

log = structlog.get_logger()

INSPECTS_AT_ONCE = 16
ASK_TIMEOUT_S = 5.0
"""Seconds that an engine may take to describe one container, or itself."""
LIST_TIMEOUT_S = 20.0
"""Seconds that a list, or the removal of an interrupted create, may take."""


class ContainerObserver:
    """Observes the containers of one node."""

    def __init__(
        self, docker: EngineClient, node_id: str, last_seen: LastSeen | None = None
    ) -> None:
        self._docker = docker
        self._node_id = node_id
        self._last_seen = last_seen or LastSeen()
        self._pids: dict[str, int] = {}
        """The first process of each running container, by id."""
        self._counters: dict[str, CgroupCounters] = {}
        self._misnamed: dict[str, str] = {}
        self._ignored: frozenset[str] = frozenset()

    async def listing(self) -> Listing:
        """Return every kernel; a container that cannot be inspected is as the list describes it."""
        with proving():
            async with asyncio.timeout(LIST_TIMEOUT_S):
                return await self._inspect_all()

    async def _inspect_all(self) -> Listing:
        filters = json.dumps({"label": [f"{NODE_LABEL}={self._node_id}"]})
        items = self._docker.items("/containers/json", {"all": "1", "filters": filters})
        async with aclosing(items):
            summaries = [summarized(item) async for item in items]
        node_summaries = [s for s in summaries if labels_of(s).get(NODE_LABEL) == self._node_id]
        semaphore = asyncio.Semaphore(INSPECTS_AT_ONCE)
        kernels: dict[str, ObservedKernel] = {}
        misnamed: list[Mapping[str, Any]] = []

        async def inspect(summary: Mapping[str, Any]) -> None:
            async with semaphore:
                inspection = await self._inspect_or_summary(summary)
            if inspection is not None and self._has_own_name(inspection):
                kernel = self.observed(inspection)
                kernels[kernel.kernel_id] = kernel
            elif inspection is not None:
                misnamed.append(inspection)

        await asyncio.gather(*(inspect(s) for s in node_summaries if kernel_of(s)))
        for inspection in misnamed:
            kernel = self.observed(inspection)
            if kernel.kernel_id not in kernels and await self._was_renamed(inspection):
                kernels[kernel.kernel_id] = kernel
        invalid = (
            s for s in node_summaries if KERNEL_LABEL in labels_of(s) and kernel_of(s) is None
        )
        reasons = tuple(map(_describe_ignored, invalid))
        for reason in set(reasons) - self._ignored:
            log.warning("container.ignored", reason=reason)
        self._ignored = frozenset(reasons)
        return Listing(tuple(kernels.values()), ignored=reasons)

    async def _inspect_or_summary(self, summary: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Inspect one listed container; fall back to the list's view if only this call fails."""
        try:
            return await self.inspection(summary["Id"])
        except (TimeoutError, EngineAnswerLost):
            pass
        except EngineError as error:
            if error.status == NOT_FOUND:
                return None
        return summary

    async def find(self, ref: KernelRef) -> ObservedKernel | None:
        """Return one kernel, found by handle, by name, or by its latest event.

        None if it does not exist. A container with another name that never ran is not a kernel.
        """
        inspection = await self._inspect_if_exists(ref.handle) if ref.handle else None
        if inspection and self._is_kernel(inspection, ref.kernel_id):
            return self.observed(inspection)
        inspection = await self._inspect_if_exists(kernel_name(self._node_id, ref.kernel_id))
        if inspection and self._has_own_name(inspection):
            return self.observed(inspection)
        container = self._misnamed.get(ref.kernel_id)
        if container is None or not (inspection := await self._inspect_if_exists(container)):
            return None
        with proving():
            if self._is_kernel(inspection, ref.kernel_id) and await self._was_renamed(inspection):
                kernel = self.observed(inspection)
                return kernel if kernel.state is not ObservedState.CREATED else None
        return None

    def heard(self, event: ContainerEvent) -> None:
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
        labels = labels_of(inspection)
        return (labels.get(NODE_LABEL), labels.get(KERNEL_LABEL)) == (self._node_id, kernel_id)

    async def _was_renamed(self, inspection: Mapping[str, Any]) -> bool:
        """Return whether a kernel was renamed; if not, its labels come from its image."""
        with absent_is_fine():
            image = await self._docker.call("GET", f"/images/{inspection['Image']}/json")
            inherited = (image.get("Config") or {}).get("Labels") or {}
            return inherited.get(RECORD_LABEL) != labels_of(inspection).get(RECORD_LABEL)
        return True

    async def _inspect_if_exists(self, container: str) -> Mapping[str, Any] | None:
        with proving(), absent_is_fine():
            return await self.inspection(container)
        return None

    async def inspection(self, container: str) -> Mapping[str, Any]:
        """Return the inspection of a container."""
        path = f"/containers/{container}/json"
        return inspected(await self._docker.call("GET", path, timeout_s=ASK_TIMEOUT_S))

    def counters(self, kernels: Sequence[Kernel]) -> Mapping[str, CgroupCounters]:
        """Return the cgroup counters of running containers, found by their first processes."""
        handles = {k.kernel_id: k.handle for k in kernels if k.handle and k.state in LIVE}
        by_handle = {h: known for h, known in self._counters.items() if h in handles.values()}
        for handle in handles.values():
            pid = self._pids.get(handle)
            if handle not in by_handle and pid and (counters := counters_of(pid, handle)).folders:
                by_handle[handle] = replace(counters, has_network=True)
        self._counters = by_handle
        return {k: by_handle[handle] for k, handle in handles.items() if handle in by_handle}

    def observed(self, inspection: Mapping[str, Any]) -> ObservedKernel:
        """Return the kernel of a container, with the reason if the engine ended it."""
        kernel = observed_kernel(inspection)
        if kernel.is_alive:
            self._pids[kernel.handle] = inspection["State"].get("Pid", 0)
            return kernel
        ending = self._last_seen.explain(kernel.ending)
        return kernel if ending is kernel.ending else replace(kernel, ending=ending)

    def _has_own_name(self, inspection: Mapping[str, Any]) -> bool:
        """Return whether a container has the name that its labels demand."""
        kernel_id = kernel_of(inspection)
        if kernel_id is None or labels_of(inspection).get(NODE_LABEL) != self._node_id:
            return False
        return bool(inspection["Name"] == f"/{kernel_name(self._node_id, kernel_id)}")


def _describe_ignored(summary: Mapping[str, Any]) -> str:
    """Describe a container that claims to be a kernel and cannot be one."""
    kernel_id = shortened(labels_of(summary).get(KERNEL_LABEL))
    return (
        f"container {summary['Id'][:12]} is ignored and holds nothing: its label {KERNEL_LABEL}"
        f" is {kernel_id}, expected a kernel id"
    )
