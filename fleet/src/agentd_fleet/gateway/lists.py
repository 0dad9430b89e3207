"""Lists across nodes: a page is read node by node and names the nodes that did not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from aiohttp import web

from agentd.core.access import Caller
from agentd.errors import InvalidRequest, Problem, UnknownNode
from agentd.http.callers import caller_of
from agentd.http.queries import MAX_PAGE_BYTES, query_of
from agentd.http.responses import json_response
from agentd_fleet.gateway import views
from agentd_fleet.gateway.queries import FleetKernelsQuery, NodesQuery, StatsQuery
from agentd_fleet.placement.kernels import (
    MAX_CONCURRENT_LISTS,
    FleetKernels,
    NodeList,
    unknown_kernel_view,
)
from agentd_fleet.store.route import KernelRoute
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.fleet_view import FleetNode, FleetView, NodeStatus

MISSING_HEADER = "Fleet-Missing"
MAX_NAMED = 50


class FleetLists:
    """Calls that need answers of many nodes."""

    def __init__(self, kernels: FleetKernels, state: FleetState) -> None:
        self._kernels = kernels
        self._state = state

    def _nodes(self, caller: Caller, node_ids: Sequence[str]) -> list[FleetNode]:
        """Return the named nodes, or all that a caller sees.

        The agents of a lost node may be unknown: a caller sees it by its kernels.
        """
        nodes = self._state.view.nodes
        if node_ids:
            return [
                nodes[node_id]
                if node_id in nodes and _has_unknown_agents(nodes[node_id])
                else self._kernels.visible_node(caller, node_id)
                for node_id in sorted(set(node_ids))
            ]
        return [
            nodes[node_id]
            for node_id in sorted(nodes)
            if caller.agents is None
            or _has_unknown_agents(nodes[node_id])
            or not caller.agents.isdisjoint(nodes[node_id].offers)
        ]

    async def devices(self, request: web.Request) -> web.Response:
        """Return the devices of nodes."""
        caller, missing = caller_of(request), list[str]()
        node_ids = query_of(request, NodesQuery).node
        rows = await self._kernels.list_devices(caller, self._nodes(caller, node_ids), missing)
        visible = self._visible_missing(caller, missing, (), node_ids)
        return json_response(rows, headers=_missing_header(visible))

    async def kernels(self, request: web.Request) -> web.Response:
        """Return the kernels of nodes, by node and then by creation."""
        caller, query = caller_of(request), query_of(request, FleetKernelsQuery)
        nodes = self._nodes(caller, query.node)
        if query.after_node is not None:
            nodes = [node for node in nodes if node.node_id >= query.after_node]
        elif query.after is not None:
            raise InvalidRequest([Problem("after", "requires after_node; use the URL in Link")])
        page = KernelPage(self._kernels, caller, query)
        await page.read(nodes)
        headers = _missing_header(
            self._visible_missing(caller, page.missing, page.routes or (), query.node)
        )
        if page.following is not None:
            node_id, after = page.following
            names = {"after_node": node_id} | ({"after": after} if after else {})
            url = request.rel_url.without_query_params("after").update_query(names)
            headers["Link"] = f'<{url}>; rel="next"'
        return json_response(page.rows, headers=headers)

    def _visible_missing(
        self,
        caller: Caller,
        missing: list[str],
        routes: Iterable[KernelRoute],
        node_ids: Sequence[str],
    ) -> list[str]:
        """Return the missing nodes that a caller may see.

        Raises:
            UnknownNode: the request names a node that the caller must not see.
        """
        routed = {route.node_id for route in routes}
        visible = []
        for node_id in missing:
            try:
                self._kernels.visible_node(caller, node_id)
            except UnknownNode:
                if node_id not in routed:
                    if node_id in node_ids:
                        raise
                    continue
            visible.append(node_id)
        return visible

    def stats(self, view: FleetView, caller: Caller, query: StatsQuery) -> views.StatsView:
        """Return the sums of slots, also by node."""
        node_ids = [
            self._kernels.visible_node(caller, node_id).node_id for node_id in query.node
        ] or None
        agents = frozenset(query.agent) or None
        if caller.agents is not None:
            agents = caller.agents if agents is None else agents & caller.agents
        labels = dict(query.labels)
        sums = view.statistics(node_ids, agents=agents, labels=labels)
        nodes = {
            node_id: views.usage_views(view.slot_types, usages)
            for node_id in node_ids or view.nodes
            if node_id in view.nodes
            and view.nodes[node_id].has_labels(labels)
            and (agents is None or not agents.isdisjoint(view.nodes[node_id].offers))
            and (usages := view.statistics([node_id], agents=agents)) is not None
        }
        return {
            "revision": view.revision,
            "slots": views.usage_views(view.slot_types, sums),
            "nodes": nodes,
        }


class KernelPage:
    """One page of kernels, node after node.

    A few nodes are called concurrently, so that hanging ones delay the page only once. Routes to
    unavailable nodes are read once. The page ends within a node only where that node ended its own
    page, so that the node's cursor is also the gateway's.
    """

    def __init__(self, kernels: FleetKernels, caller: Caller, query: FleetKernelsQuery) -> None:
        self._kernels = kernels
        self._caller = caller
        self._limit = query.limit
        self._first, self._after = query.after_node or "", query.after or ""
        self._filters = [("state", state.value) for state in query.state]
        self._filters += [("label", label) for label in query.label]
        self.rows: list[dict[str, Any]] = []
        self.missing: list[str] = []
        self.routes: list[KernelRoute] | None = None
        self.following: tuple[str, str] | None = None
        """The node with which the next page begins, and `after` there."""

    async def read(self, nodes: Sequence[FleetNode]) -> None:
        """Read the page from the first of these nodes on."""
        size, lists = 0, list[NodeList | None]()
        for index, node in enumerate(nodes):
            room = self._limit - len(self.rows)
            if room <= 0 or size >= MAX_PAGE_BYTES:
                self.following = node.node_id, ""
                return
            if not lists:
                chunk = nodes[index : index + MAX_CONCURRENT_LISTS]
                lists = [*reversed(await asyncio.gather(*map(self._list, chunk)))]
            page = lists.pop()
            if page is not None and len(page.rows) > room:
                page = await self._list(node)
            if page is None:
                page = await self._list_routed(node, nodes, room)
            self.rows += page.rows[:room]
            size += page.size
            if page.after and page.rows:
                self.following = node.node_id, page.after
                return

    async def _list(self, node: FleetNode) -> NodeList | None:
        query = [*self._filters, ("limit", str(self._limit - len(self.rows)))]
        if node.node_id == self._first and self._after:
            query.append(("after", self._after))
        return await self._kernels.list_kernels(self._caller, node, query)

    async def _list_routed(
        self, node: FleetNode, nodes: Sequence[FleetNode], room: int
    ) -> NodeList:
        """Return the kernels that are routed to a node without an answer, by id.

        Their cursor has the time 0: once the node answers, all of its kernels come after it.
        """
        self.missing.append(node.node_id)
        if self._filters:
            return NodeList([], 0, "")
        if self.routes is None:
            time, _, last_id = self._after.partition("~")
            position = self._first, last_id if time == "0" else ""
            self.routes = await self._kernels.routes_to(
                self._caller, frozenset(node.node_id for node in nodes), position
            )
        routes = [route for route in self.routes if route.node_id == node.node_id]
        after = f"0~{routes[room - 1].kernel_id}" if len(routes) > room else ""
        return NodeList([unknown_kernel_view(route) for route in routes[:room]], 0, after)


def _has_unknown_agents(node: FleetNode) -> bool:
    """Return whether a node is lost and its agents are unknown."""
    return node.status is NodeStatus.LOST and not node.offers


def _missing_header(nodes: list[str]) -> dict[str, str]:
    """Return the header that names the nodes without an answer."""
    names = ",".join(sorted(nodes)[:MAX_NAMED])
    rest = f",… {len(nodes)} in total" if len(nodes) > MAX_NAMED else ""
    return {MISSING_HEADER: (names + rest).replace("…", "...")} if nodes else {}
