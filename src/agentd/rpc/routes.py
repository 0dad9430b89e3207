"""The table of routes, used by the server and by its OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentd.core.access import Right
from agentd.core.kernel.states import KERNEL_ID, KernelState
from agentd.http.queries import MAX_PAGE, MAX_TIMEOUT_S
from agentd.http.route import SWITCHED, Media, Parameter, Route, delete, get, post, put
from agentd.rpc.claims import ClaimHandlers
from agentd.rpc.devices import DeviceHandlers
from agentd.rpc.events import EventHandlers
from agentd.rpc.kernels import KernelHandlers
from agentd.rpc.node import NodeHandlers, PartHandlers
from agentd.rpc.pages import AFTER
from agentd.rpc.requests import (
    CreateClaimRequest,
    CreateKernelRequest,
    EditsRequest,
    EngineRequest,
    RenewRequest,
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

_FLAG = {"type": "boolean", "default": False}
_SECONDS = {"type": "number", "minimum": 0, "maximum": MAX_TIMEOUT_S}
_AFTER = {"type": "string", "pattern": f"^{AFTER}$"}
_KERNEL_ID = {"type": "string", "pattern": f"^{KERNEL_ID}$"}
CHECK = (Parameter("check", _FLAG, "Run the self-check, too."),)
DRY_RUN = (
    Parameter("dry_run", _FLAG, "Decide and explain; change nothing."),
    Parameter(
        "Prefer",
        {"type": "string", "examples": ["respond-async"]},
        "respond-async: answer before the kernel runs (RFC 7240).",
        place="header",
    ),
)
LIST = (
    Parameter(
        "state",
        {"type": "string", "enum": [state.value for state in KernelState]},
        "Only kernels in one of these states.",
        is_repeatable=True,
    ),
    Parameter(
        "label",
        {"type": "string", "pattern": "^[^=]+=[\\s\\S]*$"},
        "Only kernels with all of these labels: KEY=VALUE.",
        is_repeatable=True,
    ),
    Parameter(
        "limit",
        {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": MAX_PAGE},
        "Maximum number of entries.",
    ),
    Parameter("after", _AFTER, "Only kernels after this one: an id, or the cursor of Link."),
)
CLAIM = Parameter("claim", _KERNEL_ID, "Only kernels that hold devices of this claim.")
CLAIMS = (
    Parameter("agent", _KERNEL_ID, "Only claims of this agent."),
    LIST[1],
    LIST[2],
    Parameter("after", _AFTER, "Only claims after this one: an id, or the cursor of Link."),
)
DELETE = (Parameter("timeout", _SECONDS, "Seconds between TERM and KILL."),)
LOGS = (
    Parameter("follow", _FLAG, "Follow until the kernel ends."),
    Parameter(
        "tail",
        {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 999_999_999}, {"const": "all"}]},
        "Number of lines from the end.",
    ),
    Parameter("since", {"type": "string"}, "RFC 3339, or seconds since the epoch."),
    Parameter("timestamps", _FLAG, "Prefix every line with its time."),
    Parameter(
        "stream", {"type": "string", "enum": ["both", "stdout", "stderr"]}, "Output to return."
    ),
)
EVENTS = (
    Parameter("last_event_id", {"type": "string"}, "Resume after this event."),
    Parameter("Last-Event-ID", {"type": "string"}, "The same.", place="header"),
)
LOG = Media("application/octet-stream", "The kernel's output, byte for byte.")
STREAM = Media("text/event-stream", "Server-sent events.")
METRICS = Media("text/plain", "The Prometheus exposition format.")


def routes(
    site: NodeSite | type[NodeSite],
    node: NodeHandlers | type[NodeHandlers],
    parts: PartHandlers | type[PartHandlers],
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
    change, use, nobody = Right.NODE, Right.KERNELS, None
    return (
        get("/v1/node", node.get_node, NodeView, *CHECK),
        post("/v1/reload", node.reload, ReloadView, right=change),
        get("/v1/runtimes", parts.list_runtimes, list[RuntimeView]),
        delete("/v1/runtimes/{runtime}", parts.forget_runtime, right=change),
        get("/v1/plugins", parts.list_plugins, list[PluginView]),
        post("/v1/plugins/{plugin}/retry", parts.retry_plugin, PluginView, right=change),
        get("/v1/slot-types", parts.list_slot_types, list[SlotTypeView]),
        get("/v1/devices", devices.list_devices, list[DeviceView]),
        post(f"{device}/drain", devices.drain_device, DeviceView, right=change),
        post(f"{device}/undrain", devices.undrain_device, DeviceView, right=change),
        delete(device, devices.forget_device, right=change),
        get("/v1/engines", devices.list_engines, list[EngineView]),
        put(engine, devices.put_engine, EngineView, body=EngineRequest, right=change),
        get("/v1/agents", devices.list_agents, list[AgentView]),
        get("/v1/agents/{agent}", devices.get_agent, AgentView),
        post(
            of_agent, kernels.create_kernel, create, *DRY_RUN, body=CreateKernelRequest, right=use
        ),
        get(of_agent, kernels.list_kernels, list[KernelView], *LIST, CLAIM),
        get("/v1/kernels", kernels.list_kernels, list[KernelView], *LIST, CLAIM),
        get(kernel, kernels.get_kernel, KernelView),
        post(f"{kernel}/stop", kernels.stop_kernel, KernelView, body=StopRequest, right=use),
        delete(kernel, kernels.delete_kernel, *DELETE, right=use),
        get(f"{kernel}/logs", kernels.get_logs, LOG, *LOGS, right=Right.OUTPUT),
        get(f"{kernel}/exec", kernels.exec_kernel, {SWITCHED: None}, right=Right.OUTPUT),
        get(f"{kernel}/stats", kernels.get_stats, KernelUseView),
        post(
            "/v1/agents/{agent}/claims",
            claims.create_claim,
            {200: ClaimView, 201: ClaimView},
            body=CreateClaimRequest,
            right=use,
        ),
        get("/v1/claims", claims.list_claims, list[ClaimView], *CLAIMS),
        get(claim, claims.get_claim, ClaimView),
        post(f"{claim}/renew", claims.renew_claim, ClaimView, body=RenewRequest, right=use),
        delete(claim, claims.delete_claim, right=use),
        post("/v1/edits", claims.get_edits, EditsView, body=EditsRequest, right=use),
        get("/v1/stats", kernels.list_stats, list[KernelUseView]),
        get("/v1/refusals", events.list_refusals, list[RefusalView]),
        get("/v1/events", events.get_events, STREAM, *EVENTS),
        get("/v1/whoami", site.whoami, CallerView),
        get("/v1/openapi.json", site.get_openapi, {200: dict[str, Any]}),
        get("/metrics", node.get_metrics, METRICS),
        get("/livez", site.livez, {200: dict[str, str]}, right=nobody),
        get("/readyz", site.readyz, {200: dict[str, str]}, right=nobody),
    )


ROUTES = routes(
    NodeSite,
    NodeHandlers,
    PartHandlers,
    DeviceHandlers,
    KernelHandlers,
    EventHandlers,
    ClaimHandlers,
)
"""The unbound table, for documents."""
