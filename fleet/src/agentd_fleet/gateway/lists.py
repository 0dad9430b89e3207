"""Lists across nodes: a page is read node by node and names the nodes that did not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlencode

from aiohttp import web
from multidict import MultiMapping

from agentd.core.access import Caller
from agentd.errors import InvalidRequest, Problem, UnknownNode
from agentd.http.answers import answer
from agentd.http.callers import caller_of
from agentd.http.queries import read_labels, read_limit
from agentd_fleet.gateway import views
from agentd_fleet.placement.kernels import FleetKernels, unknown_kernel
from agentd_fleet.store.route import KernelRoute
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.fleet_view import FleetNode, FleetView, NodeStatus

MISSING = "Fleet-Missing"
MOST_NAMED = 50
AHEAD = 8
"""Nodes that are called concurrently for one page."""


class Lists:
    """Calls that need answers of many nodes."""

    def __init__(self, kernels: FleetKernels, state: FleetState) -> None:
        self._kernels = kernels
        self._state = state

    def node(self, caller: Caller, node_id: str) -> FleetNode:
        """Return a node with an agent that the caller sees.

        Raises:
            UnknownNode: the node does not exist, or the caller must not see it.
        """
        return self._kernels.seen(caller, node_id)

    def _nodes(self, caller: Caller, query: MultiMapping[str]) -> list[FleetNode]:
        """Return the named nodes, or all that a caller sees.

        The agents of a lost node may be unknown: a caller sees it by its kernels.
        """
        nodes = self._state.view.nodes
        if named := query.getall("node", []):
            ids = dict.fromkeys(named)
            return [
                nodes[node_id]
                if node_id in nodes and _is_forgetful(nodes[node_id])
                else self.node(caller, node_id)
                for node_id in ids
            ]
        return [
            nodes[node_id]
            for node_id in sorted(nodes)
            if caller.agents is None
            or _is_forgetful(nodes[node_id])
            or not caller.agents.isdisjoint(nodes[node_id].offers)
        ]

    async def devices(self, request: web.Request) -> web.Response:
        """Return the devices of nodes."""
        caller, missing = caller_of(request), list[str]()
        nodes = self._nodes(caller, request.query)
        shown: list[dict[str, Any]] = []
        async for _, found in self._kernels.lists(caller, nodes, "/v1/devices", missing):
            shown += found
        told = self._told(caller, missing, (), request.query)
        return answer(shown, headers=_missing(told))

    async def kernels(self, request: web.Request) -> web.Response:
        """Return the kernels of nodes, by node and then by creation."""
        caller, query, missing = caller_of(request), request.query, list[str]()
        nodes = self._nodes(caller, query)
        limit, after = read_limit(query), query.get("after")
        if (begin := query.get("after_node")) is not None:
            nodes = [node for node in nodes if node.node_id >= begin]
        elif after is not None:
            raise InvalidRequest([Problem("after", "requires after_node; use the URL in Link")])
        filters = [(n, v) for n, v in query.items() if n in ("state", "label")]
        if limit is not None:
            return await self._page(request, nodes, filters, limit)
        shown: list[dict[str, Any]] = []
        path = f"/v1/kernels?{urlencode(filters)}"
        async for _, found in self._kernels.lists(caller, nodes, path, missing):
            shown += found
        routes = [] if filters else await self._kernels.routed_to(caller, frozenset(missing))
        shown += map(unknown_kernel, routes)
        return answer(shown, headers=_missing(self._told(caller, missing, routes, query)))

    def _told(
        self,
        caller: Caller,
        missing: list[str],
        routes: Iterable[KernelRoute],
        query: MultiMapping[str],
    ) -> list[str]:
        """Return the missing nodes that a caller may see.

        Raises:
            UnknownNode: the request names a node that the caller must not see.
        """
        seen = {route.node_id for route in routes}
        named = query.getall("node", [])
        told = []
        for node_id in missing:
            try:
                self.node(caller, node_id)
            except UnknownNode:
                if node_id not in seen:
                    if node_id in named:
                        raise
                    continue
            told.append(node_id)
        return told

    async def _page(
        self,
        request: web.Request,
        nodes: list[FleetNode],
        filters: list[tuple[str, str]],
        limit: int,
    ) -> web.Response:
        """Return at most `limit` kernels, node after node, with a link to the next page.

        A few nodes are called concurrently, so that hanging ones delay the page only once. Routes
        to unavailable nodes are read once.
        """
        caller, missing = caller_of(request), list[str]()
        begin, after = request.query.get("after_node", ""), request.query.get("after", "")
        shown: list[dict[str, Any]] = []
        routes: list[KernelRoute] | None = None
        for at in range(0, len(nodes), AHEAD):
            some = nodes[at : at + AHEAD]
            asked = [*filters, ("limit", str(limit - len(shown)))]
            found = await asyncio.gather(
                *(
                    self._kernels.list_of(
                        caller,
                        node,
                        [*asked, ("after", after)] if after and node.node_id == begin else asked,
                    )
                    for node in some
                )
            )
            for node, rows in zip(some, found, strict=True):
                if len(shown) >= limit:
                    break
                if rows is not None:
                    shown += rows[: limit - len(shown)]
                    continue
                missing.append(node.node_id)
                if filters:
                    continue
                if routes is None:
                    left = frozenset(n.node_id for n in nodes)
                    routes = await self._kernels.routed_to(caller, left, (begin, after))
                mine = [route for route in routes if route.node_id == node.node_id]
                shown += [unknown_kernel(route) for route in mine[: limit - len(shown)]]
            if len(shown) >= limit:
                break
        headers = _missing(self._told(caller, missing, routes or (), request.query))
        if shown and len(shown) >= limit:
            last = shown[-1]
            url = request.rel_url.update_query(
                after=str(last.get("kernel_id", "")), after_node=last["node_id"]
            )
            headers["Link"] = f'<{url}>; rel="next"'
        return answer(shown, headers=headers)

    def stats(self, view: FleetView, caller: Caller, query: MultiMapping[str]) -> views.StatsView:
        """Return the sums of slots, also by node."""
        named = [self.node(caller, node_id).node_id for node_id in query.getall("node", [])] or None
        agents = frozenset(query.getall("agent", [])) or None
        if caller.agents is not None:
            agents = caller.agents if agents is None else agents & caller.agents
        labels = dict(read_labels(query))
        sums = view.statistics(named, agents=agents, labels=labels)
        nodes = {
            node_id: views.uses_view(view, part)
            for node_id in named or view.nodes
            if node_id in view.nodes
            and view.nodes[node_id].has(labels)
            and (agents is None or not agents.isdisjoint(view.nodes[node_id].offers))
            and (part := view.statistics([node_id], agents=agents)) is not None
        }
        return {"revision": view.revision, "slots": views.uses_view(view, sums), "nodes": nodes}


def _is_forgetful(node: FleetNode) -> bool:
    """Return whether a node is lost and its agents are unknown."""
    return node.status is NodeStatus.LOST and not node.offers


def _missing(nodes: list[str]) -> dict[str, str]:
    """Return the header that names the nodes without an answer."""
    shown = ",".join(sorted(nodes)[:MOST_NAMED])
    more = f",… {len(nodes)} in total" if len(nodes) > MOST_NAMED else ""
    return {MISSING: (shown + more).replace("…", "...")} if nodes else {}
