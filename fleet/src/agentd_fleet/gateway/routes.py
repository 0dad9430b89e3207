"""The gateway's table of routes, used by the server and by its OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from agentd.core.access import Right
from agentd.http.route import SWITCHING_PROTOCOLS, Handler, Route, delete, get, post
from agentd.rpc.queries import CreateQuery
from agentd.rpc.requests import SignalRequest, StopRequest
from agentd.rpc.routes import LOG, METRICS, PREFER
from agentd.rpc.routes import ROUTES as NODE_ROUTES
from agentd.views import CallerView, SlotTypeView
from agentd_fleet.gateway import views
from agentd_fleet.gateway.handlers import Gateway
from agentd_fleet.gateway.queries import (
    CordonRequest,
    FleetDeleteQuery,
    FleetKernelsQuery,
    FleetLogsQuery,
    KernelQuery,
    NodesQuery,
    StatsQuery,
)
from agentd_fleet.placement.requests import FleetKernelRequest

_KERNEL = views.FleetKernelView
_SHOWN = _KERNEL | views.UnknownKernelView
_ANY, _AT_NODE = "/v1/nodes/{node}/{rest}", "/v1/nodes/{node}"


def _proxy_route(method: str, handler: Handler) -> Route:
    """Return the proxy route of a method, with the node's routes that it covers."""
    covered = [
        replace(
            route,
            path=_AT_NODE + route.path.removeprefix("/v1"),
            name=f"{route.operation_id}_at_node",
        )
        for route in NODE_ROUTES
        if route.method == method and route.path.startswith("/v1/")
        if not (method == "POST" and route.path.endswith("/kernels"))  # see `Gateway.pass_to_node`
    ]
    return Route(method, _ANY, handler, {200: Any}, proxied_routes=tuple(covered))


def routes(site: Gateway | type[Gateway]) -> Sequence[Route]:
    """Return the table of routes, bound to a gateway or to its class for a document."""
    create = {200: _KERNEL | views.FleetDecisionView, 201: _KERNEL, 202: _KERNEL}
    kernel, use, nobody = "/v1/kernels/{kernel}", Right.KERNELS, None
    return (
        get("/v1/nodes", site.list_nodes, list[views.FleetNodeView]),
        get("/v1/nodes/{node}", site.get_node, views.FleetNodeView),
        delete("/v1/nodes/{node}", site.forget_node, right=Right.NODE),
        post(
            "/v1/nodes/{node}/cordon",
            site.cordon_node,
            views.FleetNodeView,
            body=CordonRequest,
            right=Right.NODE,
        ),
        post(
            "/v1/nodes/{node}/uncordon", site.uncordon_node, views.FleetNodeView, right=Right.NODE
        ),
        get("/v1/slot-types", site.list_slot_types, list[SlotTypeView]),
        delete("/v1/slot-types/{slot}", site.forget_slot_type, right=Right.NODE),
        get("/v1/stats", site.get_stats, views.StatsView, query=StatsQuery),
        get("/v1/devices", site.list_devices, list[views.FleetDeviceView], query=NodesQuery),
        post(
            "/v1/kernels",
            site.create_kernel,
            create,
            query=CreateQuery,
            headers=(PREFER,),
            body=FleetKernelRequest,
            right=use,
        ),
        get("/v1/kernels", site.list_kernels, list[_SHOWN], query=FleetKernelsQuery),
        get(kernel, site.get_kernel, _SHOWN, query=KernelQuery),
        post(
            f"{kernel}/signal",
            site.signal_kernel,
            {204: None},
            query=KernelQuery,
            body=SignalRequest,
            right=use,
        ),
        post(
            f"{kernel}/stop",
            site.stop_kernel,
            _KERNEL,
            query=KernelQuery,
            body=StopRequest,
            right=use,
        ),
        delete(kernel, site.delete_kernel, query=FleetDeleteQuery, right=use),
        get(f"{kernel}/logs", site.get_logs, LOG, query=FleetLogsQuery, right=Right.OUTPUT),
        get(
            f"{kernel}/exec",
            site.exec_kernel,
            {SWITCHING_PROTOCOLS: None},
            query=KernelQuery,
            right=Right.OUTPUT,
        ),
        get(f"{kernel}/stats", site.get_use, views.FleetKernelUseView, query=KernelQuery),
        *(_proxy_route(method, site.pass_to_node) for method in ("GET", "POST", "PUT", "DELETE")),
        get("/v1/whoami", site.whoami, CallerView),
        get("/v1/openapi.json", site.get_openapi, {200: dict[str, Any]}),
        get("/metrics", site.get_metrics, METRICS),
        get("/livez", site.livez, {200: dict[str, str]}, right=nobody),
        get("/readyz", site.readyz, {200: dict[str, str], 503: dict[str, str]}, right=nobody),
    )


ROUTES = routes(Gateway)
"""The unbound table, for documents."""
