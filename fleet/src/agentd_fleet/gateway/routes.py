"""The gateway's routes as a table, from which its OpenAPI document is made too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from agentd.core.access import Right
from agentd.http.routes import SWITCHED, Parameter, Route
from agentd.rpc.requests import StopRequest
from agentd.rpc.routes import DELETE, DRY_RUN, LIST, LOG, LOGS, METRICS
from agentd.rpc.routes import ROUTES as NODE_ROUTES
from agentd.views import CallerView, SlotTypeView
from agentd_fleet.gateway import views
from agentd_fleet.gateway.handlers import Gateway
from agentd_fleet.placement.requests import FleetKernelRequest

NODE = Parameter("node", {"type": "string"}, "The kernel's node, if the fleet did not place it.")
NODES = Parameter("node", {"type": "string"}, "Only these nodes.", is_repeatable=True)
AGENTS = Parameter("agent", {"type": "string"}, "Only these agents.", is_repeatable=True)
LABELS = Parameter(
    "label",
    {"type": "string", "pattern": "^[^=]+=[\\s\\S]*$"},
    "Only nodes with all of these labels: KEY=VALUE.",
    is_repeatable=True,
)
AFTER_NODE = Parameter("after_node", {"type": "string"}, "The node of `after`.")
G = Gateway
_KERNEL = views.FleetKernelView
_ANY, _AT_NODE = "/v1/nodes/{node}/{rest}", "/v1/nodes/{node}"


def _passed(method: str) -> Route:
    """Return the route that passes calls of a method on; it describes those that a node knows."""
    known = [
        replace(
            route,
            path=_AT_NODE + route.path.removeprefix("/v1"),
            name=f"{route.operation_id}_at_node",
        )
        for route in NODE_ROUTES
        if route.method == method and route.path.startswith("/v1/")
        if not (method == "POST" and route.path.endswith("/kernels"))  # see `Gateway.pass_to_node`
    ]
    return Route(method, _ANY, G.pass_to_node, {200: Any}, passes=tuple(known))


ROUTES: Sequence[Route] = (
    Route("GET", "/v1/nodes", G.list_nodes, {200: list[views.FleetNodeView]}),
    Route("GET", "/v1/nodes/{node}", G.get_node, {200: views.FleetNodeView}),
    Route("DELETE", "/v1/nodes/{node}", G.forget_node, {204: None}, right=Right.NODE),
    Route("GET", "/v1/slot-types", G.list_slot_types, {200: list[SlotTypeView]}),
    Route("DELETE", "/v1/slot-types/{slot}", G.forget_slot_type, {204: None}, right=Right.NODE),
    Route("GET", "/v1/stats", G.get_stats, {200: views.StatsView}, (NODES, AGENTS, LABELS)),
    Route("GET", "/v1/devices", G.list_devices, {200: list[views.FleetDeviceView]}, (NODES,)),
    Route(
        "POST",
        "/v1/kernels",
        G.create_kernel,
        {200: _KERNEL | views.FleetDecisionView, 201: _KERNEL, 202: _KERNEL},
        DRY_RUN,
        FleetKernelRequest,
        Right.KERNELS,
    ),
    Route(
        "GET",
        "/v1/kernels",
        G.list_kernels,
        {200: list[_KERNEL | views.UnknownKernelView]},
        (*LIST, AFTER_NODE, NODES),
    ),
    Route(
        "GET",
        "/v1/kernels/{kernel}",
        G.get_kernel,
        {200: _KERNEL | views.UnknownKernelView},
        (NODE,),
    ),
    Route(
        "POST",
        "/v1/kernels/{kernel}/stop",
        G.stop_kernel,
        {200: _KERNEL},
        (NODE,),
        StopRequest,
        Right.KERNELS,
    ),
    Route(
        "DELETE",
        "/v1/kernels/{kernel}",
        G.delete_kernel,
        {204: None},
        (*DELETE, NODE),
        right=Right.KERNELS,
    ),
    Route(
        "GET",
        "/v1/kernels/{kernel}/logs",
        G.get_logs,
        {200: LOG},
        (*LOGS, NODE),
        right=Right.OUTPUT,
    ),
    Route(
        "GET",
        "/v1/kernels/{kernel}/exec",
        G.exec_kernel,
        {SWITCHED: None},
        (NODE,),
        right=Right.OUTPUT,
    ),
    Route("GET", "/v1/kernels/{kernel}/stats", G.get_use, {200: views.FleetKernelUseView}, (NODE,)),
    *map(_passed, ("GET", "POST", "DELETE")),
    Route("GET", "/v1/whoami", G.whoami, {200: CallerView}),
    Route("GET", "/v1/openapi.json", G.get_openapi, {200: dict[str, Any]}),
    Route("GET", "/metrics", G.get_metrics, {200: METRICS}),
    Route("GET", "/livez", G.livez, {200: dict[str, str]}, right=None),
    Route("GET", "/readyz", G.readyz, {200: dict[str, str], 503: dict[str, str]}, right=None),
)
