"""OpenAPI documents, generated from tables of routes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter

from agentd import __version__
from agentd.http.queries import parameter_schemas
from agentd.http.route import SWITCHING_PROTOCOLS, Media, Route, parameter_schema
from agentd.views import (
    ProblemView,
)


def build_document(title: str, routes: Iterable[Route]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of routes."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    described = [shown for route in routes for shown in route.proxied_routes or (route,)]
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
            *(_parameter("path", name, parameter_schema(name)) for name in names),
            *(
                _parameter("query", name, schema)
                for name, schema in parameter_schemas(route.query).items()
            ),
            *(_parameter("header", h.name, h.schema, h.description) for h in route.headers),
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


def _parameter(
    place: str, name: str, schema: Mapping[str, Any], description: str = ""
) -> dict[str, Any]:
    schema = dict(schema)
    description = schema.pop("description", description)
    parameter = {"name": name, "in": place, "required": place == "path", "schema": schema}
    return parameter | ({"description": description} if description else {})


_DESCRIPTIONS = {
    0: "a problem",
    SWITCHING_PROTOCOLS: "a WebSocket",
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
        headers = {
            header.name: {"description": header.description, "schema": header.schema}
            for header in model.headers
        }
        described = {"description": model.description, "content": content}
        return described | ({"headers": headers} if headers else {})
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
