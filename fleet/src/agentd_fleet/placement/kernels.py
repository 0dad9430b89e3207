"""Existing kernels, found by their route or on a named node."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, quote, urlencode

import msgspec

from agentd.client.paths import next_query
from agentd.core.access import Caller
from agentd.errors import (
    InvalidRequest,
    NodeUnavailable,
    Problem,
    Unavailable,
    UnknownKernel,
    UnknownNode,
)
from agentd_fleet.nodes.calls import (
    CALL_TIMEOUT_S,
    CREATE_TIMEOUT_S,
    NodeAnswer,
)
from agentd_fleet.placement.attempts import node_of_route
from agentd_fleet.placement.backend import FleetBackend
from agentd_fleet.placement.placer import Placer
from agentd_fleet.store.route import KernelRoute, RouteProgress, StoredRoute, StoreUnavailable
from agentd_fleet.view.fleet_view import FleetNode, NodeStatus
from agentd_fleet.view.reports import UNREADABLE

ROWS_DECODER = msgspec.json.Decoder(list[dict[str, Any]])
LIST_TIMEOUT_S = 5.0
MAX_CONCURRENT_LISTS = 32
"""Nodes that are called concurrently for lists."""


class NodeList(msgspec.Struct, frozen=True):
    """The page of a node's list: its rows, its bytes, and `after` of the next page, if any."""

    rows: list[dict[str, Any]]
    size: int
    after: str


class KernelLocation(msgspec.Struct, frozen=True):
    """The node of a kernel, and its route if the fleet placed it."""

    node: FleetNode
    stored: StoredRoute | None


class FleetKernels:
    """Calls about kernels of any node."""

    def __init__(self, backend: FleetBackend, placer: Placer) -> None:
        self._store, self._state, self._nodes = backend.store, backend.state, backend.nodes
        self._placer = placer

    def visible_node(self, caller: Caller, node_id: str) -> FleetNode:
        """Return a node with an agent that the caller sees.

        Raises:
            UnknownNode: the node does not exist, or the caller must not see it.
            StoreUnavailable: the node is unknown and the store is unavailable.
        """
        node = self._state.node(node_id)
        if node is None and (reason := self._store.stale_reason()):
            raise StoreUnavailable(f"nodes are unknown while the store is unavailable: {reason}")
        if node is None or (caller.agents is not None and caller.agents.isdisjoint(node.offers)):
            raise UnknownNode(f"unknown node {node_id}")
        return node

    async def locate(self, caller: Caller, kernel_id: str, node_id: str | None) -> KernelLocation:
        """Return the location of a kernel that the caller may see.

        Raises:
            UnknownKernel: the fleet placed no such kernel, and no node is named.
            UnknownNode: the named node does not exist.
        """
        try:
            await self._placer.wait_confirmed(kernel_id)
            stored = await self._store.route(kernel_id)
        except Unavailable:
            if node_id is None:
                raise
            stored = None
        if stored is not None and not caller.sees(stored.route.agent_id):
            stored = None
        if node_id is not None:
            if stored is None or stored.route.node_id != node_id:
                return KernelLocation(self.visible_node(caller, node_id), None)
            return KernelLocation(node_of_route(self._state, stored.route), stored)
        if stored is None:
            raise unknown_kernel_error(kernel_id)
        return KernelLocation(node_of_route(self._state, stored.route), stored)

    async def call(
        self,
        caller: Caller,
        location: KernelLocation,
        method: str,
        path: str,
        body: bytes | None = None,
    ) -> NodeAnswer:
        """Call the node of a kernel; drop the route if the kernel does not exist any more.

        Raises:
            NodeUnavailable: the node does not answer.
        """
        patience_s = CALL_TIMEOUT_S if method == "GET" else CREATE_TIMEOUT_S
        answer = await self._nodes.call(
            location.node, caller, method, path, body=body, patience_s=patience_s
        )
        stored = location.stored
        if (
            answer.is_unknown_kernel
            and stored is not None
            and stored.route.progress is RouteProgress.PLACED
        ):
            await self._store.delete_route(stored.route.kernel_id, stored.revision)
        return answer

    async def list_devices(
        self, caller: Caller, nodes: Sequence[FleetNode], missing: list[str]
    ) -> list[dict[str, Any]]:
        """Return the devices of nodes in order; nodes without an answer are added to `missing`."""
        semaphore = asyncio.Semaphore(MAX_CONCURRENT_LISTS)

        async def devices_of(node: FleetNode) -> NodeList | None:
            async with semaphore:
                return await self._list(caller, node, "/v1/devices")

        rows: list[dict[str, Any]] = []
        lists = await asyncio.gather(*map(devices_of, nodes))
        for node, page in zip(nodes, lists, strict=True):
            if page is None:
                missing.append(node.node_id)
            else:
                rows += page.rows
        return rows

    async def list_kernels(
        self, caller: Caller, node: FleetNode, query: Sequence[tuple[str, str]]
    ) -> NodeList | None:
        """Return a page of the kernels of one node, None if it does not answer."""
        return await self._list(caller, node, f"/v1/kernels?{urlencode(query)}")

    async def _list(self, caller: Caller, node: FleetNode, path: str) -> NodeList | None:
        if node.status is not NodeStatus.READY:
            return None
        try:
            answer = await self._nodes.call(node, caller, "GET", path, patience_s=LIST_TIMEOUT_S)
        except NodeUnavailable:
            return None
        if answer.status == HTTPStatus.UNPROCESSABLE_ENTITY:
            raise InvalidRequest([Problem("", str(answer.error()))])
        if answer.is_error:
            return None
        try:
            rows = ROWS_DECODER.decode(answer.body)
        except UNREADABLE:
            return None
        after = parse_qs(next_query(answer.headers.get("Link")) or "").get("after", [""])
        rows = [{**row, "node_id": node.node_id} for row in rows]
        return NodeList(rows, len(answer.body), after[0])

    async def routes_to(
        self, caller: Caller, nodes: Collection[str], past: tuple[str, str] = ("", "")
    ) -> list[KernelRoute]:
        """Return the routes to unavailable nodes, by node and id."""
        matching: list[KernelRoute] = []
        if nodes:
            async for page in self._store.routes():
                routes = (stored.route for stored in page)
                matching += [r for r in routes if r.node_id in nodes and caller.sees(r.agent_id)]
        ordered = sorted(matching, key=lambda route: (route.node_id, route.kernel_id))
        return [route for route in ordered if (route.node_id, route.kernel_id) > past]


def unknown_kernel_error(kernel_id: str) -> UnknownKernel:
    """Return the error for a kernel id without a route."""
    return UnknownKernel(
        f"unknown kernel {kernel_id} in this fleet; for a kernel created directly on a node,"
        " add ?node=ID"
    )


def unknown_kernel_view(route: KernelRoute) -> dict[str, Any]:
    """Return the view of a kernel whose node does not answer."""
    return {
        "kernel_id": route.kernel_id,
        "agent_id": route.agent_id,
        "node_id": route.node_id,
        "state": "unknown",
        "created_by": route.created_by,
        "reason": f"node {route.node_id} does not answer",
    }


def kernel_path(kernel_id: str, *more: str, query: Mapping[str, str] | None = None) -> str:
    """Return the path of a kernel on its node."""
    path = "/".join(["/v1/kernels", quote(kernel_id, safe=""), *more])
    return f"{path}?{urlencode(query)}" if query else path
