"""What stands beside a body: query parameters and headers, read and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime

from aiohttp import web

from agentd.errors import InvalidRequest, Problem
from agentd.services.interfaces import LogQuery, LogStream

MAX_TIMEOUT_S = 86400.0
_TRUE, _FALSE = ("true", "1", ""), ("false", "0")


async def body_of(request: web.Request) -> bytes:
    """Return a request's body.

    Raises:
        InvalidRequest: it cannot be read.
    """
    try:
        return await request.read()
    except web.RequestPayloadError as error:
        raise InvalidRequest([Problem("", f"the body cannot be read: {error}")]) from None


def prefers_async(request: web.Request) -> bool:
    """Read the Prefer header (RFC 7240)."""
    preferences = ",".join(request.headers.getall("Prefer", [])).split(",")
    return any(item.split(";")[0].strip().lower() == "respond-async" for item in preferences)


def read_flag(query: Mapping[str, str], name: str) -> bool:
    """Read a parameter that is true or false; absent is false."""
    value = query.get(name, "false").lower()
    if value not in _TRUE + _FALSE:
        raise InvalidRequest([Problem(name, f"{value!r} is neither; allowed: true, false")])
    return value in _TRUE


def read_timeout(query: Mapping[str, str]) -> float | None:
    """Read `timeout`, in seconds."""
    text = query.get("timeout")
    if text is None:
        return None
    seconds = _number(text)
    if not 0 <= seconds <= MAX_TIMEOUT_S:
        why = f"{text!r} is no time; allowed: 0 to {MAX_TIMEOUT_S:g} seconds"
        raise InvalidRequest([Problem("timeout", why)])
    return seconds


def read_log_query(query: Mapping[str, str]) -> LogQuery:
    """Read what is wanted of a log."""
    stream = query.get("stream", "both")
    if stream not in ("both", *LogStream):
        why = f"{stream!r} is no stream; allowed: both, stdout, stderr"
        raise InvalidRequest([Problem("stream", why)])
    return LogQuery(
        follow=read_flag(query, "follow"),
        tail=_tail(query),
        since=_since(query),
        timestamps=read_flag(query, "timestamps"),
        streams=frozenset(LogStream) if stream == "both" else frozenset({LogStream(stream)}),
    )


def _tail(query: Mapping[str, str]) -> int | None:
    text = query.get("tail", "all")
    if text == "all":
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):  # noqa: PLR2004 - a thousand million lines
        raise InvalidRequest(
            [Problem("tail", f'{text!r} is no number of lines; allowed: 100, "all"')]
        )
    return int(text)


def _since(query: Mapping[str, str]) -> float | None:
    text = query.get("since")
    if text is None:
        return None
    seconds = _number(text)
    if math.isnan(seconds):
        try:
            moment = datetime.fromisoformat(text.replace(" ", "+"))
            seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            seconds = math.nan
    if not 0 <= seconds < 2**40:
        why = f"{text!r} is no time; allowed: 2026-11-21T12:00:00Z, or seconds since 1970"
        raise InvalidRequest([Problem("since", why)])
    return seconds


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
