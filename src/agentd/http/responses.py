"""JSON responses."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from aiohttp import web


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return a JSON response."""
    body = msgspec.json.encode(content)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
