"""The OpenAPI documents: valid and complete, with bounds in bodies, and flags are booleans."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from openapi_spec_validator import validate

from agentd.http.openapi import build_document
from agentd.http.route import Route
from agentd.rpc.routes import ROUTES
from agentd_fleet.gateway.routes import ROUTES as FLEET_ROUTES

BOTH = [pytest.param(ROUTES, id="node"), pytest.param(FLEET_ROUTES, id="fleet")]
NEEDS = {
    "string": ("maxLength", "enum", "const"),
    "array": ("maxItems",),
    "integer": ("maximum",),
}
AMOUNT = "/slots/*"
"""Amounts have the bound of their slot's kind, which the schema does not know."""


def unbounded(schema: Mapping[str, Any], defs: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield the places in a schema that take a value of any size."""
    while (ref := schema.get("$ref")) is not None:
        schema = defs[ref.rpartition("/")[2]]
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from unbounded(choice, defs, where)
    kind = schema.get("type")
    if kind is None and "anyOf" not in schema and "oneOf" not in schema:
        yield f"{where}: anything"
    if kind in NEEDS and not any(key in schema for key in NEEDS[kind]):
        yield f"{where}: {kind}"
    if kind == "number" and "maximum" not in schema and not where.endswith(AMOUNT):
        yield f"{where}: number"
    if kind == "array":
        yield from unbounded(schema["items"], defs, f"{where}/[]")
    if kind == "object":
        yield from unbounded_object(schema, defs, where)


def unbounded_object(
    schema: Mapping[str, Any], defs: Mapping[str, Any], where: str
) -> Iterator[str]:
    for name, member in schema.get("properties", {}).items():
        yield from unbounded(member, defs, f"{where}/{name}")
    others = [*schema.get("patternProperties", {}).values()]
    if isinstance(more := schema.get("additionalProperties", {}), Mapping):
        others += [more] if more or "properties" not in schema else []
    if "properties" in schema and more is not False:
        yield f"{where}: unknown members"
    if "properties" not in schema and "maxProperties" not in schema:
        yield f"{where}: object"
    if "properties" not in schema and "maxLength" not in schema.get("propertyNames", {}):
        yield f"{where}: names"
    for other in others:
        if other:
            yield from unbounded(other, defs, f"{where}/*")


def described(routes: Sequence[Route]) -> list[Route]:
    """Return the routes that a document shows: calls that are passed on as those of a node."""
    return [shown for route in routes for shown in route.proxied_routes or (route,)]


@pytest.mark.parametrize("routes", BOTH)
def test_document_bounds_every_member_of_every_body(routes: Sequence[Route]) -> None:
    whole = build_document("x", routes)
    defs = whole["components"]["schemas"]
    bodies = 0
    for path, calls in whole["paths"].items():
        for call in calls.values():
            if "requestBody" in call:
                bodies += 1
                schema = call["requestBody"]["content"]["application/json"]["schema"]
                assert [*unbounded(schema, defs, path)] == []
    assert bodies == sum(route.body is not None for route in described(routes))


@pytest.mark.parametrize("routes", BOTH)
def test_document_is_valid_and_has_every_route(routes: Sequence[Route]) -> None:
    whole = build_document("x", routes)
    validate(whole)
    shown = {(method.upper(), path) for path, calls in whole["paths"].items() for method in calls}
    assert shown == {(route.method, route.path) for route in described(routes)}
    ids = [call["operationId"] for calls in whole["paths"].values() for call in calls.values()]
    assert len(set(ids)) == len(ids) == len(described(routes))


def test_gateway_document_has_the_proxied_paths() -> None:
    paths = build_document("x", FLEET_ROUTES)["paths"]
    assert not [path for path in paths if "{rest}" in path]
    for route in ROUTES:
        path = f"/v1/nodes/{{node}}{route.path.removeprefix('/v1')}"
        is_passed = route.path.startswith("/v1/") and route.action != "create_kernel"
        assert (route.method.lower() in paths.get(path, {})) == is_passed, route.path


@pytest.mark.parametrize("routes", BOTH)
def test_document_describes_every_member_of_every_body(routes: Sequence[Route]) -> None:
    schemas = build_document("x", routes)["components"]["schemas"]
    bodies = {n: s for n, s in schemas.items() if s.get("additionalProperties") is False}
    assert {"StopRequest", "MountRequest", "HolderRequest"} <= bodies.keys()
    members = [(n, m, schema) for n, s in bodies.items() for m, schema in s["properties"].items()]
    assert [(n, m) for n, m, schema in members if not schema.get("description")] == []
