"""Networks between the parts of a fleet: proxies that lose or drop, and silent name servers."""

import asyncio
import ctypes
import random
import socket
import ssl
import struct
from pathlib import Path

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
"""A filter of one instruction, which keeps no byte of any packet (socket(7), bpf(4))."""
_PROGRAM = struct.pack("HP", 1, ctypes.addressof(_DROP_ALL))


class Proxy:
    """Passes bytes on between clients and one address, until a test makes it lose some.

    `target` is an endpoint, or `unix:` and the path of a socket.
    """

    def __init__(self, target: str, tls: ssl.SSLContext | None = None) -> None:
        self._target = target
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets: set[asyncio.trsock.TransportSocket] = set()
        self._filtered: set[asyncio.trsock.TransportSocket] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self.endpoint = ""
        self.swallowed = 0
        self.accepted = 0
        self.is_cut = False
        self.loses: bytes | None = None
        """The next answer to a request for this path is lost, with its connection."""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0, ssl=self._tls)
        self._sockets.add(self._server.sockets[0])
        scheme = "https" if self._tls else "http"
        self.endpoint = f"{scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """Reset all connections, and every new one until it is mended."""
        self.is_cut = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drop(self) -> None:
        """Drop every packet, as a firewall does, until it is mended: nobody is told anything."""
        self._passes.clear()
        self._filtered = set(self._sockets)
        for item in self._filtered:
            item.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, _PROGRAM)

    def mend(self) -> None:
        """Take connections and packets again."""
        self.is_cut = False
        for item in self._filtered & self._sockets:
            item.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
        self._filtered = set()
        self._passes.set()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.is_cut:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._served(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _served(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        accepted = back.get_extra_info("socket")
        try:
            if self._target.startswith("unix:"):
                opened = asyncio.open_unix_connection(self._target.removeprefix("unix:"))
            else:
                port = int(self._target.rpartition(":")[2])
                opened = asyncio.open_connection("127.0.0.1", port)
            server, forth = await opened
        except OSError:  # the target does not run
            back.transport.abort()
            return
        self._sockets.add(accepted)
        asked = [b""]
        ways = [self._passed(client, forth, asked), self._answered(server, back, asked)]
        tasks = [asyncio.ensure_future(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._sockets.discard(accepted)
            for task in tasks:
                task.cancel()
            for writer in (back, forth):
                writer.transport.abort()

    async def _passed(
        self, client: asyncio.StreamReader, forth: asyncio.StreamWriter, asked: list[bytes]
    ) -> None:
        while part := await client.read(65536):
            asked[0] = part
            await self._passes.wait()
            forth.write(part)

    async def _answered(
        self, server: asyncio.StreamReader, back: asyncio.StreamWriter, asked: list[bytes]
    ) -> None:
        while part := await server.read(65536):
            if self.loses and self.loses in asked[0]:
                self.loses = None
                self.swallowed += 1
                return
            await self._passes.wait()
            back.write(part)


class SilentNameServer(asyncio.DatagramProtocol):
    """A name server that answers nothing, for programs that start with `prefix`; takes root."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "resolv.conf"
        self._transport: asyncio.BaseTransport | None = None
        self.asked = 0

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command that runs another one with this name server alone."""
        script = f'mount --bind {self._file} /etc/resolv.conf && exec "$@"'
        return ("unshare", "--mount", "sh", "-c", script, "sh")

    async def start(self) -> None:
        address = f"127.{random.randrange(1, 255)}.{random.randrange(256)}.{random.randrange(256)}"
        self._file.write_text(f"nameserver {address}\n")
        self._transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: self, (address, 53)
        )

    def stop(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def datagram_received(self, *_: object) -> None:
        self.asked += 1
