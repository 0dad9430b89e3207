"""Problems (RFC 9457): error codes and their statuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

BAD_GATEWAY = 502
STATUSES = {
    "UnsupportedResource": 422,
    "ConfigRefused": 422,
    "InvalidRequest": 422,
    "InvalidSlotAmount": 422,
    "InvalidSlotCombination": 422,
    "ImageNotFound": 422,
    "CommandNotFound": 422,
    "InsufficientResource": 409,
    "KernelConflict": 409,
    "ClaimConflict": 409,
    "Conflict": 409,
    "UnknownAgent": 404,
    "UnknownKernel": 404,
    "UnknownDevice": 404,
    "UnknownClaim": 404,
    "UnknownEngine": 404,
    "UnknownRuntime": 404,
    "UnknownPlugin": 404,
    "UnknownNode": 404,
    "UnknownSlotType": 404,
    "SlotTypeInUse": 409,
    "NotFound": 404,
    "MethodNotAllowed": 405,
    "RequestTimeout": 408,
    "WrongNode": 421,
    "BodyTooLarge": 413,
    "ExpectationFailed": 417,
    "BadRequest": 400,
    "Unauthorized": 401,
    "Forbidden": 403,
    "TooManyStreams": 429,
    "TooManyClaims": 429,
    "Internal": 500,
    "RuntimeFailure": 502,
    "PluginUnavailable": 503,
    "RuntimeUnavailable": 503,
    "StateUnavailable": 503,
    "NotReady": 503,
    "Draining": 503,
    "NodeUnavailable": 503,
    "FleetStoreUnavailable": 503,
    "RouteUnreadable": 503,
    "FleetStoreRefused": 502,
}
CREATE_CODES = frozenset(
    {code for code, status in STATUSES.items() if status in (409, 422, 500, 502, 503)}
    | {"Forbidden", "UnknownAgent", "UnknownClaim", "UnknownDevice", "UnknownNode"}
    - {"ConfigRefused", "SlotTypeInUse"}
)
"""Codes that may answer a create; each has a counter that starts at zero."""
STANDARD_MEMBERS = frozenset({"type", "title", "status", "detail", "code"})
"""Members of every problem; other members are facts of one code."""
HTTP_CODES = {404: "NotFound", 405: "MethodNotAllowed", 413: "BodyTooLarge", 403: "Forbidden"}


def problem_response(
    code: str, detail: str, facts: object = None, headers: dict[str, str] | None = None
) -> web.Response:
    """Return an error as a problem response; `facts` are additional members.

    An unknown code, which a gateway passes on from a node of another version, becomes a 502.
    """
    content = problem_members(code, detail, facts)
    return web.Response(
        body=json.dumps(content).encode(),
        status=content["status"],
        content_type="application/problem+json",
        headers=headers,
    )


def problem_members(code: str, detail: str, facts: object = None) -> dict[str, Any]:
    """Return the members of a problem."""
    return {
        "type": "about:blank",
        "title": code,
        "status": STATUSES.get(code, BAD_GATEWAY),
        "detail": detail,
        "code": code,
        **(facts if isinstance(facts, Mapping) else {}),
    }
