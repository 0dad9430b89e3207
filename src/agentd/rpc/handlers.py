"""One method for each route: read the request, ask the services, show the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from aiohttp import web

from agentd.concurrency import is_set_within
from agentd.core.access import Caller, Right
from agentd.core.devices import DeviceId
from agentd.core.kernel.exec_spec import ExecSpec
from agentd.core.kernel.states import Kernel
from agentd.errors import NotReady
from agentd.events import Event, EventLog
from agentd.http.answers import answer
from agentd.http.audit import Auditor
from agentd.http.bodies import read_body
from agentd.http.callers import caller_of, caller_view, note_kernel
from agentd.http.queries import body_of, prefers_async, read_flag, read_timeout
from agentd.http.server_sent_events import EncodedEvents, encode_event
from agentd.http.streams import Streams, stream_events, stream_log
from agentd.rpc import rendering
from agentd.rpc.devices import DeviceHandlers
from agentd.rpc.exec import run_over
from agentd.rpc.log_query import read_log_query
from agentd.rpc.metrics import CONTENT_TYPE, Metrics
from agentd.rpc.pages import CreationOrder, Encodings, Removed
from agentd.rpc.requests import CreateKernelRequest, StopRequest
from agentd.rpc.usage import usage_view
from agentd.rpc.visibility import Visibility
from agentd.services.access import Access
from agentd.services.devices import NodeDevices
from agentd.services.kernels.exec import Execs
from agentd.services.kernels.lifecycle import KernelService
from agentd.services.kernels.reconciler import Reconciler
from agentd.services.protocols import Plugins, Session
from agentd.services.refusals import Refusals
from agentd.services.selfcheck import SelfCheck
from agentd.services.state import NodeState
from agentd.services.statistics import Statistics
from agentd.views import NodeView


class NodeParts(NamedTuple):
    """What the handlers ask."""

    state: NodeState
    devices: NodeDevices
    plugins: Plugins
    service: KernelService
    reconciler: Reconciler
    check: SelfCheck
    events: EventLog
    access: Access
    statistics: Statistics
    refusals: Refusals
    metrics: Metrics
    insides: Execs
    remarks: Callable[[], Sequence[str]] = tuple
    checkup: Callable[[Collection[str]], Sequence[str]] = tuple
    """Warnings: of the configuration and the daemon; of the machine, by the runtimes used."""
    removed: Removed | None = None


class Handlers(DeviceHandlers):
    """The daemon's side of every route; those below /v1 answer once it is open."""

    def __init__(self, node_id: str, default_runtime: str, parts: NodeParts) -> None:
        visible = Visibility(parts.state, parts.devices, parts.access)
        super().__init__(parts.state, parts.devices, parts.access, visible)
        self._node_id = node_id
        self._default_runtime = default_runtime
        self._plugins = parts.plugins
        self._service = parts.service
        self._reconciler = parts.reconciler
        self._check = parts.check
        self._events = parts.events
        self._insides = parts.insides
        self._statistics, self._refusals = parts.statistics, parts.refusals
        self._metrics = parts.metrics
        self._remarks, self._checkup = parts.remarks, parts.checkup
        self._describe: Callable[[], Mapping[str, Any]] = dict
        self._opened, self._checking = asyncio.Event(), asyncio.Lock()
        self._streams = Streams()
        self._order = CreationOrder(parts.removed)
        parts.state.listen(self._order.note)
        self._encodings, self._encoded = Encodings(), EncodedEvents()

    def describe(self, openapi: Callable[[], Mapping[str, Any]]) -> None:
        """Take what makes the document that describes this API; it is made when it is asked for."""
        self._describe = openapi

    @property
    def streams(self) -> Streams:
        return self._streams

    def require(self, request: web.Request, caller: Caller, right: Right) -> None:
        """Refuse what a caller cannot see, or may not do: see `Access.require`."""
        match = request.match_info
        name = match.get("device_name")
        self._access.require(
            caller,
            right,
            agent=match.get("agent"),
            kernel=match.get("kernel"),
            device=DeviceId(name, match["id"]) if name is not None else None,
        )

    def auditor(self, request: web.Request, action: str) -> Auditor:
        """Return what writes down a call that is to change something."""
        kernel = self._state.kernels.get(request.match_info.get("kernel", ""))
        agent = request.match_info.get("agent") or (kernel.agent_id if kernel else "")
        is_create = action == "create_kernel" and agent in self._devices.split.partitions
        refusals = self._refusals if is_create else None
        return Auditor(self._events, refusals, request, action, agent)

    def open(self) -> None:
        """Answer every route from now on."""
        self._opened.set()

    async def until_open(self, patience_s: float) -> None:
        """Wait for the end of the start; NotReady if it does not come in time."""
        await until_set(self._opened, patience_s)

    async def livez(self, _: web.Request) -> web.Response:
        """Tell that the process answers."""
        return answer({"status": "ok"})

    async def readyz(self, _: web.Request) -> web.Response:
        """Tell whether start-up, adoption included, is over."""
        await self.until_open(0)
        return answer({"status": "ok"})

    async def whoami(self, request: web.Request) -> web.Response:
        """Show who calls, and as what."""
        return answer(caller_view(caller_of(request)))

    async def get_openapi(self, _: web.Request) -> web.Response:
        """Describe this API."""
        return answer(self._describe())

    async def get_node(self, request: web.Request) -> web.Response:
        """Show the node, its parts, and what the operator should know; `check` judges it too."""
        caller = caller_of(request)
        node = self._node(caller)
        if read_flag(request.query, "check"):
            self._access.require_all(caller)
            node["checks"] = rendering.check_views(await self._check.run())
            used = {kernel.runtime for kernel in self._state if kernel.holds}
            async with self._checking:
                found = await asyncio.to_thread(self._checkup, used)
                node["warnings"] = [*dict.fromkeys([*node["warnings"], *found])]
        return answer(node)

    def _node(self, caller: Caller) -> NodeView:
        node = rendering.node_view(
            self._node_id, self._default_runtime, self._state, self._devices, self._plugins
        )
        node["warnings"] += self._remarks()
        return self._visible.node(node, caller)

    async def list_runtimes(self, _: web.Request) -> web.Response:
        """List the runtimes that may have kernels of this node, and whether they answer."""
        runtimes = self._state.runtimes.values()
        return answer([rendering.runtime_view(status) for status in runtimes])

    async def forget_runtime(self, request: web.Request) -> web.Response:
        """Drop what a runtime that does not answer was last known to hold, for good."""
        await self._reconciler.forget_runtime(request.match_info["runtime"])
        return web.Response(status=204)

    async def list_plugins(self, _: web.Request) -> web.Response:
        """List the plugins, and how they do."""
        return answer(rendering.plugin_views(self._plugins))

    async def list_refusals(self, request: web.Request) -> web.Response:
        """List the creates that were refused in the last hour, and why; the oldest first."""
        caller = caller_of(request)
        recent = self._refusals.recent()
        return answer([rendering.refusal_view(r) for r in recent if caller.sees(r.agent_id)])

    async def retry_plugin(self, request: web.Request) -> web.Response:
        """Have a plugin that is not ready tried again now, and show how that went."""
        status = await self._plugins.retry(request.match_info["plugin"])
        return answer(rendering.plugin_view(status))

    async def list_slot_types(self, _: web.Request) -> web.Response:
        """List the known slot types."""
        types = self._devices.inventory.slot_types.values()
        return answer([rendering.slot_type_view(slot) for slot in types])

    async def list_agents(self, request: web.Request) -> web.Response:
        """List the agents with their partitions and slots."""
        split, ledger = self._devices.split, self._state.ledger
        agents = self._access.agents(caller_of(request))
        return answer([rendering.agent_view(agent, split, ledger) for agent in agents])

    async def get_agent(self, request: web.Request) -> web.Response:
        """Show one agent."""
        agent = self._devices.partition(request.match_info["agent"]).agent_id
        split, ledger = self._devices.split, self._state.ledger
        return answer(rendering.agent_view(agent, split, ledger))

    async def create_kernel(self, request: web.Request) -> web.Response:
        """Create a kernel, or return the one that the same request created before."""
        agent_id = self._devices.partition(request.match_info["agent"]).agent_id
        body = read_body(CreateKernelRequest, await body_of(request))
        caller = caller_of(request)
        spec = body.to_spec(agent_id, caller)
        note_kernel(request, spec.kernel_id)
        if read_flag(request.query, "dry_run"):
            if known := self._service.existing(spec):
                return answer(self._shown(known))
            decision, explain = await self._service.decide(spec)
            shown = {
                "slots": decision.slots,
                "allocation": decision.allocation.to_wire(),
                "explain": explain,
            }
            return answer(shown)
        is_async = prefers_async(request)
        kernel, is_new = await self._service.create(spec, wait=not is_async)
        headers = {"Location": f"/v1/kernels/{kernel.kernel_id}"}
        if is_async:
            headers["Preference-Applied"] = "respond-async"
        status = (202 if is_async else 201) if is_new else 200
        return answer(self._shown(kernel), status, headers)

    async def list_kernels(self, request: web.Request) -> web.Response:
        """List the kernels of the node, or of one agent."""
        agent = request.match_info.get("agent")
        visible = self._access.kernels(caller_of(request))
        kernels = [k for k in visible if agent is None or k.agent_id == agent]
        if agent is not None and not kernels:
            self._devices.partition(agent)
        page = self._order.page(kernels, request.query, caller_of(request))
        body = self._encodings.of(page.kernels, self._devices.inventory)
        self._encodings.keep_only(self._state.kernels)
        headers = {}
        if page.next_after is not None:
            url = request.rel_url.update_query(after=page.next_after)
            headers["Link"] = f'<{url}>; rel="next"'
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def get_kernel(self, request: web.Request) -> web.Response:
        """Show one kernel."""
        return answer(self._shown(self._state.get(request.match_info["kernel"])))

    async def stop_kernel(self, request: web.Request) -> web.Response:
        """End a kernel and keep it listed: TERM, then KILL."""
        body = read_body(StopRequest, await body_of(request))
        kernel = await self._service.stop(request.match_info["kernel"], body.timeout)
        return answer(self._shown(kernel))

    async def delete_kernel(self, request: web.Request) -> web.Response:
        """Stop a kernel if need be, and remove it."""
        await self._service.remove(request.match_info["kernel"], read_timeout(request.query))
        return web.Response(status=204)

    async def get_logs(self, request: web.Request) -> web.StreamResponse:
        """Stream what a kernel printed, byte for byte."""
        kernel_id = request.match_info["kernel"]
        query = read_log_query(request.query)
        with self._streams.opened(request):
            return await stream_log(request, self._service.logs(kernel_id, query))

    async def list_stats(self, request: web.Request) -> web.Response:
        """Show what every kernel uses."""
        kernels = self._access.kernels(caller_of(request))
        return answer([usage_view(use) for use in await self._statistics.of(kernels)])

    async def get_stats(self, request: web.Request) -> web.Response:
        """Show what one kernel uses."""
        kernel = self._state.get(request.match_info["kernel"])
        (use,) = await self._statistics.of([kernel])
        return answer(usage_view(use))

    async def exec_kernel(self, request: web.Request) -> web.StreamResponse:
        """Run a command inside a kernel, over a WebSocket."""
        kernel = self._insides.find(request.match_info["kernel"])

        async def begin(spec: ExecSpec) -> Session:
            with self.auditor(request, "exec_kernel") as auditor:
                session = await self._insides.begin(kernel, spec)
                auditor.answered("begun")
            return session

        with self._streams.opened(request, may_pause=True):
            return await run_over(request, begin)

    async def get_events(self, request: web.Request) -> web.StreamResponse:
        """Stream what happens to kernels, devices, plugins and runtimes, as server-sent events."""
        caller = caller_of(request)

        def encode(event: Event) -> bytes:
            told = self._visible.event(event, caller)
            return encode_event(self._events.id_of(event), *told) if told else b""

        def encoded(event: Event) -> bytes:
            which = event.number, event.kind  # a reset has the number of the event before it
            return self._encoded.of(which, caller.agents, partial(encode, event))

        with self._streams.opened(request):
            return await stream_events(request, self._events, encoded)

    async def get_metrics(self, request: web.Request) -> web.Response:
        """Show the node in the Prometheus exposition format."""
        caller = caller_of(request)
        text = await self._metrics.text(caller, len(self._node(caller)["warnings"]))
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    def _shown(self, kernel: Kernel) -> object:
        return rendering.kernel_view(kernel, self._devices.inventory)


async def until_set(opened: asyncio.Event, patience_s: float) -> None:
    """Wait for the end of the start, adoption included.

    Raises:
        NotReady: it has not come in time.
    """
    if not await is_set_within(opened, patience_s):
        raise NotReady("the daemon has not finished starting")
