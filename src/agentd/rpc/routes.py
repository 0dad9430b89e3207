"""The routes as a table, from which both the server and its OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from aiohttp import web
from pydantic import TypeAdapter

from agentd import __version__
from agentd.core.access import Right
from agentd.rpc.handlers import Handlers
from agentd.rpc.schemas import Body, CreateKernelRequest, StopRequest
from agentd.views import (
    AgentView,
    CallerView,
    DecisionView,
    DeviceView,
    KernelView,
    NodeView,
    PluginView,
    ProblemView,
    RuntimeView,
    SlotTypeView,
)

Handler: TypeAlias = Callable[[Handlers, web.Request], Awaitable[web.StreamResponse]]
OPEN_PATHS = frozenset({"/livez", "/readyz", "/v1/openapi.json", "/v1/whoami"})
"""Answered while the daemon starts."""


@dataclass(frozen=True, slots=True)
class Route:
    """One call: `answers` maps a status to what it carries (None: no JSON)."""

    method: str
    path: str
    handler: Handler
    answers: dict[int, Any]
    query: tuple[str, ...] = ()
    body: type[Body] | None = None
    right: Right | None = Right.LOOK
    """What a caller needs; None: nothing, not even a token."""
    repeatable: tuple[str, ...] = ()

    @property
    def action(self) -> str:
        """What the call does, in the log and in events."""
        return self.handler.__name__


LOG_QUERY = ("follow", "tail", "since", "timestamps", "stream")
H = Handlers
ROUTES: Sequence[Route] = (
    Route("GET", "/v1/node", H.get_node, {200: NodeView}, ("check",)),
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
        ("dry_run",),
        CreateKernelRequest,
        Right.KERNELS,
    ),
    Route("GET", "/v1/agents/{agent}/kernels", H.list_kernels, {200: list[KernelView]}),
    Route("GET", "/v1/kernels", H.list_kernels, {200: list[KernelView]}),
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
        ("timeout",),
        right=Right.KERNELS,
    ),
    Route(
        "GET",
        "/v1/kernels/{kernel}/logs",
        H.get_logs,
        {200: None},
        LOG_QUERY,
        right=Right.OUTPUT,
    ),
    Route("GET", "/v1/events", H.get_events, {200: None}, ("last_event_id",)),
    Route("GET", "/v1/whoami", H.whoami, {200: CallerView}),
    Route("GET", "/v1/openapi.json", H.get_openapi, {200: dict[str, Any]}),
    Route("GET", "/metrics", H.get_metrics, {200: None}),
    Route("GET", "/livez", H.livez, {200: dict[str, str]}, right=None),
    Route("GET", "/readyz", H.readyz, {200: dict[str, str]}, right=None),
)


@cache
def openapi() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of `ROUTES`."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "agentd", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    name = route.handler.__name__
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    operation: dict[str, Any] = {
        "operationId": name if "agent}/" not in route.path else f"{name}_of_agent",
        "summary": (route.handler.__doc__ or "").strip(),
        "parameters": [
            *(_parameter(item, "path", required=True) for item in names),
            *(_parameter(item, "query", required=False) for item in route.query),
        ],
        "responses": {
            str(status): _response(status, model, schemas, "application/json")
            for status, model in route.answers.items()
        },
    }
    operation["responses"]["default"] = _response(
        0, ProblemView, schemas, "application/problem+json"
    )
    if route.body is not None:
        content = {"application/json": {"schema": _schema(route.body, schemas)}}
        operation["requestBody"] = {
            "content": content,
            "required": bool(route.body is CreateKernelRequest),
        }
    return operation


def _parameter(name: str, place: str, *, required: bool) -> dict[str, Any]:
    return {"name": name, "in": place, "required": required, "schema": {"type": "string"}}


def _response(status: int, model: Any, schemas: dict[str, Any], media: str) -> dict[str, Any]:  # noqa: ANN401 - a type
    description = {0: "a problem", 201: "created", 202: "accepted", 204: "done"}.get(status, "ok")
    if model is None:
        return {"description": description}
    return {
        "description": description,
        "content": {media: {"schema": _schema(model, schemas)}},
    }


def _schema(model: Any, schemas: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401 - a type
    schema = TypeAdapter(model).json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schema.pop("$defs", {}))
    title = schema.get("title")
    if title and schema.get("type") == "object":
        schemas[title] = schema
        return {"$ref": f"#/components/schemas/{title}"}
    return schema
