"""Conversion of problems (RFC 9457) to the errors of `agentd.errors`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, TypeVar

from agentd import errors
from agentd.errors import (
    MAX_DETAIL,
    AgentdError,
    AnswerLost,
    ConfigRefused,
    Forbidden,
    InsufficientResource,
    InvalidRequest,
    InvalidSlotAmount,
    InvalidSlotCombination,
    OutcomeUnknown,
    Problem,
    Refused,
    RefusedForNow,
    RuntimeUnavailable,
    Unavailable,
    Unreachable,
    UnsupportedResource,
)

_T = TypeVar("_T")
MAX_CODE = 64
"""Maximum characters of a code, which becomes part of texts about many nodes."""
_SERVER_ERROR, _UNAVAILABLE = 500, 503
_PROXY_ERRORS = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
"""Statuses of a proxy that got no answer."""


def error_from_problem(content: Mapping[str, Any]) -> AgentdError:
    """Return the error of a problem: its class by `code`; an unknown code becomes a `Refused`."""
    code = str(content.get("code", "Internal"))[:MAX_CODE]
    detail = str(content.get("detail", content))
    error_class = _CLASSES.get(code)
    if error_class is None:
        kind = RefusedForNow if content.get("status") == _UNAVAILABLE else Refused
        return kind(code, detail, content)
    error = _with_facts(error_class, content)
    error.args = (detail,)
    error.content = dict(content)
    return error


def _with_facts(error_class: type[AgentdError], content: Mapping[str, Any]) -> AgentdError:
    """Return an error of a class with the facts of a problem; malformed ones are left out."""
    if issubclass(error_class, UnsupportedResource):
        slots, known = _entries(content, "slots", str), _entries(content, "known_slots", str)
        plugins = content.get("plugins")
        return error_class(slots, known, plugins if isinstance(plugins, dict) else {})
    if issubclass(error_class, InsufficientResource):
        names = ("slot", "requested", "free", "reason")
        slot, requested, free, limit = (str(content.get(name, "")) for name in names)
        return error_class(slot, requested, free, _entries(content, "explain", dict), limit)
    if issubclass(error_class, Forbidden):
        return error_class("", "", "", _entries(content, "roles", str))
    if issubclass(error_class, OutcomeUnknown):
        return error_class(kernel_id=str(content.get("kernel_id", "")))
    if issubclass(error_class, _LISTED):
        return error_class(
            [
                Problem(str(entry.get("where", "")), str(entry.get("why", "")))
                for entry in _entries(content, "errors", dict)
            ]
        )
    return error_class()


def _entries(content: Mapping[str, Any], member: str, kind: type[_T]) -> list[_T]:
    """Return the entries of a list that are of a kind."""
    entries = content.get(member)
    return [e for e in entries if isinstance(e, kind)] if isinstance(entries, list) else []


def error_from_response(status: int, body: bytes, retry_after: str | None = None) -> AgentdError:
    """Return the error of an answer; `retry_after` is that header."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    error: AgentdError
    if isinstance(content, dict) and "code" in content:
        error = error_from_problem({"status": status, **content})
    elif status in _PROXY_ERRORS:
        text = f"a proxy answered: {status} {HTTPStatus(status).phrase}"
        error = AnswerLost(text)
        if status == _UNAVAILABLE:
            content = {"code": error.code, "status": status, "detail": text}
            error = RefusedForNow(error.code, text, content)
    else:
        text = body[:MAX_DETAIL].decode(errors="replace") or f"HTTP {status}"
        error = Refused("Internal" if status >= _SERVER_ERROR else "BadRequest", text, {})
    if isinstance(error, Unavailable) and re.fullmatch("[0-9]{1,9}", retry_after or ""):
        error.retry_after_s = max(1, int(retry_after or ""))
    return error


def parse_content(body: bytes) -> Any:
    """Parse the JSON of a successful answer, None if it is empty.

    Raises:
        Refused: it is not JSON, so not from this API.
    """
    try:
        return json.loads(body) if body else None
    except (ValueError, RecursionError):
        excerpt = body[:80].decode(errors="replace")
        raise Refused("Internal", f"the answer is not JSON: {excerpt!r}", {}) from None


def unreachable_error(address: str, error: Exception, *, is_sent: bool = False) -> Unreachable:
    """Return the error of a call without an answer; one that was sent may be carried out."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return (AnswerLost if is_sent else Unreachable)(f"{address}: {reason}")


def broken_stream_error(address: str, error: Exception) -> Unavailable:
    """Return the error of a stream that broke."""
    if reason := getattr(error, "strerror", None):
        return AnswerLost(f"{address}: {reason}")
    return RuntimeUnavailable("agentd, its runtime or a proxy closed it")


def cut_stream_error(subject: str, error: Unavailable) -> Unavailable:
    """Return the error of a stream that broke, after the reason: its end, or the next attempt's."""
    text = f"{subject} was cut off before its end: {error}"
    error.args, error.content = (text,), {**error.content, "detail": text}
    return error


_LISTED = (ConfigRefused, InvalidRequest, InvalidSlotAmount, InvalidSlotCombination)
_CLASSES = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and issubclass(kind, AgentdError)
    and "code" in vars(kind)
    and kind not in (AgentdError, Refused)
}
