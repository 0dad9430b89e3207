"""Host ports, allocated like any other share: one holder each, the lowest free one first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from agentd.errors import InsufficientResource, Problem

FIRST_CHOICE = 30_000
"""The first port of the choice, if the range contains it.

It is above most registered services, and below the ports that Linux uses for outgoing connections
(ip(7), ip_local_port_range).
"""

HostPort: TypeAlias = tuple[str, int]
"""A protocol and a port of the host."""


def host_ports(ports: Iterable[Port]) -> list[HostPort]:
    """Return the host ports that ports name."""
    return [(port.protocol, port.host) for port in ports if port.host is not None]


class PortRange(msgspec.Struct, frozen=True):
    """The address on which ports are published, and their range, both ends included."""

    address: str = "127.0.0.1"
    first: int = 1024
    last: int = 65535

    def __contains__(self, port: int) -> bool:
        return self.first <= port <= self.last

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def in_order(self) -> Iterator[int]:
        """Yield every port in the order of choice."""
        start = FIRST_CHOICE if FIRST_CHOICE in self else self.first
        return chain(range(start, self.last + 1), range(self.first, start))


def assign_ports(
    requested: Sequence[Port],
    holders: Mapping[HostPort, str],
    busy: Collection[HostPort],
    allowed: PortRange,
) -> tuple[Port, ...]:
    """Return the ports of a request with their host ports.

    `holders` are ports that kernels hold, `busy` ports that other processes use.

    Raises:
        InsufficientResource: a requested port is in use, or no port is free.
    """
    assigned = set(host_ports(requested))
    for protocol, host in host_ports(requested):
        if (protocol, host) in holders or (protocol, host) in busy:
            holder = holders.get((protocol, host))
            reason = f"held by kernel {holder}" if holder else "in use outside agentd"
            row = {"device": f"{host}/{protocol}", "free": "0", "reason": reason}
            raise InsufficientResource("ports", f"{host}/{protocol}", "0", [row])
    ports = []
    for port in requested:
        host = port.host or _find_lowest_free(port.protocol, {*assigned, *holders, *busy}, allowed)
        assigned.add((port.protocol, host))
        ports.append(replace(port, host=host, address=allowed.address))
    return tuple(ports)


def _find_lowest_free(protocol: str, taken: Collection[HostPort], allowed: PortRange) -> int:
    for host in allowed.in_order():
        if (protocol, host) not in taken:
            return host
    row = {"device": f"{allowed}/{protocol}", "free": "0", "reason": "every port is in use"}
    raise InsufficientResource("ports", f"1/{protocol}", "0", [row])


def port_problems(requested: Sequence[Port], allowed: PortRange) -> Iterator[Problem]:
    """Yield problems of host ports outside of the range, and of duplicate ones."""
    counts = Counter((port.protocol, port.host) for port in requested)
    for index, port in enumerate(requested):
        if port.host is None:
            continue
        if port.host not in allowed:
            reason = f"{port.host} is outside publish-ports {allowed}"
            yield Problem(f"ports.{index}.host", reason)
        elif counts[port.protocol, port.host] > 1:
            yield Problem(f"ports.{index}.host", f"duplicate host port {port.host}")


class Port(msgspec.Struct, frozen=True):
    """A published port of the kernel; `host` None leaves the choice to the node.

    `address` is the address on which it is published.
    """

    container: int
    host: int | None = None
    protocol: str = "tcp"
    address: str = ""
