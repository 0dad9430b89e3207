"""The gateway's handlers: a node's shapes and problems, for the whole fleet."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractContextManager

import msgspec
import structlog
from aiohttp import web

from agentd.core.access import Caller, Right, roles_with
from agentd.errors import (
    AgentdError,
    Forbidden,
    InvalidRequest,
    Problem,
    SlotTypeInUse,
    UnknownSlotType,
)
from agentd.events import EventLog
from agentd.http.answers import answer
from agentd.http.audit import AuditedCall, audited
from agentd.http.bodies import read_body
from agentd.http.callers import caller_of, note_id
from agentd.http.metrics import CONTENT_TYPE, exposition
from agentd.http.queries import body_of, prefers_async, query_of
from agentd.http.site import Site
from agentd.rpc.queries import CreateQuery
from agentd.rpc.requests import StopRequest
from agentd_fleet.gateway import views
from agentd_fleet.gateway.lists import Lists
from agentd_fleet.gateway.metrics import GatewayCounts, fleet_metrics
from agentd_fleet.gateway.proxy import pass_on, pass_socket
from agentd_fleet.gateway.queries import StatsQuery
from agentd_fleet.nodes.calls import NodeAnswer, Nodes
from agentd_fleet.placement.choice import read
from agentd_fleet.placement.deleter import Deleter
from agentd_fleet.placement.kernels import FleetKernels, path_of, unknown_kernel
from agentd_fleet.placement.placer import Placer
from agentd_fleet.placement.requests import FleetKernelRequest, order_of
from agentd_fleet.store.route import Store
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.fleet_view import FleetView, NodeStatus

log = structlog.get_logger()

REVISION = "Fleet-Revision"


class Gateway(Site):
    """One gateway of a fleet."""

    def __init__(self, store: Store, state: FleetState, nodes: Nodes, placer: Placer) -> None:
        super().__init__()
        self._store = store
        self._state = state
        self._nodes = nodes
        self._placer = placer
        self._kernels = FleetKernels(store, state, nodes, placer)
        self._deleter = Deleter(store, nodes, placer, self._kernels)
        self._lists = Lists(self._kernels, state)
        self._events = EventLog()
        self._counts = GatewayCounts()

    async def until_open(self, patience_s: float) -> None:
        """Return at once; each route reports itself what is not known yet."""

    def require(self, request: web.Request, caller: Caller, right: Right) -> None:
        """Refuse a caller whose role lacks the right; visibility is checked with each lookup."""
        del request
        if not caller.may(right):
            raise Forbidden(caller.name, caller.role.value, right.value, roles_with(right))

    def audited(self, request: web.Request, action: str) -> AbstractContextManager[AuditedCall]:
        return audited(self._events, None, request, action, "")

    async def readyz(self, _: web.Request) -> web.Response:
        """Answer the readiness probe: ready while the view of the nodes is current."""
        why = self._store.why_not_live()
        return answer({"status": why or "ok"}, 503 if why else 200)

    async def list_nodes(self, request: web.Request) -> web.Response:
        """List the nodes with their latest reports."""
        caller, view = caller_of(request), self._state.view
        shown = [
            views.node_view(view, node, caller.agents)
            for node in view.nodes.values()
            if caller.agents is None or not caller.agents.isdisjoint(node.offers)
        ]
        return self._answer(shown, view.revision)

    async def get_node(self, request: web.Request) -> web.Response:
        """Show one node."""
        caller, view = caller_of(request), self._state.view
        node = self._lists.node(caller, request.match_info["node"])
        return self._answer(views.node_view(view, node, caller.agents), view.revision)

    async def forget_node(self, request: web.Request) -> web.Response:
        """Forget a lost node and the routes to it."""
        caller = caller_of(request)
        node = self._lists.node(caller, request.match_info["node"])
        if node.status is not NodeStatus.LOST:
            why = f"node {node.node_id} is {node.status.value}, expected lost"
            raise InvalidRequest([Problem("node", why)])
        if not await self._store.forget(node):
            why = f"node {node.node_id} has just returned, expected lost"
            raise InvalidRequest([Problem("node", why)])
        return web.Response(status=204)

    async def list_slot_types(self, _: web.Request) -> web.Response:
        """List every slot type that any node ever offered."""
        view = self._state.view
        shown = [views.slot_type_view(slot) for slot in view.slot_types.values()]
        return self._answer(shown, view.revision)

    async def forget_slot_type(self, request: web.Request) -> web.Response:
        """Forget a slot type that no node offers any more."""
        name, view = request.match_info["slot"], self._state.view
        if name not in view.slot_types:
            raise UnknownSlotType(f"unknown slot {name}")
        if offer := view.offer_of(name):
            raise SlotTypeInUse(offer)
        await self._store.unlearn(name)
        return web.Response(status=204)

    async def get_stats(self, request: web.Request) -> web.Response:
        """Show capacity, allocated and free of every slot, for the fleet and each node."""
        caller, view = caller_of(request), self._state.view
        query = query_of(request, StatsQuery)
        content = await asyncio.to_thread(self._lists.stats, view, caller, query)
        return self._answer(content, view.revision)

    async def list_devices(self, request: web.Request) -> web.Response:
        """List the devices of all reachable nodes."""
        return self._revised(await self._lists.devices(request))

    async def create_kernel(self, request: web.Request) -> web.Response:
        """Create a kernel on a node with the requested resources."""
        view = self._state.view
        body = read_body(
            FleetKernelRequest,
            await body_of(request),
            lambda members: read(view, members.get("slots", {})),
        )
        try:
            return await self._created(request, body, view)
        except AgentdError as error:
            error.headers = {REVISION: str(view.revision)}
            raise

    async def _created(
        self, request: web.Request, body: FleetKernelRequest, view: FleetView
    ) -> web.Response:
        caller = caller_of(request)
        headers = {"Prefer": "respond-async"} if prefers_async(request) else {}
        order = order_of(body, caller, headers)
        note_id(request, "kernel", order.kernel_id)
        if query_of(request, CreateQuery).dry_run:
            placed = await self._placer.explain(caller, order, view)
            content = {"agent_id": placed.agent_id, **json.loads(placed.answer.body)}
            return self._answer({**content, "node_id": placed.node_id}, view.revision)
        with self._counts.create():
            placed = await self._placer.create(caller, order, view)
        given = placed.answer
        kept = {
            k: given.headers[k] for k in ("Location", "Preference-Applied") if k in given.headers
        }
        response = self._kernel(given, placed.node_id)
        response.headers.update({**kept, REVISION: str(view.revision)})
        return response

    async def list_kernels(self, request: web.Request) -> web.Response:
        """List the kernels of all nodes, node by node; of lost nodes, the placed ones."""
        return self._revised(await self._lists.kernels(request))

    async def get_kernel(self, request: web.Request) -> web.Response:
        """Show one kernel."""
        caller, kernel_id = caller_of(request), request.match_info["kernel"]
        place = await self._kernels.place(caller, kernel_id, request.query.get("node"))
        if place.node.status is NodeStatus.LOST and place.kept is not None:
            return self._revised(answer(unknown_kernel(place.kept.route)))
        found = await self._kernels.ask(caller, place, "GET", path_of(kernel_id))
        return self._kernel(found, place.node.node_id)

    async def stop_kernel(self, request: web.Request) -> web.Response:
        """End a kernel with TERM, then KILL; it stays listed."""
        read_body(StopRequest, await body_of(request))
        caller, kernel_id = caller_of(request), request.match_info["kernel"]
        place = await self._kernels.place(caller, kernel_id, request.query.get("node"))
        body, path = await body_of(request), path_of(kernel_id, "stop")
        found = await self._kernels.ask(caller, place, "POST", path, body)
        return self._kernel(found, place.node.node_id)

    async def delete_kernel(self, request: web.Request) -> web.Response:
        """Stop a kernel if it runs, and remove it."""
        caller, kernel_id = caller_of(request), request.match_info["kernel"]
        query = {k: v for k, v in request.query.items() if k != "node"}
        named = request.query.get("node")
        return self._raw(await self._deleter.delete(caller, kernel_id, named, query))

    async def get_logs(self, request: web.Request) -> web.StreamResponse:
        """Stream a kernel's output, byte for byte."""
        caller, kernel_id = caller_of(request), request.match_info["kernel"]
        place = await self._kernels.place(caller, kernel_id, request.query.get("node"))
        query = {k: v for k, v in request.query.items() if k != "node"}
        path = path_of(kernel_id, "logs", query=query)
        with self._streams.opened(request):
            return await pass_on(self._nodes, self._state, place.node, request, path)

    async def get_use(self, request: web.Request) -> web.Response:
        """Show the usage of a kernel."""
        caller, kernel_id = caller_of(request), request.match_info["kernel"]
        place = await self._kernels.place(caller, kernel_id, request.query.get("node"))
        found = await self._kernels.ask(caller, place, "GET", path_of(kernel_id, "stats"))
        return self._kernel(found, place.node.node_id)

    async def exec_kernel(self, request: web.Request) -> web.StreamResponse:
        """Run a command in a kernel, over a WebSocket."""
        caller, kernel_id = caller_of(request), request.match_info["kernel"]
        place = await self._kernels.place(caller, kernel_id, request.query.get("node"))
        with self._streams.opened(request, may_pause=True):
            path = path_of(kernel_id, "exec")
            return await pass_socket(self._nodes, self._state, place.node, request, path)

    async def pass_to_node(self, request: web.Request) -> web.StreamResponse:
        """Proxy a call below /v1 to one node."""
        caller, rest = caller_of(request), request.match_info["rest"]
        if request.method == "POST" and rest.endswith("/kernels"):
            why = "create kernels with POST /v1/kernels and the node in placement.nodes"
            raise InvalidRequest([Problem("rest", why)])
        if not {"", ".", ".."}.isdisjoint(rest.split("/")):
            raise InvalidRequest([Problem("rest", "expected a path without empty parts, . and ..")])
        node = self._lists.node(caller, request.match_info["node"])
        path = request.rel_url.raw_path_qs.split("/", 4)[4]
        is_socket = "Upgrade" in request.headers
        pass_it = pass_socket if is_socket else pass_on
        with self._streams.opened(request, may_pause=is_socket):
            return await pass_it(self._nodes, self._state, node, request, f"/v1/{path}")

    async def get_metrics(self, request: web.Request) -> web.Response:
        """Show the fleet in the Prometheus exposition format."""
        caller, view = caller_of(request), self._state.view
        is_live = not self._store.why_not_live()
        metrics = fleet_metrics(view, caller, self._counts, is_live=is_live)
        text = await asyncio.to_thread(exposition, metrics)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    def _answer(self, content: object, revision: int) -> web.Response:
        headers = {REVISION: str(revision)}
        if why := self._store.why_not_live():
            headers["Fleet-Stale"] = why.replace("\n", " ")[:200]
        return answer(content, headers=headers)

    def _kernel(self, given: NodeAnswer, node_id: str) -> web.Response:
        """Return a node's answer with the node id added; a problem is unchanged."""
        if given.is_error:
            return self._raw(given)
        shown = answer({**msgspec.json.decode(given.body), "node_id": node_id}, given.status)
        return self._revised(shown)

    def _revised(self, response: web.Response) -> web.Response:
        response.headers[REVISION] = str(self._state.view.revision)
        return response

    def _raw(self, given: NodeAnswer) -> web.Response:
        kept = {k: given.headers[k] for k in ("Content-Type", "Retry-After") if k in given.headers}
        return web.Response(body=given.body, status=given.status, headers=kept)
