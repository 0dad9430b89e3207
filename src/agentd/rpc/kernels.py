"""Routes of kernels: create, list, stop, delete, logs, usage and exec."""

from __future__ import annotations

import signal

import msgspec
from aiohttp import web

from agentd.core.access import require_admin, require_unreserved_id
from agentd.core.kernel.exec_spec import ExecSpec
from agentd.core.kernel.states import Kernel
from agentd.http.bodies import read_body
from agentd.http.callers import attach_id, caller_of
from agentd.http.queries import prefers_async, query_of, receive_body
from agentd.http.responses import json_response
from agentd.http.site import Site
from agentd.http.streaming.streaming_responses import stream_log
from agentd.rpc import rendering
from agentd.rpc.exec_websocket import run_exec
from agentd.rpc.pages import cursor, page_response
from agentd.rpc.queries import CreateQuery, DeleteQuery, LogsQuery, NodeKernelsQuery
from agentd.rpc.requests import CreateKernelRequest, SignalRequest, StopRequest
from agentd.services.access import Access
from agentd.services.kernels.exec_service import ExecService
from agentd.services.kernels.kernel_service import KernelService
from agentd.services.kernels.retention import EndReads
from agentd.services.node import Node
from agentd.services.planner import Planner
from agentd.services.protocols import Session
from agentd.services.statistics import Statistics
from agentd.views import DecisionView, KernelView


class KernelHandlers:
    """The kernels of the node."""

    def __init__(
        self,
        site: Site,
        node: Node,
        access: Access,
        planner: Planner,
        service: KernelService,
        execs: ExecService,
        statistics: Statistics,
        end_reads: EndReads,
    ) -> None:
        self._site = site
        self._state, self._devices = node.state, node.devices
        self._access = access
        self._planner = planner
        self._service = service
        self._execs = execs
        self._statistics = statistics
        self._end_reads = end_reads

    async def create_kernel(self, request: web.Request) -> web.Response:
        """Create a kernel, or return the one that the same request created before."""
        agent_id = self._devices.partition(request.match_info["agent"]).agent_id
        refuse = self._planner.refuse_unsupported
        body = read_body(
            CreateKernelRequest,
            await receive_body(request),
            lambda members: refuse(members.get("slots", {})),
        )
        caller = caller_of(request)
        require_unreserved_id(caller, body.kernel_id)
        if body.overcommit:
            require_admin(caller, "overcommit devices")
        spec = body.to_spec(agent_id, caller)
        attach_id(request, "kernel", spec.kernel_id)
        if query_of(request, CreateQuery).dry_run:
            if known := self._service.find_existing(spec):
                return json_response(self._view(known))
            decision, explain = await self._service.dry_run_create(spec)
            shown: DecisionView = {
                "slots": dict(decision.slots),
                "allocation": rendering.charged_allocation(
                    decision.allocation, self._devices.inventory
                ).to_wire(),
                "explain": explain,
            }
            return json_response(shown)
        is_async = prefers_async(request)
        kernel, is_new = await self._service.create(spec, wait=not is_async)
        headers = {"Location": f"/v1/kernels/{kernel.kernel_id}"}
        if is_async:
            headers["Preference-Applied"] = "respond-async"
        status = (202 if is_async else 201) if is_new else 200
        return json_response(self._view(kernel), status, headers)

    async def list_kernels(self, request: web.Request) -> web.Response:
        """List the kernels of the node, or of one agent."""
        agent = request.match_info.get("agent")
        visible = self._access.kernels(caller_of(request))
        kernels = [k for k in visible if agent is None or k.agent_id == agent]
        query = query_of(request, NodeKernelsQuery)
        if query.claim is not None:
            kernels = [kernel for kernel in kernels if kernel.claim_id == query.claim]
        if agent is not None and not kernels:
            self._devices.partition(agent)
        return page_response(
            request,
            kernels,
            lambda kernel: msgspec.json.encode(self._view(kernel)),
            lambda kernel: not query.state or kernel.state in query.state,
        )

    async def get_kernel(self, request: web.Request) -> web.Response:
        """Show one kernel."""
        kernel = self._state.kernel(request.match_info["kernel"])
        self._end_reads.note(kernel, caller_of(request))
        return json_response(self._view(kernel))

    async def stop_kernel(self, request: web.Request) -> web.Response:
        """End a kernel with TERM, then KILL; it stays listed."""
        body = read_body(StopRequest, await receive_body(request))
        kernel = await self._service.stop(request.match_info["kernel"], body.timeout)
        return json_response(self._view(kernel))

    async def signal_kernel(self, request: web.Request) -> web.Response:
        """Send a signal to a kernel's first process."""
        body = read_body(SignalRequest, await receive_body(request))
        number = signal.Signals[f"SIG{body.signal}"]
        await self._service.signal(request.match_info["kernel"], number)
        return web.Response(status=204)

    async def delete_kernel(self, request: web.Request) -> web.Response:
        """Stop a kernel if it runs, and remove it."""
        timeout = query_of(request, DeleteQuery).timeout
        await self._service.remove(request.match_info["kernel"], timeout)
        return web.Response(status=204)

    async def get_logs(self, request: web.Request) -> web.StreamResponse:
        """Stream a kernel's output, byte for byte."""
        kernel = self._state.kernel(request.match_info["kernel"])
        query = query_of(request, LogsQuery).to_log_query()
        with self._site.streams.register(request):
            async with self._service.logs(kernel.kernel_id, query) as opened:
                return await stream_log(request, cursor(kernel), opened.position, opened.chunks)

    async def list_stats(self, request: web.Request) -> web.Response:
        """Show the usage of every kernel."""
        kernels = self._access.kernels(caller_of(request))
        return json_response(
            [rendering.usage_view(use) for use in await self._statistics.read(kernels)]
        )

    async def get_stats(self, request: web.Request) -> web.Response:
        """Show the usage of one kernel."""
        kernel = self._state.kernel(request.match_info["kernel"])
        (use,) = await self._statistics.read([kernel])
        return json_response(rendering.usage_view(use))

    async def exec_kernel(self, request: web.Request) -> web.StreamResponse:
        """Run a command in a kernel, over a WebSocket."""
        kernel = self._execs.find(request.match_info["kernel"])

        async def begin(spec: ExecSpec) -> Session:
            with self._site.audit_call(request, "exec_kernel") as call:
                session = await self._execs.start(kernel, spec)
                call.set_outcome("begun")
            return session

        with self._site.streams.register(request, may_pause=True):
            return await run_exec(request, begin)

    def _view(self, kernel: Kernel) -> KernelView:
        return rendering.kernel_view(kernel, self._devices.inventory)
