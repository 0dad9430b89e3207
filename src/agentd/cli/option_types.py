"""Types of option values: seconds, times and addresses. An error says which values are accepted."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

import click

from agentd.core.times import TIME_EXPECTED, parse_duration_s, parse_time_ns

UNIX = "unix:"
_TCP = "http://HOST:PORT or https://HOST:PORT"


def seconds_from(minimum: float) -> Callable[[str], float]:
    """Return a type for seconds, as a number or as a duration such as 1h30m."""

    def seconds(value: str | float) -> float:
        text = str(value)
        try:
            number = parse_duration_s(text if text[-1:].isalpha() else f"{text}s")
        except ValueError:
            raise click.BadParameter(f"{text!r}: expected seconds, or 1h30m") from None
        if number < minimum:
            raise click.BadParameter(f"{text} is less than {minimum:g} seconds")
        return number

    return seconds


def moment(text: str) -> str:
    """Return a time that the RPC takes, for a time or for a duration before now."""
    with suppress(ValueError):
        return f"{max(time.time() - parse_duration_s(text), 0):.3f}"
    try:
        parse_time_ns(text)
    except ValueError:
        expected = f"{TIME_EXPECTED}, or a duration before now such as 10m"
        raise click.BadParameter(f"{text!r}: {expected}") from None
    return text


def node_address(text: str) -> str:
    """Return the address of a node over TCP."""
    with suppress(ValueError):  # an invalid port
        parts = urlsplit(text)
        is_plain = text.isprintable() and " " not in text
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and is_plain:
            return text
    raise click.BadParameter(f"{text!r}: expected {_TCP}")


def fleet_address(text: str) -> str:
    """Return the address of a gateway: its socket, or over TCP."""
    if text.startswith(UNIX) and text != UNIX:
        return text
    with suppress(click.BadParameter):
        return node_address(text)
    raise click.BadParameter(f"{text!r}: expected unix:PATH, {_TCP}")
