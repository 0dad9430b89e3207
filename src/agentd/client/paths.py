"""Paths of calls, with their query parameters."""

from __future__ import annotations

import re
from urllib.parse import quote, urlencode

from agentd.errors import InvalidRequest, Problem

_RAW = "surrogateescape"
"""Command line bytes that are not UTF-8 are sent unchanged; the daemon refuses them."""

_NEXT = re.compile(r'<[^<>?]*\?([!"$-;=?-~]+)(?:#[^<>]*)?>\s*;\s*rel="?next"?')
"""A link to the next page, with a query of printable ASCII; the time is linear in the header."""


def next_query(link: str | None) -> str | None:
    """Return the query of the next page in the header `Link` (RFC 8288), None if it has none."""
    match = _NEXT.search(link or "")
    return match[1] if match else None


def api_path(*parts: str, **query: object) -> str:
    """Return the path of a call, without parameters that are None or False; lists are repeated.

    Raises:
        InvalidRequest: a part is a path step, which would lead to another call.
    """
    if path_steps := [part for part in parts if part in ("", ".", "..")]:
        raise InvalidRequest([Problem("", f"invalid name {path_steps[0]!r}")])
    path = "/v1/" + "/".join(quote(part, safe="", errors=_RAW) for part in parts)
    pairs = [
        (name, "true" if item is True else str(item))
        for name, value in query.items()
        for item in (value if isinstance(value, (list, tuple)) else [value])
        if item is not None and item is not False
    ]
    return f"{path}?{urlencode(pairs, errors=_RAW)}" if pairs else path
