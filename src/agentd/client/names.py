"""Lookups of the names of daemons."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import Future
from contextlib import suppress

from aiohttp.abc import AbstractResolver, ResolveResult

from agentd.concurrency import start_call


class ThreadResolver(AbstractResolver):
    """Looks up each name in a thread of its own: a silent name server delays no other name."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        def look_up() -> list[ResolveResult]:
            numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
            return [
                ResolveResult(
                    hostname=host,
                    host=socket.getnameinfo(address, numeric)[0],
                    port=port,
                    family=kind,
                    proto=protocol,
                    flags=socket.AI_NUMERICHOST,
                )
                for kind, _, protocol, _, address in socket.getaddrinfo(
                    host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
                )
            ]

        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def on_end(_: Future[list[ResolveResult]]) -> None:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(ended.set)

        call = start_call(f"name {host}", look_up)
        call.add_done_callback(on_end)
        await ended.wait()
        return call.result()

    async def close(self) -> None:
        """Do nothing: threads end with their lookups."""
