"""Lists over nodes: a page is read node by node, and says which nodes did not answer."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from aiohttp import web
from multidict import MultiMapping

from agentd.core.access import Caller
from agentd.errors import InvalidRequest, Problem
from agentd.rpc.answers import answer
from agentd.rpc.callers import caller_of
from agentd.rpc.listing import read_labels, read_limit
from agentd_fleet import views
from agentd_fleet.kernels import FleetKernels, unknown_kernel
from agentd_fleet.state import FleetState
from agentd_fleet.view import FleetNode, FleetView

MISSING = "Fleet-Missing"
MOST_NAMED = 50


class Lists:
    """What is asked of many nodes at once."""

    def __init__(self, kernels: FleetKernels, state: FleetState) -> None:
        self._kernels = kernels
        self._state = state

    def node(self, caller: Caller, node_id: str) -> FleetNode:
        """Return a node that a caller sees: one that has an agent of its own.

        Raises:
            UnknownNode: exactly as if it did not exist.
        """
        return self._kernels.seen(caller, node_id)

    def _nodes(self, caller: Caller, query: MultiMapping[str]) -> list[FleetNode]:
        if named := query.getall("node", []):
            return [self.node(caller, node_id) for node_id in dict.fromkeys(named)]
        nodes = self._state.view.nodes
        return [
            nodes[node_id]
            for node_id in sorted(nodes)
            if caller.agents is None or not caller.agents.isdisjoint(nodes[node_id].offers)
        ]

    async def devices(self, request: web.Request) -> web.Response:
        """Answer with the devices of nodes."""
        caller, missing = caller_of(request), list[str]()
        nodes = self._nodes(caller, request.query)
        shown: list[dict[str, Any]] = []
        async for _, found in self._kernels.lists(caller, nodes, "/v1/devices", missing):
            shown += found
        return answer(shown, headers=_missing(missing))

    async def kernels(self, request: web.Request) -> web.Response:
        """Answer with the kernels of nodes, in the order of the nodes and then of creation."""
        caller, query, missing = caller_of(request), request.query, list[str]()
        nodes = self._nodes(caller, query)
        limit, after = read_limit(query), query.get("after")
        if (begin := query.get("after_node")) is not None:
            nodes = [node for node in nodes if node.node_id >= begin]
        elif after is not None:
            raise InvalidRequest([Problem("after", "goes with after_node, as Link has them")])
        filters = [(n, v) for n, v in query.items() if n in ("state", "label")]
        if limit is not None:
            return await self._page(request, nodes, filters, limit)
        shown: list[dict[str, Any]] = []
        path = f"/v1/kernels?{urlencode(filters)}"
        async for _, found in self._kernels.lists(caller, nodes, path, missing):
            shown += found
        if not filters:
            for routes in (await self._kernels.routed_to(caller, missing)).values():
                shown += [unknown_kernel(route) for route in routes]
        return answer(shown, headers=_missing(missing))

    async def _page(
        self,
        request: web.Request,
        nodes: list[FleetNode],
        filters: list[tuple[str, str]],
        limit: int,
    ) -> web.Response:
        """Answer with at most `limit` kernels, one node after the other, and where to go on."""
        caller, missing = caller_of(request), list[str]()
        begin, after = request.query.get("after_node"), request.query.get("after")
        shown: list[dict[str, Any]] = []
        for node in nodes:
            asked = [*filters, ("limit", str(limit - len(shown)))]
            if node.node_id == begin and after is not None:
                asked.append(("after", after))
            path = f"/v1/kernels?{urlencode(asked)}"
            async for _, found in self._kernels.lists(caller, [node], path, missing):
                shown += found
            if node.node_id in missing and not filters:
                past = after if node.node_id == begin and after is not None else ""
                shown += (await self._unknown(caller, node, past))[: limit - len(shown)]
            if len(shown) >= limit:
                break
        headers = _missing(missing)
        if shown and len(shown) >= limit:
            last = shown[-1]
            url = request.rel_url.update_query(
                after=str(last.get("kernel_id", "")), after_node=last["node_id"]
            )
            headers["Link"] = f'<{url}>; rel="next"'
        return answer(shown, headers=headers)

    async def _unknown(self, caller: Caller, node: FleetNode, past: str) -> list[dict[str, Any]]:
        routes = (await self._kernels.routed_to(caller, [node.node_id]))[node.node_id]
        found = sorted(routes, key=lambda route: route.kernel_id)
        return [unknown_kernel(route) for route in found if route.kernel_id > past]

    def stats(self, view: FleetView, caller: Caller, query: MultiMapping[str]) -> views.StatsView:
        """Return the sums of slots, by node too."""
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


def _missing(nodes: list[str]) -> dict[str, str]:
    """Return the header that names nodes which did not answer."""
    shown = ",".join(sorted(nodes)[:MOST_NAMED])
    more = f",… {len(nodes)} in all" if len(nodes) > MOST_NAMED else ""
    return {MISSING: (shown + more).replace("…", "...")} if nodes else {}
