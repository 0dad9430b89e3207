"""Conversion of problems (RFC 9457) to the errors of `agentd.errors`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from agentd.errors import MOST_DETAIL, AgentdError, Problem, Refused, Unavailable, Unreachable

_SERVER_ERROR = 500
NO_FACTS = frozenset({"type", "title", "status", "detail", "code", "retry_after_s"})


def error_of(content: Mapping[str, Any]) -> AgentdError:
    """Return the error of a problem: its class by `code`, its facts as attributes.

    An unknown code becomes a `Refused`.
    """
    kind = _CLASSES.get(str(content.get("code", "")))
    detail = str(content.get("detail", content))
    if kind is None:
        return Refused(str(content.get("code", "Internal")), detail, content)
    error = kind.__new__(kind)
    Exception.__init__(error, detail)
    for name, value in content.items():
        if name not in NO_FACTS and not name.startswith("_") and not hasattr(AgentdError, name):
            setattr(error, "limit" if name == "reason" else name, value)
    if isinstance(listed := content.get("errors"), list):
        problems = tuple(
            Problem(str(item.get("where", "")), str(item.get("why", "")))
            for item in listed
            if isinstance(item, dict)
        )
        error.problems = problems  # type: ignore[attr-defined]
    slots = content.get("known_slots")
    if slots is not None:
        error.known = slots  # type: ignore[attr-defined]
    error.content = dict(content)
    return error


def error_in(status: int, raw: bytes, retry_after: str | None = None) -> AgentdError:
    """Return the error of an answer; `retry_after` is that header."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict):
        error = error_of(content)
    else:
        text = raw[:MOST_DETAIL].decode(errors="replace") or f"HTTP {status}"
        error = Refused("Internal" if status >= _SERVER_ERROR else "BadRequest", text, {})
    if isinstance(error, Unavailable) and re.fullmatch("[0-9]{1,9}", retry_after or ""):
        error.retry_after_s = max(1, int(retry_after or ""))  # type: ignore[misc]
    return error


def content_of(raw: bytes) -> Any:
    """Parse the JSON of a successful answer, None if it is empty.

    Raises:
        Refused: it is not JSON, so not from this API.
    """
    try:
        return json.loads(raw) if raw else None
    except (ValueError, RecursionError):
        shown = raw[:80].decode(errors="replace")
        raise Refused("Internal", f"the answer is not JSON: {shown!r}", {}) from None


def unreachable(where: str, error: Exception) -> Unreachable:
    """Return the error of a call without an answer."""
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return Unreachable(f"{where}: {why}")


def _all(kind: type[AgentdError]) -> Iterator[type[AgentdError]]:
    for below in kind.__subclasses__():
        yield below
        yield from _all(below)


_CLASSES = {
    kind.code: kind
    for kind in reversed(list(_all(AgentdError)))
    if "code" in vars(kind) and kind is not Refused
}
