"""The routes as a table, from which both the server and its OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentd.core.access import Right
from agentd.core.kernel.states import KERNEL_ID, KernelState
from agentd.http.queries import MAX_PAGE, MAX_TIMEOUT_S
from agentd.http.routes import SWITCHED, Media, Parameter, Route
from agentd.rpc.handlers import Handlers
from agentd.rpc.requests import CreateKernelRequest, StopRequest
from agentd.views import (
    AgentView,
    CallerView,
    DecisionView,
    DeviceView,
    KernelUseView,
    KernelView,
    NodeView,
    PluginView,
    RefusalView,
    RuntimeView,
    SlotTypeView,
)

_FLAG = {"type": "boolean", "default": False}
_SECONDS = {"type": "number", "minimum": 0, "maximum": MAX_TIMEOUT_S}
_KERNEL_ID = {"type": "string", "pattern": f"^{KERNEL_ID}$"}
CHECK = (Parameter("check", _FLAG, "Judge the node too."),)
DRY_RUN = (
    Parameter("dry_run", _FLAG, "Decide and explain; change nothing."),
    Parameter(
        "Prefer",
        {"type": "string", "examples": ["respond-async"]},
        "respond-async: do not wait until it runs (RFC 7240).",
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
    Parameter("limit", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}, "At most so many."),
    Parameter("after", _KERNEL_ID, "Those that were created after this one."),
)
DELETE = (Parameter("timeout", _SECONDS, "Between TERM and KILL."),)
LOGS = (
    Parameter("follow", _FLAG, "Go on until the kernel ends."),
    Parameter(
        "tail",
        {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 999_999_999}, {"const": "all"}]},
        "The last lines.",
    ),
    Parameter("since", {"type": "string"}, "RFC 3339, or seconds since 1970."),
    Parameter("timestamps", _FLAG, "Lead every line with its time."),
    Parameter("stream", {"type": "string", "enum": ["both", "stdout", "stderr"]}, "Which output."),
)
EVENTS = (
    Parameter("last_event_id", {"type": "string"}, "Go on after this event."),
    Parameter("Last-Event-ID", {"type": "string"}, "The same.", place="header"),
)
LOG = Media("application/octet-stream", "What the kernel printed, byte for byte.")
STREAM = Media("text/event-stream", "Server-sent events.")
METRICS = Media("text/plain", "The Prometheus exposition format.")
H = Handlers
ROUTES: Sequence[Route] = (
    Route("GET", "/v1/node", H.get_node, {200: NodeView}, CHECK),
    Route("GET", "/v1/runtimes", H.list_runtimes, {200: list[RuntimeView]}),
    Route("DELETE", "/v1/runtimes/{runtime}", H.forget_runtime, {204: None}, right=Right.NODE),
    Route("GET", "/v1/plugins", H.list_plugins, {200: list[PluginView]}),
    Route(
        "POST",
        "/v1/plugins/{plugin}/retry",
        H.retry_plugin,
        {200: PluginView},
        right=Right.NODE,
    ),
    Route("GET", "/v1/slot-types", H.list_slot_types, {200: list[SlotTypeView]}),
    Route("GET", "/v1/devices", H.list_devices, {200: list[DeviceView]}),
    Route(
        "POST",
        "/v1/devices/{device_name}/{id}/drain",
        H.drain_device,
        {200: DeviceView},
        right=Right.NODE,
    ),
    Route(
        "POST",
        "/v1/devices/{device_name}/{id}/undrain",
        H.undrain_device,
        {200: DeviceView},
        right=Right.NODE,
    ),
    Route(
        "DELETE",
        "/v1/devices/{device_name}/{id}",
        H.forget_device,
        {204: None},
        right=Right.NODE,
    ),
    Route("GET", "/v1/agents", H.list_agents, {200: list[AgentView]}),
    Route("GET", "/v1/agents/{agent}", H.get_agent, {200: AgentView}),
    Route(
        "POST",
        "/v1/agents/{agent}/kernels",
        H.create_kernel,
        {200: KernelView | DecisionView, 201: KernelView, 202: KernelView},
        DRY_RUN,
        CreateKernelRequest,
        Right.KERNELS,
    ),
    Route("GET", "/v1/agents/{agent}/kernels", H.list_kernels, {200: list[KernelView]}, LIST),
    Route("GET", "/v1/kernels", H.list_kernels, {200: list[KernelView]}, LIST),
    Route("GET", "/v1/kernels/{kernel}", H.get_kernel, {200: KernelView}),
    Route(
        "POST",
        "/v1/kernels/{kernel}/stop",
        H.stop_kernel,
        {200: KernelView},
        (),
        StopRequest,
        Right.KERNELS,
    ),
    Route(
        "DELETE",
        "/v1/kernels/{kernel}",
        H.delete_kernel,
        {204: None},
        DELETE,
        right=Right.KERNELS,
    ),
    Route(
        "GET",
        "/v1/kernels/{kernel}/logs",
        H.get_logs,
        {200: LOG},
        LOGS,
        right=Right.OUTPUT,
    ),
    Route(
        "GET",
        "/v1/kernels/{kernel}/exec",
        H.exec_kernel,
        {SWITCHED: None},
        right=Right.OUTPUT,
    ),
    Route("GET", "/v1/kernels/{kernel}/stats", H.get_stats, {200: KernelUseView}),
    Route("GET", "/v1/stats", H.list_stats, {200: list[KernelUseView]}),
    Route("GET", "/v1/refusals", H.list_refusals, {200: list[RefusalView]}),
    Route("GET", "/v1/events", H.get_events, {200: STREAM}, EVENTS),
    Route("GET", "/v1/whoami", H.whoami, {200: CallerView}),
    Route("GET", "/v1/openapi.json", H.get_openapi, {200: dict[str, Any]}),
    Route("GET", "/metrics", H.get_metrics, {200: METRICS}),
    Route("GET", "/livez", H.livez, {200: dict[str, str]}, right=None),
    Route("GET", "/readyz", H.readyz, {200: dict[str, str]}, right=None),
)
