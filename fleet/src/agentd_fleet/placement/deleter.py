"""Deletes of kernels, which free their ids at every gateway.

The route is written before the node is called: if that fails, nothing is done, and no gateway
places a kernel under the route meanwhile.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from agentd.core.access import Caller
from agentd.core.names import is_name
from agentd.errors import NodeUnavailable
from agentd_fleet.nodes.calls import CREATE_TIMEOUT_S, NodeAnswer
from agentd_fleet.placement.attempts import node_of_route
from agentd_fleet.placement.backend import FleetBackend
from agentd_fleet.placement.kernels import FleetKernels, kernel_path, unknown_kernel_error
from agentd_fleet.placement.placer import Placer
from agentd_fleet.store.route import KernelRoute, RouteProgress, RouteUnreadable, StoredRoute
from agentd_fleet.view.fleet_view import FleetNode

STOP_TIMEOUT_MARGIN_S = 150.0
"""Seconds that a node may take beyond a kernel's stop timeout."""


class _Call(msgspec.Struct, frozen=True):
    """A call to a node and its time limit."""

    path: str
    patience_s: float


def _call_timeout(query: Mapping[str, str]) -> float:
    """Return the time limit of a node: by the requested timeout, else by its own setting."""
    try:
        return min(CREATE_TIMEOUT_S, max(0.0, float(query["timeout"])) + STOP_TIMEOUT_MARGIN_S)
    except (KeyError, ValueError):
        return CREATE_TIMEOUT_S


class Deleter:
    """Deletes kernels of any node."""

    def __init__(self, backend: FleetBackend, placer: Placer, kernels: FleetKernels) -> None:
        self._store, self._state, self._nodes = backend.store, backend.state, backend.nodes
        self._placer = placer
        self._kernels = kernels

    async def delete(
        self, caller: Caller, kernel_id: str, node_id: str | None, query: Mapping[str, str]
    ) -> NodeAnswer:
        """Delete a kernel on the named node, or on the node of its route.

        Raises:
            Unavailable: the store is unavailable and the node was not called, or the node does not
                answer.
            UnknownKernel: there is no route, and no node is named.
        """
        call = _Call(kernel_path(kernel_id, query=query), _call_timeout(query))
        await self._placer.wait_confirmed(kernel_id)
        while True:
            try:
                return await self._delete_by_route(caller, kernel_id, node_id, call)
            except RouteUnreadable as unreadable:
                if node_id is None:
                    raise
                node = self._kernels.visible_node(caller, node_id)
                if (
                    answer := await self._delete_unreadable(caller, unreadable, node, call)
                ) is not None:
                    return answer

    async def _delete_by_route(
        self, caller: Caller, kernel_id: str, node_id: str | None, call: _Call
    ) -> NodeAnswer:
        first_answer: NodeAnswer | None = None
        while True:
            stored = visible = await self._store.route(kernel_id)
            if visible is not None and not caller.sees(visible.route.agent_id):
                visible = None
            if first_answer is not None and (
                visible is None or visible.route.progress is RouteProgress.PLACING
            ):
                return first_answer  # the id was free, and may be in use again
            if visible is None or node_id not in (None, visible.route.node_id):
                if node_id is None:
                    raise unknown_kernel_error(kernel_id)
                node = self._kernels.visible_node(caller, node_id)
                if stored is not None:
                    return await self._call_delete(node, caller, call)
                if (refusal := await self._write_route(caller, kernel_id, node)) is not None:
                    return refusal
                continue
            answer, is_complete = await self._delete_routed(caller, visible, call)
            first_answer = first_answer or answer
            if is_complete and first_answer is not None:
                return first_answer

    async def _write_route(
        self, caller: Caller, kernel_id: str, node: FleetNode
    ) -> NodeAnswer | None:
        """Write a route to a kernel that the fleet did not place, so that it can be deleted.

        Returns:
            The node's answer if it has no such kernel, otherwise None.
        """
        answer = await self._nodes.call(node, caller, "GET", kernel_path(kernel_id))
        if answer.is_error:
            return answer
        if not is_name(agent_id := answer.content().get("agent_id")):
            raise NodeUnavailable(f"node {node.node_id}: kernel {kernel_id} without an agent")
        route = KernelRoute(
            kernel_id=kernel_id,
            node_id=node.node_id,
            agent_id=agent_id,
            request_hash="",
            owner=secrets.token_hex(8),
            progress=RouteProgress.PLACED,
        )
        await self._store.put_route(route, 0)  # if another gateway wrote one, that one is used next
        return None

    async def _delete_routed(
        self, caller: Caller, stored: StoredRoute, call: _Call
    ) -> tuple[NodeAnswer | None, bool]:
        """Return the node's answer, None if it was not called, and whether the delete is complete.

        A kernel that is being placed is looked up first: if its node has none, a request for it may
        be in progress, and the sweep resolves that.
        """
        node = node_of_route(self._state, stored.route)
        taken = await self._take_over(stored, stored.route.progress)
        if taken is not None and taken.route.progress is RouteProgress.PLACING:
            kernel = kernel_path(taken.route.kernel_id)
            kernel_answer = await self._nodes.call(node, caller, "GET", kernel)
            if kernel_answer.is_error:
                return kernel_answer, True
            taken = await self._take_over(taken, RouteProgress.PLACED)
        if taken is None:
            return None, False
        answer = await self._call_delete(node, caller, call)
        if answer.is_error and not answer.is_unknown_kernel:
            return answer, True
        return answer, await self._store.delete_route(taken.route.kernel_id, taken.revision)

    async def _delete_unreadable(
        self, caller: Caller, unreadable: RouteUnreadable, node: FleetNode, call: _Call
    ) -> NodeAnswer | None:
        """Delete a kernel with an unreadable route; None if the route has changed.

        A route written by a newer gateway is left alone.
        """
        if (revision := await self._store.rewrite(unreadable)) is None:
            return None
        answer = await self._call_delete(node, caller, call)
        is_own_route = unreadable.node_id in ("", node.node_id) and not unreadable.is_newer
        if is_own_route and not answer.is_error:
            await self._store.delete_route(unreadable.kernel_id, revision)
        return answer

    async def _call_delete(self, node: FleetNode, caller: Caller, call: _Call) -> NodeAnswer:
        return await self._nodes.call(node, caller, "DELETE", call.path, patience_s=call.patience_s)

    async def _take_over(self, stored: StoredRoute, progress: RouteProgress) -> StoredRoute | None:
        """Take over a route; None if it has changed."""
        route = replace(stored.route, owner=secrets.token_hex(8), progress=progress)
        revision = await self._store.put_route(route, stored.revision)
        return None if revision is None else StoredRoute(route, revision)
