"""The gateway's handlers: a node's shapes and problems, for the whole fleet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import TypeVar

import structlog
from aiohttp import web
from msgspec.structs import replace

from agentd.concurrency import start_pool
from agentd.core.access import Caller, Right, roles_with
from agentd.core.names import is_name
from agentd.errors import (
    AgentdError,
    Forbidden,
    InvalidRequest,
    Problem,
    SlotTypeInUse,
    UnknownNode,
    UnknownSlotType,
)
from agentd.events import EventLog
from agentd.http.audit import AuditedCall, audit_call
from agentd.http.bodies import read_body
from agentd.http.callers import attach_id, caller_of
from agentd.http.prometheus import CONTENT_TYPE, render_exposition
from agentd.http.queries import prefers_async, query_of, receive_body
from agentd.http.responses import json_response
from agentd.http.site import Site
from agentd.rpc.queries import CreateQuery
from agentd.rpc.requests import SignalRequest, StopRequest
from agentd_fleet.gateway import views
from agentd_fleet.gateway.lists import FleetLists
from agentd_fleet.gateway.metrics import GatewayCounts, fleet_metrics
from agentd_fleet.gateway.proxy import pick_headers, proxy_request, proxy_websocket
from agentd_fleet.gateway.queries import CordonRequest, StatsQuery
from agentd_fleet.nodes.calls import NodeAnswer
from agentd_fleet.placement.backend import FleetBackend
from agentd_fleet.placement.choice import read
from agentd_fleet.placement.deleter import Deleter
from agentd_fleet.placement.kernels import (
    FleetKernels,
    KernelLocation,
    kernel_path,
    unknown_kernel_view,
)
from agentd_fleet.placement.placer import Placer
from agentd_fleet.placement.requests import FleetKernelRequest, to_placement_request
from agentd_fleet.view.fleet_view import Cordon, FleetNode, FleetView, NodeStatus

log = structlog.get_logger()
_T = TypeVar("_T")

REVISION_HEADER = "Fleet-Revision"
APPLY_TIMEOUT_S = 3.0
"""Seconds in which a gateway sees its own change in the store."""


class Gateway(Site):
    """One gateway of a fleet."""

    def __init__(self, backend: FleetBackend, placer: Placer) -> None:
        super().__init__()
        self._store, self._state, self._nodes = backend.store, backend.state, backend.nodes
        self._placer = placer
        self._kernels = FleetKernels(backend, placer)
        self._deleter = Deleter(backend, placer, self._kernels)
        self._lists = FleetLists(self._kernels, backend.state)
        self._events = EventLog()
        self._counts = GatewayCounts()
        self._threads = start_pool(2)
        """Not the event loop's, whose threads may all wait for the name service."""

    async def wait_open(self, patience_s: float) -> None:
        """Return at once; each route reports itself what is not known yet."""

    def authorize(self, request: web.Request, caller: Caller, right: Right) -> None:
        """Refuse a caller whose role lacks the right; visibility is checked with each lookup."""
        del request
        if not caller.has_right(right):
            raise Forbidden(caller.name, caller.role.value, right.value, roles_with(right))

    def audit_call(self, request: web.Request, action: str) -> AbstractContextManager[AuditedCall]:
        return audit_call(self._events, None, request, action, "")

    async def readyz(self, _: web.Request) -> web.Response:
        """Answer the readiness probe: ready while the view of the nodes is current."""
        reason = self._store.stale_reason()
        return json_response({"status": reason or "ok"}, 503 if reason else 200)

    async def list_nodes(self, request: web.Request) -> web.Response:
        """List the nodes with their latest reports."""
        caller, view = caller_of(request), self._state.view
        rows = [
            views.node_view(view, node, caller.agents)
            for node in view.nodes.values()
            if caller.agents is None or not caller.agents.isdisjoint(node.offers)
        ]
        return self._revision_answer(rows, view.revision)

    async def get_node(self, request: web.Request) -> web.Response:
        """Show one node."""
        caller, view, node = caller_of(request), self._state.view, self._requested_node(request)
        return self._revision_answer(views.node_view(view, node, caller.agents), view.revision)

    def _requested_node(self, request: web.Request) -> FleetNode:
        """Return the node that a request names."""
        return self._kernels.visible_node(caller_of(request), request.match_info["node"])

    async def forget_node(self, request: web.Request) -> web.Response:
        """Forget a node that does not report, and the routes to it."""
        node = self._requested_node(request)
        if node.status is NodeStatus.READY or not await self._store.forget(node):
            reason = f"node {node.node_id} reports or has just returned, expected lost"
            raise InvalidRequest([Problem("node", reason)])
        return web.Response(status=204)

    async def cordon_node(self, request: web.Request) -> web.Response:
        """Keep new kernels off a node until it is uncordoned; those that run go on."""
        reason = read_body(CordonRequest, await receive_body(request)).reason
        node, by = self._requested_node(request), caller_of(request).name
        cordon = node.cordon or Cordon(reason, by, datetime.now(UTC).isoformat())
        if reason not in ("", cordon.reason):
            cordon = replace(cordon, reason=reason, by=by)
        return await self._set_cordon(request, node, cordon)

    async def uncordon_node(self, request: web.Request) -> web.Response:
        """Place kernels on a node again."""
        return await self._set_cordon(request, self._requested_node(request), None)

    async def _set_cordon(
        self, request: web.Request, node: FleetNode, cordon: Cordon | None
    ) -> web.Response:
        """Cordon or uncordon a node, and show it once this gateway applies that.

        It is written even if the node is so already: the view of this gateway may be an old one.

        Raises:
            UnknownNode: this is an address, without etcd, whose node has never answered.
        """
        if not is_name(node.node_id):
            raise UnknownNode(f"the node at {node.node_id} has not told its node id yet")
        await self._store.set_cordon(node.node_id, cordon)
        with contextlib.suppress(TimeoutError):  # another gateway changed it, too
            async with asyncio.timeout(APPLY_TIMEOUT_S):
                await self._state.wait_cordon(node.node_id, cordon)
        return await self.get_node(request)

    async def list_slot_types(self, _: web.Request) -> web.Response:
        """List every slot type that any node ever offered."""
        view = self._state.view
        rows = [views.slot_type_view(slot) for slot in view.slot_types.values()]
        return self._revision_answer(rows, view.revision)

    async def forget_slot_type(self, request: web.Request) -> web.Response:
        """Forget a slot type that no node offers any more."""
        name, view = request.match_info["slot"], self._state.view
        if name not in view.slot_types:
            raise UnknownSlotType(f"unknown slot {name}")
        if offer := view.slot_in_use_reason(name):
            raise SlotTypeInUse(offer)
        await self._store.forget_slot_type(name)
        return web.Response(status=204)

    async def get_stats(self, request: web.Request) -> web.Response:
        """Show capacity, allocated and free of every slot, for the fleet and each node."""
        caller, view = caller_of(request), self._state.view
        query = query_of(request, StatsQuery)
        content = await self.compute(partial(self._lists.stats, view, caller, query))
        return self._revision_answer(content, view.revision)

    async def list_devices(self, request: web.Request) -> web.Response:
        """List the devices of all reachable nodes."""
        return self._with_revision(await self._lists.devices(request))

    async def create_kernel(self, request: web.Request) -> web.Response:
        """Create a kernel on a node with the requested resources."""
        view = self._state.view
        body = read_body(
            FleetKernelRequest,
            await receive_body(request),
            lambda members: read(view, members.get("slots", {})),
        )
        try:
            return await self._create(request, body, view)
        except AgentdError as error:
            error.headers = {REVISION_HEADER: str(view.revision)}
            raise

    async def _create(
        self, request: web.Request, body: FleetKernelRequest, view: FleetView
    ) -> web.Response:
        caller = caller_of(request)
        headers = {"Prefer": "respond-async"} if prefers_async(request) else {}
        placement_request = to_placement_request(body, caller, headers)
        attach_id(request, "kernel", placement_request.kernel_id)
        if query_of(request, CreateQuery).dry_run:
            placed = await self._placer.explain(caller, placement_request, view)
            content = {"agent_id": placed.agent_id, **placed.answer.content()}
            return self._revision_answer({**content, "node_id": placed.node_id}, view.revision)
        with self._counts.create():
            placed = await self._placer.create(caller, placement_request, view)
        node_answer = placed.answer
        response = self._kernel_response(node_answer, placed.node_id)
        passed_headers = pick_headers(node_answer.headers, ("Location", "Preference-Applied"))
        response.headers.update({**passed_headers, REVISION_HEADER: str(view.revision)})
        return response

    async def _locate(self, request: web.Request) -> KernelLocation:
        """Return the location of the requested kernel."""
        kernel_id, node_id = request.match_info["kernel"], request.query.get("node")
        return await self._kernels.locate(caller_of(request), kernel_id, node_id)

    async def _call_node(
        self,
        request: web.Request,
        location: KernelLocation,
        method: str,
        *more: str,
        body: bytes | None = None,
    ) -> web.Response:
        """Call the node of the requested kernel and return its answer."""
        path = kernel_path(request.match_info["kernel"], *more)
        node_answer = await self._kernels.call(caller_of(request), location, method, path, body)
        return self._kernel_response(node_answer, location.node.node_id)

    async def list_kernels(self, request: web.Request) -> web.Response:
        """List the kernels of all nodes, node by node; of lost nodes, the placed ones."""
        return self._with_revision(await self._lists.kernels(request))

    async def get_kernel(self, request: web.Request) -> web.Response:
        """Show one kernel."""
        location = await self._locate(request)
        if location.node.status is NodeStatus.LOST and location.stored is not None:
            return self._with_revision(json_response(unknown_kernel_view(location.stored.route)))
        return await self._call_node(request, location, "GET")

    async def stop_kernel(self, request: web.Request) -> web.Response:
        """End a kernel with TERM, then KILL; it stays listed."""
        body = await receive_body(request)
        read_body(StopRequest, body)
        location = await self._locate(request)
        return await self._call_node(request, location, "POST", "stop", body=body)

    async def signal_kernel(self, request: web.Request) -> web.Response:
        """Send a signal to a kernel's first process."""
        body = await receive_body(request)
        read_body(SignalRequest, body)
        location = await self._locate(request)
        return await self._call_node(request, location, "POST", "signal", body=body)

    async def delete_kernel(self, request: web.Request) -> web.Response:
        """Stop a kernel if it runs, and remove it."""
        caller, kernel_id = caller_of(request), request.match_info["kernel"]
        query = {k: v for k, v in request.query.items() if k != "node"}
        node_id = request.query.get("node")
        return self._node_response(await self._deleter.delete(caller, kernel_id, node_id, query))

    async def get_logs(self, request: web.Request) -> web.StreamResponse:
        """Stream a kernel's output, byte for byte."""
        location = await self._locate(request)
        query = {k: v for k, v in request.query.items() if k != "node"}
        path = kernel_path(request.match_info["kernel"], "logs", query=query)
        with self.streams.register(request):
            return await proxy_request(self._nodes, location.node, request, path)

    async def get_use(self, request: web.Request) -> web.Response:
        """Show the usage of a kernel."""
        return await self._call_node(request, await self._locate(request), "GET", "stats")

    async def exec_kernel(self, request: web.Request) -> web.StreamResponse:
        """Run a command in a kernel, over a WebSocket."""
        location = await self._locate(request)
        with self.streams.register(request, may_pause=True):
            path = kernel_path(request.match_info["kernel"], "exec")
            return await proxy_websocket(self._nodes, location.node, request, path)

    async def pass_to_node(self, request: web.Request) -> web.StreamResponse:
        """Proxy a call below /v1 to one node."""
        rest = request.match_info["rest"]
        if request.method == "POST" and rest.endswith("/kernels"):
            reason = "create kernels with POST /v1/kernels and the node in placement.nodes"
            raise InvalidRequest([Problem("rest", reason)])
        if not {"", ".", ".."}.isdisjoint(rest.split("/")):
            raise InvalidRequest([Problem("rest", "expected a path without empty parts, . and ..")])
        node = self._requested_node(request)
        path = request.rel_url.raw_path_qs.split("/", 4)[4]
        is_socket = "Upgrade" in request.headers
        proxy = proxy_websocket if is_socket else proxy_request
        with self.streams.register(request, may_pause=is_socket):
            return await proxy(self._nodes, node, request, f"/v1/{path}")

    async def get_metrics(self, request: web.Request) -> web.Response:
        """Show the fleet in the Prometheus exposition format."""
        caller, view = caller_of(request), self._state.view
        is_live = not self._store.stale_reason()
        metrics = fleet_metrics(view, caller, self._counts, is_live=is_live)
        text = await self.compute(partial(render_exposition, metrics))
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def compute(self, function: Callable[[], _T]) -> _T:
        """Return the result of a function, which runs beside the event loop and always ends."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def _revision_answer(self, content: object, revision: int) -> web.Response:
        headers = {REVISION_HEADER: str(revision)}
        if reason := self._store.stale_reason():
            headers["Fleet-Stale"] = reason.replace("\n", " ")[:200]
        return json_response(content, headers=headers)

    def _kernel_response(self, node_answer: NodeAnswer, node_id: str) -> web.Response:
        """Return a node's answer with the node id added; no content or a problem is unchanged."""
        if node_answer.is_error or node_answer.status == HTTPStatus.NO_CONTENT:
            return self._node_response(node_answer)
        kernel = {**node_answer.content(), "node_id": node_id}
        return self._with_revision(json_response(kernel, node_answer.status))

    def _with_revision(self, response: web.Response) -> web.Response:
        response.headers[REVISION_HEADER] = str(self._state.view.revision)
        return response

    def _node_response(self, node_answer: NodeAnswer) -> web.Response:
        headers = pick_headers(node_answer.headers, ("Content-Type", "Retry-After"))
        return web.Response(body=node_answer.body, status=node_answer.status, headers=headers)
