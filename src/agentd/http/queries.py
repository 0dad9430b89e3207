"""Query parameters and headers, read and checked."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping
from datetime import datetime

from aiohttp import web

from agentd.errors import InvalidRequest, Problem, RequestTimeout
from agentd.services.protocols import LogQuery, LogStream

MAX_TIMEOUT_S = 86400.0
BODY_TIMEOUT_S = 30.0
_TIME = re.compile(
    r"([0-9]{1,12}|[0-9-]{10}T[0-9:]{8})(?:\.([0-9]{1,9}))?(Z|[+-][0-9]{2}:[0-9]{2})?"
)
_TOO_LARGE = "agentd.too-large"
_TRUE, _FALSE = ("true", "1", ""), ("false", "0")


async def body_of(request: web.Request) -> bytes:
    """Return a request's body.

    Raises:
        InvalidRequest: it cannot be read.
        RequestTimeout: it does not come.
        HTTPRequestEntityTooLarge: it is too large, as whoever asks again is told too.
    """
    if (too_large := request.get(_TOO_LARGE)) is not None:
        raise too_large
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise RequestTimeout(f"the body did not come within {BODY_TIMEOUT_S:g} s") from None
    except web.HTTPRequestEntityTooLarge as error:
        request[_TOO_LARGE] = error
        raise
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
        raise InvalidRequest([Problem(name, f"invalid value {value!r}: expected true or false")])
    return value in _TRUE


def is_true(query: Mapping[str, str], name: str) -> bool:
    """Tell whether a parameter is true; one that cannot be read is not."""
    return query.get(name, "false").lower() in _TRUE


def read_timeout(query: Mapping[str, str]) -> float | None:
    """Read `timeout`, in seconds."""
    text = query.get("timeout")
    if text is None:
        return None
    seconds = _number(text)
    if not 0 <= seconds <= MAX_TIMEOUT_S:
        why = f"invalid time {text!r}: expected 0 to {MAX_TIMEOUT_S:g} seconds"
        raise InvalidRequest([Problem("timeout", why)])
    return seconds


def read_log_query(query: Mapping[str, str]) -> LogQuery:
    """Read the parameters of a log request."""
    stream = query.get("stream", "both")
    if stream not in ("both", *LogStream):
        why = f"invalid stream {stream!r}: expected both, stdout or stderr"
        raise InvalidRequest([Problem("stream", why)])
    return LogQuery(
        follow=read_flag(query, "follow"),
        tail=_tail(query),
        since_ns=_since(query),
        timestamps=read_flag(query, "timestamps"),
        streams=frozenset(LogStream) if stream == "both" else frozenset({LogStream(stream)}),
    )


def _tail(query: Mapping[str, str]) -> int | None:
    text = query.get("tail", "all")
    if text == "all":
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):  # noqa: PLR2004 - a thousand million lines
        raise InvalidRequest(
            [Problem("tail", f'invalid number of lines {text!r}: expected 0 or more, or "all"')]
        )
    return int(text)


def _since(query: Mapping[str, str]) -> int:
    """Return `since` in nanoseconds since 1970, the resolution of the engine's own times."""
    text = query.get("since", "0").replace(" ", "+")  # a plus sign in a query is a blank
    lead, fraction, zone = match.groups("") if (match := _TIME.fullmatch(text)) else ("", "", "")
    try:
        if "T" in lead:
            moment = datetime.fromisoformat(lead + (zone or "Z"))
            seconds = int(moment.timestamp())
        else:
            seconds = int(lead)
        if not zone or "T" in lead:
            return seconds * 10**9 + int(fraction.ljust(9, "0"))
    except (ValueError, OverflowError):
        pass
    why = f"invalid time {text!r}: expected 2026-11-21T12:00:00Z, or seconds since 1970"
    raise InvalidRequest([Problem("since", why)])


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
