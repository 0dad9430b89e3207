"""Query parameters and headers, parsed and validated."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

from aiohttp import web
from multidict import MultiMapping

from agentd.errors import InvalidRequest, Problem, RequestTimeout

MAX_TIMEOUT_S = 86400.0
BODY_TIMEOUT_S = 30.0
_TOO_LARGE = "agentd.too-large"
_TRUE, _FALSE = ("true", "1", ""), ("false", "0")


async def body_of(request: web.Request) -> bytes:
    """Return the body of a request.

    Raises:
        InvalidRequest: the body cannot be read.
        RequestTimeout: the body does not arrive in time.
        HTTPRequestEntityTooLarge: the body is too large; repeated calls raise it again.
    """
    if (too_large := request.get(_TOO_LARGE)) is not None:
        raise too_large
    try:
        if request.content.is_eof():
            return await request.read()
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
    """Return whether a request prefers `respond-async` (RFC 7240)."""
    preferences = ",".join(request.headers.getall("Prefer", [])).split(",")
    return any(item.split(";")[0].strip().lower() == "respond-async" for item in preferences)


def read_flag(query: Mapping[str, str], name: str) -> bool:
    """Parse a boolean parameter; absent means false."""
    value = query.get(name, "false").lower()
    if value not in _TRUE + _FALSE:
        raise InvalidRequest([Problem(name, f"invalid value {value!r}: expected true or false")])
    return value in _TRUE


def is_true(query: Mapping[str, str], name: str) -> bool:
    """Return whether a parameter is true; an invalid value counts as false."""
    return query.get(name, "false").lower() in _TRUE


def read_timeout(query: Mapping[str, str]) -> float | None:
    """Parse `timeout`, in seconds."""
    text = query.get("timeout")
    if text is None:
        return None
    seconds = _number(text)
    if not 0 <= seconds <= MAX_TIMEOUT_S:
        why = f"invalid time {text!r}: expected 0 to {MAX_TIMEOUT_S:g} seconds"
        raise InvalidRequest([Problem("timeout", why)])
    return seconds


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


MAX_PAGE = 1000
"""Entries of a page of a list: the maximum, and the default."""
MAX_PAGE_BYTES = 4 << 20
"""Bytes of JSON after which a page ends."""


def read_labels(query: MultiMapping[str]) -> list[tuple[str, str]]:
    """Parse the repeatable parameter `label`: KEY=VALUE.

    Raises:
        InvalidRequest: a value is malformed.
    """
    found = []
    for given in query.getall("label", []):
        name, has_value, value = given.partition("=")
        if not has_value or not name:
            raise InvalidRequest([Problem("label", f"invalid value {given!r}: expected KEY=VALUE")])
        found.append((name, value))
    return found


def read_limit(query: MultiMapping[str]) -> int:
    """Parse `limit`; `MAX_PAGE` if absent.

    Raises:
        InvalidRequest: the value is not 1 to `MAX_PAGE`.
    """
    text = query.get("limit", f"{MAX_PAGE}")
    if not (text.isascii() and text.isdigit() and len(text) < len("10000")) or not (
        1 <= int(text) <= MAX_PAGE
    ):
        why = f"invalid number {text!r}: expected 1 to {MAX_PAGE}"
        raise InvalidRequest([Problem("limit", why)])
    return int(text)
