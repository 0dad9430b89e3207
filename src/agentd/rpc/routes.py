"""The table of routes, used by the server and by its OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentd.core.access import Right
from agentd.http.route import SWITCHING_PROTOCOLS, Header, Media, Route, delete, get, post, put
from agentd.http.streaming.streaming_responses import LOG_KERNEL, LOG_POSITION
from agentd.rpc.claims import ClaimHandlers
from agentd.rpc.devices import DeviceHandlers
from agentd.rpc.events import EventHandlers
from agentd.rpc.kernels import KernelHandlers
from agentd.rpc.node import NodeHandlers, RuntimeHandlers
from agentd.rpc.queries import (
    ClaimsQuery,
    CreateQuery,
    DeleteQuery,
    EventsQuery,
    LogsQuery,
    NodeKernelsQuery,
    NodeQuery,
)
from agentd.rpc.requests import (
    CreateClaimRequest,
    CreateKernelRequest,
    EditsRequest,
    EngineRequest,
    RenewRequest,
    SignalRequest,
    StopRequest,
)
from agentd.rpc.site import NodeSite
from agentd.views import (
    AgentView,
    CallerView,
    ClaimView,
    DecisionView,
    DeviceView,
    EditsView,
    EngineView,
    KernelUseView,
    KernelView,
    NodeView,
    PluginView,
    RefusalView,
    ReloadView,
    RuntimeView,
    SlotTypeView,
)

PREFER = Header(
    "Prefer",
    {"type": "string", "examples": ["respond-async"]},
    "respond-async: answer before the kernel runs (RFC 7240).",
)
_LAST_EVENT = Header("Last-Event-ID", {"type": "string"}, "The same.")
LOG = Media(
    "application/octet-stream",
    "The kernel's output, byte for byte.",
    headers=(
        Header(
            LOG_POSITION,
            {"type": "integer", "minimum": 0},
            "Position of the first byte: bytes since the kernel began.",
        ),
        Header(
            LOG_KERNEL,
            {"type": "string"},
            "The kernel, as `after` of a list names it; another one with its id differs.",
        ),
    ),
)
STREAM = Media("text/event-stream", "Server-sent events.")
METRICS = Media("text/plain", "The Prometheus exposition format.")


def routes(
    site: NodeSite | type[NodeSite],
    node: NodeHandlers | type[NodeHandlers],
    runtimes: RuntimeHandlers | type[RuntimeHandlers],
    devices: DeviceHandlers | type[DeviceHandlers],
    kernels: KernelHandlers | type[KernelHandlers],
    events: EventHandlers | type[EventHandlers],
    claims: ClaimHandlers | type[ClaimHandlers],
) -> Sequence[Route]:
    """Return the table of routes, bound to objects for a server or to classes for a document."""
    create = {200: KernelView | DecisionView, 201: KernelView, 202: KernelView}
    device, kernel = "/v1/devices/{device_name}/{id}", "/v1/kernels/{kernel}"
    claim, engine = "/v1/claims/{claim}", "/v1/engines/{engine}"
    of_agent = "/v1/agents/{agent}/kernels"
    change, use, public = Right.NODE, Right.KERNELS, None
    return (
        get("/v1/node", node.get_node, NodeView, query=NodeQuery),
        post("/v1/reload", node.reload, ReloadView, right=change),
        get("/v1/runtimes", runtimes.list_runtimes, list[RuntimeView]),
        delete("/v1/runtimes/{runtime}", runtimes.forget_runtime, right=change),
        get("/v1/plugins", runtimes.list_plugins, list[PluginView]),
        post("/v1/plugins/{plugin}/retry", runtimes.retry_plugin, PluginView, right=change),
        post("/v1/plugins/{plugin}/stop", runtimes.stop_plugin, PluginView, right=change),
        post("/v1/plugins/{plugin}/start", runtimes.start_plugin, PluginView, right=change),
        get("/v1/slot-types", devices.list_slot_types, list[SlotTypeView]),
        get("/v1/devices", devices.list_devices, list[DeviceView]),
        post(f"{device}/drain", devices.drain_device, DeviceView, right=change),
        post(f"{device}/undrain", devices.undrain_device, DeviceView, right=change),
        post(f"{device}/clear", devices.clear_device, DeviceView, right=change),
        delete(device, devices.forget_device, right=change),
        get("/v1/engines", devices.list_engines, list[EngineView]),
        put(engine, devices.put_engine, EngineView, body=EngineRequest, right=change),
        get("/v1/agents", devices.list_agents, list[AgentView]),
        get("/v1/agents/{agent}", devices.get_agent, AgentView),
        post(
            of_agent,
            kernels.create_kernel,
            create,
            query=CreateQuery,
            headers=(PREFER,),
            body=CreateKernelRequest,
            right=use,
        ),
        get(of_agent, kernels.list_kernels, list[KernelView], query=NodeKernelsQuery),
        get("/v1/kernels", kernels.list_kernels, list[KernelView], query=NodeKernelsQuery),
        get(kernel, kernels.get_kernel, KernelView),
        post(f"{kernel}/signal", kernels.signal_kernel, {204: None}, body=SignalRequest, right=use),
        post(f"{kernel}/stop", kernels.stop_kernel, KernelView, body=StopRequest, right=use),
        delete(kernel, kernels.delete_kernel, query=DeleteQuery, right=use),
        get(f"{kernel}/logs", kernels.get_logs, LOG, query=LogsQuery, right=Right.OUTPUT),
        get(f"{kernel}/exec", kernels.exec_kernel, {SWITCHING_PROTOCOLS: None}, right=Right.OUTPUT),
        get(f"{kernel}/stats", kernels.get_stats, KernelUseView),
        post(
            "/v1/agents/{agent}/claims",
            claims.create_claim,
            {200: ClaimView, 201: ClaimView},
            body=CreateClaimRequest,
            right=use,
        ),
        get("/v1/claims", claims.list_claims, list[ClaimView], query=ClaimsQuery),
        get(claim, claims.get_claim, ClaimView),
        post(f"{claim}/renew", claims.renew_claim, ClaimView, body=RenewRequest, right=use),
        delete(claim, claims.delete_claim, right=use),
        post("/v1/edits", claims.get_edits, EditsView, body=EditsRequest, right=use),
        get("/v1/stats", kernels.list_stats, list[KernelUseView]),
        get("/v1/refusals", events.list_refusals, list[RefusalView]),
        get("/v1/events", events.get_events, STREAM, query=EventsQuery, headers=(_LAST_EVENT,)),
        get("/v1/whoami", site.whoami, CallerView),
        get("/v1/openapi.json", site.get_openapi, {200: dict[str, Any]}),
        get("/metrics", node.get_metrics, METRICS),
        get("/livez", site.livez, {200: dict[str, str]}, right=public),
        get("/readyz", site.readyz, {200: dict[str, str]}, right=public),
    )


ROUTES = routes(
    site=NodeSite,
    node=NodeHandlers,
    runtimes=RuntimeHandlers,
    devices=DeviceHandlers,
    kernels=KernelHandlers,
    events=EventHandlers,
    claims=ClaimHandlers,
)
"""The unbound table, for documents."""
