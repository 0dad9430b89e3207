"""How `agentctl create` reads what stands in one option: pairs, mounts, ports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click


def pairs(values: Sequence[str], separator: str = "=") -> dict[str, str]:
    """Read NAME=VALUE, each name once."""
    pairs = {}
    for value in values:
        name, found, rest = value.partition(separator)
        if not found:
            raise click.UsageError(f"{value!r} is not NAME{separator}VALUE")
        if name in pairs:
            raise click.UsageError(f"{name} is given twice")
        pairs[name] = rest
    return pairs


def mounts(values: Sequence[str]) -> list[dict[str, Any]]:
    """Read SOURCE:TARGET[:ro|:rw]."""
    mounts = []
    for value in values:
        source, _, rest = value.partition(":")
        target, _, mode = rest.partition(":")
        if not target or mode not in ("", "ro", "rw"):
            raise click.UsageError(f"{value!r} is not SOURCE:TARGET[:ro|:rw]")
        mounts.append({"source": source, "target": target, "read_only": mode != "rw"})
    return mounts


def ports(values: Sequence[str]) -> list[dict[str, Any]]:
    """Read [HOST:]CONTAINER[/udp]."""
    ports = []
    for value in values:
        address, _, protocol = value.partition("/")
        host, _, container = address.rpartition(":")
        try:
            port: dict[str, Any] = {"container": int(container), "protocol": protocol or "tcp"}
            if host:
                port["host"] = int(host)
        except ValueError:
            raise click.UsageError(f"{value!r} is not [HOST:]CONTAINER[/udp]") from None
        ports.append(port)
    return ports
