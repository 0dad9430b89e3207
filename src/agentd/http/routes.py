"""Routes as a table, from which both the server and its OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias

import msgspec
from aiohttp import web
from pydantic import TypeAdapter

from agentd import __version__
from agentd.core.access import Right
from agentd.http.bodies import Body
from agentd.http.path_names import schema_of
from agentd.views import (
    ProblemView,
)

Handler: TypeAlias = Callable[..., Awaitable[web.StreamResponse]]
"""A method that takes a request; bound in the table of a server, unbound in that of a document."""


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


def get(path: str, handler: Handler, answers: Any, *takes: Parameter, **more: Any) -> Route:
    """Return the route of a GET; `answers` by status, or the model of a 200."""
    return Route("GET", path, handler, _by_status(answers), takes, **more)


def post(path: str, handler: Handler, answers: Any, *takes: Parameter, **more: Any) -> Route:
    """Return the route of a POST; `answers` by status, or the model of a 200."""
    return Route("POST", path, handler, _by_status(answers), takes, **more)


def delete(path: str, handler: Handler, *takes: Parameter, **more: Any) -> Route:
    """Return the route of a DELETE, which is answered with 204."""
    return Route("DELETE", path, handler, {204: None}, takes, **more)


def _by_status(answers: Any) -> dict[int, Any]:
    return answers if isinstance(answers, dict) else {200: answers}


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
            "required": route.body.is_required,
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


def _response(status: int, model: Any, schemas: dict[str, Any], media: str) -> dict[str, Any]:
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


def _schema(model: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    schema = TypeAdapter(model).json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schema.pop("$defs", {}))
    title = schema.get("title")
    if title and schema.get("type") == "object":
        schemas[title] = schema
        return {"$ref": f"#/components/schemas/{title}"}
    return schema
