"""Paths of calls, with what they ask for."""

from __future__ import annotations

from urllib.parse import quote, urlencode

from agentd.errors import InvalidRequest, Problem

_RAW = "surrogateescape"
"""Bytes of a command line that are not UTF-8 are sent as they are, and refused by the daemon."""


def at(*parts: str, **query: object) -> str:
    """Return the path of a call; parameters that are None are left out, lists are repeated.

    Raises:
        InvalidRequest: a part is a step in a path, which would lead to another call.
    """
    if steps := [part for part in parts if part in ("", ".", "..")]:
        raise InvalidRequest([Problem("", f"invalid name {steps[0]!r}")])
    path = "/v1/" + "/".join(quote(part, safe="", errors=_RAW) for part in parts)
    pairs = [
        (name, item if isinstance(item, str) else _text(item))
        for name, value in query.items()
        for item in (value if isinstance(value, (list, tuple)) else [value])
        if item is not None
    ]
    return f"{path}?{urlencode(pairs, errors=_RAW)}" if pairs else path


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"
