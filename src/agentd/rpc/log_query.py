"""Query parameters of a log request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime

from agentd.errors import InvalidRequest, Problem
from agentd.http.queries import read_flag
from agentd.services.protocols import LogQuery, LogStream

_TIME = re.compile(
    r"([0-9]{1,12}|[0-9-]{10}T[0-9:]{8})(?:\.([0-9]{1,9}))?(Z|[+-][0-9]{2}:[0-9]{2})?"
)


def read_log_query(query: Mapping[str, str]) -> LogQuery:
    """Parse the query parameters of a log request.

    Raises:
        InvalidRequest: a parameter is invalid.
    """
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
    """Return `since` in nanoseconds since the epoch, the engine's own resolution."""
    text = query.get("since", "0").replace(" ", "+")  # a plus sign in a query means a space
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
