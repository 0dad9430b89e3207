"""Problems (RFC 9457): the responses of errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from agentd.error_codes import ERROR_CODES

BAD_GATEWAY = 502
STATUSES = {code: row.status for code, row in ERROR_CODES.items()}
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
