"""Connections that are read in small pieces, each in a turn of the caller.

Without a turn, a caller's bytes stay in the socket, except for one piece.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

from aiohttp import web

from agentd.http.connections.turns import CEILINGS, KIB, MIN_WRITE, Kind, Turns, kib

HTTP_PIECE = 2 * KIB
HTTP_WEIGHT = 16
"""The cost of an HTTP byte in WebSocket bytes: a request may come in chunks of one byte."""
SOCKET_PIECE = 64 * KIB
LAST_PIECE = 384
"""Bytes per read after a WebSocket's last frame was sent: 64 empty frames."""

UNREAD = 256 * KIB
"""Bytes discarded when a connection is closed."""

_BUFFER = memoryview(bytearray(SOCKET_PIECE))
"""The buffer of one read, passed on before the next one."""


class FairConnection(web.RequestHandler, asyncio.BufferedProtocol):
    """A connection whose reads take turns.

    A caller with a single connection and no pipelining takes no turns: the connection itself limits
    it to one piece per round of the event loop and one request in three rounds.
    """

    def __init__(
        self,
        server: web.Server,
        turns: Turns,
        payer: Callable[[asyncio.BaseTransport], Hashable],
        **options: Any,
    ) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._turns = turns
        self._payer = payer
        self._caller: Hashable = None
        self._is_local = False
        self._is_open = False
        self._socket: socket.socket
        self._piece = _BUFFER[:HTTP_PIECE]
        self._held: list[bytes] = []
        self._is_socket = False
        self._was_pipelined = False

    @property
    def caller(self) -> Hashable:
        """The caller that is charged for the connection."""
        return self._caller

    @property
    def is_local(self) -> bool:
        """Whether the socket alone identifies the caller."""
        return self._is_local

    def belongs_to(self, caller: Hashable) -> None:
        """Charge the connection to a caller."""
        if self._is_open and caller != self._caller:
            self._turns.join(caller)
            self._turns.leave(self._caller)
            self._caller = caller

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._caller = self._payer(transport)
        self._is_local = self._caller is not None
        self._turns.join(self._caller)
        self._is_open = True
        self._socket = transport.get_extra_info("socket")
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._is_open:
            self._is_open = False
            self._turns.leave(self._caller)
            self._empty()
        super().connection_lost(exc)

    def set_parser(self, parser: Any, data_received_cb: Any = None) -> None:
        self._is_socket = True
        self._piece = _BUFFER
        super().set_parser(parser, data_received_cb)

    def reads_little(self) -> None:
        """Limit reads to the empty frames of one turn."""
        self._piece = _BUFFER[:LAST_PIECE]

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._piece

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(_BUFFER[:nbytes])
        is_next = not self._held
        if is_next and (self._reads_freely() or self._take(data)):
            self.data_received(data)
            return
        self._held.append(data)
        if self.transport is not None:
            self.transport.pause_reading()
        if is_next:
            self._queue()

    async def turn(self, kind: Kind, amount: int = 1) -> None:
        """Wait until the caller's turn has room for an amount."""
        await self._turns.wait(self._caller, kind, amount)

    async def turn_to_write(self, size: int) -> None:
        """Wait until the caller's turn has room for bytes of a stream."""
        await self.turn(Kind.WRITTEN, max(MIN_WRITE, kib(size)))

    async def turn_to_ask(self, kind: Kind) -> None:
        """Wait until the caller's turn has room for a request."""
        is_pipelined = bool(self._messages)
        if is_pipelined or self._was_pipelined or not self._is_alone():
            await self.turn(kind)
        self._was_pipelined = is_pipelined

    def _is_alone(self) -> bool:
        return self._turns.has_one_connection(self._caller)

    def _reads_freely(self) -> bool:
        return not self._is_socket and self._is_alone()

    def _amount(self, size: int) -> int:
        if not self._is_socket:
            return kib(size * HTTP_WEIGHT)
        return kib(size) if len(self._piece) > LAST_PIECE else CEILINGS[Kind.READ]

    def _empty(self) -> None:
        """Drain unread bytes before closing.

        Linux resets a connection that is closed with unread data, and the client would lose the
        last response.
        """
        with suppress(OSError):
            os.read(self._socket.fileno(), UNREAD)

    def _take(self, data: bytes) -> bool:
        return self._turns.take(self._caller, Kind.READ, self._amount(len(data)))

    def _queue(self) -> None:
        amount = self._amount(len(self._held[0]))
        self._turns.queue(self._caller, Kind.READ, amount, self._read_on)

    def _read_on(self) -> bool:
        """Pass on a held piece; the parser may resume reading meanwhile."""
        data = self._held.pop(0)
        if self.transport is None:
            return False
        if self._held:
            self._queue()
        else:
            self.transport.resume_reading()  # the parser pauses it again when it has enough
        self.data_received(data)
        return True


async def turn_to_write(request: web.Request, size: int) -> None:
    """Wait until the turn of a request's caller has room for bytes of a stream."""
    if isinstance(request.protocol, FairConnection):
        await request.protocol.turn_to_write(size)
