"""The routes as a table, from which both the server and its OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from aiohttp import web
from pydantic import TypeAdapter

from agentd import __version__
from agentd.core.access import Right
from agentd.core.kernel.states import KERNEL_ID, KernelState
from agentd.http.path_names import schema_of
from agentd.http.queries import MAX_TIMEOUT_S
from agentd.rpc.handlers import Handlers
from agentd.rpc.pages import MAX_PAGE
from agentd.rpc.requests import Body, CreateKernelRequest, StopRequest
from agentd.views import (
    AgentView,
    CallerView,
    DecisionView,
    DeviceView,
    KernelUseView,
    KernelView,
    NodeView,
    PluginView,
    ProblemView,
    RefusalView,
    RuntimeView,
    SlotTypeView,
)

Handler: TypeAlias = Callable[[Any, web.Request], Awaitable[web.StreamResponse]]
"""A method of what is served."""
PROBE_PATHS = frozenset({"/livez", "/readyz"})
OPEN_PATHS = PROBE_PATHS | {"/v1/openapi.json", "/v1/whoami"}
"""Answered while the daemon starts."""


class Parameter(msgspec.Struct, frozen=True):
    """A query parameter or a header, and the JSON schema of its value."""

    name: str
    schema: Mapping[str, Any]
    description: str
    is_repeatable: bool = False
    place: str = "query"


class Media(msgspec.Struct, frozen=True):
    """An answer that is no JSON: its media type, and what it is."""

    type: str
    description: str


class Route(msgspec.Struct, frozen=True):
    """One call: `answers` maps a status to what it carries (None: nothing)."""

    method: str
    path: str
    handler: Handler
    answers: dict[int, Any]
    takes: tuple[Parameter, ...] = ()
    body: type[Body] | None = None
    right: Right | None = Right.LOOK
    """What a caller needs; None: nothing, not even a token."""
    passes: tuple[Route, ...] = ()
    """The known calls among those that it passes on: they are described in its place."""
    name: str = ""
    """The operation id; by default the handler's name, and `_of_agent` where an agent is named."""

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The query parameters by name."""
        return {item.name: item for item in self.takes if item.place == "query"}

    @property
    def action(self) -> str:
        """What the call does, in the log and in events."""
        return self.handler.__name__

    @property
    def operation_id(self) -> str:
        """The name of the call in the OpenAPI document, unique among all routes."""
        suffix = "_of_agent" if "agent}/" in self.path else ""
        return self.name or f"{self.action}{suffix}"

    @property
    def is_audited(self) -> bool:
        """Whether each call is written down: it changes something, or runs something."""
        return self.method != "GET" or SWITCHED in self.answers


SWITCHED = 101
"""The status of an answer that is a WebSocket (RFC 6455)."""
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


def document(title: str, routes: Iterable[Route]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of routes."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    described = [shown for route in routes for shown in route.passes or (route,)]
    for route in described:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    operation: dict[str, Any] = {
        "operationId": route.operation_id,
        "summary": (route.handler.__doc__ or "").strip(),
        "parameters": [
            *(_shown(Parameter(name, schema_of(name), "", place="path")) for name in names),
            *(_shown(parameter) for parameter in route.takes),
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
            "required": issubclass(route.body, CreateKernelRequest),
        }
    return operation


def _shown(parameter: Parameter) -> dict[str, Any]:
    schema = parameter.schema
    shown: dict[str, Any] = {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.place == "path",
        "schema": {"type": "array", "items": schema} if parameter.is_repeatable else schema,
    }
    return shown | ({"description": parameter.description} if parameter.description else {})


_DESCRIPTIONS = {
    0: "a problem",
    SWITCHED: "a WebSocket",
    201: "created",
    202: "accepted",
    204: "done",
}


def _response(status: int, model: Any, schemas: dict[str, Any], media: str) -> dict[str, Any]:  # noqa: ANN401 - a type
    description = _DESCRIPTIONS.get(status, "ok")
    if model is None:
        return {"description": description}
    if isinstance(model, Media):
        content = {model.type: {"schema": {"type": "string"}}}
        return {"description": model.description, "content": content}
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
