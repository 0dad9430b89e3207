"""Lookups of the names of daemons."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import Future
from functools import partial

from aiohttp.abc import AbstractResolver, ResolveResult

from agentd.concurrency import start_call

NAME_TIMEOUT_S = 1.0
"""Seconds for the lookup of a name whose addresses are known already."""
NO_SUCH_NAME = (socket.EAI_NONAME, socket.EAI_NODATA)


class ThreadResolver(AbstractResolver):
    """Looks up each name in a thread of its own: a silent name server delays no other name.

    A name that cannot be looked up for the moment keeps its addresses.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], list[ResolveResult]] = {}
        self._lookups: dict[tuple[str, int], Future[list[ResolveResult]]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        name = host, port
        lookup, known = self._lookups.get(name), self._known.get(name)
        if lookup is None or lookup.done():
            function = partial(_look_up, host, port, family)
            lookup = self._lookups[name] = start_call(f"name {host}", function)
        waiting = asyncio.wrap_future(lookup)
        waiting.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        if known is not None and not (await asyncio.wait([waiting], timeout=NAME_TIMEOUT_S))[0]:
            return known
        try:
            self._known[name] = await asyncio.shield(waiting)
        except socket.gaierror as error:
            if known is None or error.errno in NO_SUCH_NAME:
                raise
        return self._known[name]

    async def close(self) -> None:
        """Do nothing: threads end with their lookups."""


def _look_up(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [
        ResolveResult(
            hostname=host,
            host=socket.getnameinfo(address, numeric)[0],
            port=port,
            family=kind,
            proto=protocol,
            flags=socket.AI_NUMERICHOST,
        )
        for kind, _, protocol, _, address in found
    ]
