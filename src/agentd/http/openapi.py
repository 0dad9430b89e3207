"""OpenAPI documents, generated from tables of routes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter

from agentd import __version__
from agentd.http.path_names import schema_of
from agentd.http.route import SWITCHED, Media, Parameter, Route
from agentd.views import (
    ProblemView,
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
