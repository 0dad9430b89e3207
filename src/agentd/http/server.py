"""The HTTP server: endpoints, connections and the graceful stop.

A unix socket's mode and group decide who may connect; the socket decides their rights. On TCP a
bearer token does both (`gate`). Every error is a problem (RFC 9457) with a stable code.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import cache
from pathlib import Path

import msgspec
import structlog
from aiohttp import web

from agentd.concurrency import Deadline
from agentd.core.access import Caller
from agentd.core.conditions import Condition
from agentd.errors import StartRefused
from agentd.http.callers import NODE_HEADER, Callers, Token
from agentd.http.connections.admission import ConnectionLimit
from agentd.http.connections.connection import Connection, connection_of
from agentd.http.connections.request_turns import RequestTurns, end_turn
from agentd.http.connections.unix_sockets import (
    bind_unix_socket,
    give_socket,
    socket_identity,
)
from agentd.http.gate import MAX_BODY, Gate, RequestHandler, error_response
from agentd.http.openapi import build_document
from agentd.http.problem_responses import problem_response
from agentd.http.route import PROBE_PATHS, Route
from agentd.http.site import Site
from agentd.http.static import Pages

log = structlog.get_logger()

BACKLOG = 1024
"""Clients that may wait to be accepted."""
ACCEPTED_AT_ONCE = 8
"""Clients that are accepted before the first of them is refused beyond a limit."""
ACCEPT_ROUNDS = 3
"""Rounds of the event loop after which an accepted socket is a connection."""
TCP_FRACTION, FURTHER_FRACTION = 0.25, 0.125
"""Maximum fraction of file descriptors for TCP, and for further sockets: an equal part each.

Claims that end with a process may have half of the descriptors.
"""
SHUTDOWN_TIMEOUT_S, CANCEL_TIMEOUT_S = 3.0, 0.5
"""Seconds that a stop waits for open requests, and then for their cancellation."""
FIRST_REQUEST_S = 1.0
"""Seconds that a stop waits for the first request of an accepted connection."""
POLL_S = 0.01
IP_FREEBIND = 15
"""Of ip(7); Python 3.12 has no name for it."""
OPEN_TIMEOUT_S = 30.0
"""Seconds that a request waits for the end of the start when systemd holds the sockets."""


class UnixSocket(msgspec.Struct, frozen=True):
    """A unix socket: its path, its group and the caller it stands for."""

    path: Path
    group: str | None
    caller: Caller


class Endpoint(msgspec.Struct, frozen=True):
    """The addresses to listen on: unix sockets, and TCP if `host` is set.

    `passed` are listening sockets by address, passed in by systemd. Clients that connect while this
    process restarts wait in their queues.
    """

    sockets: tuple[UnixSocket, ...]
    host: str | None = None
    port: int = 0
    tokens: tuple[Token, ...] = ()
    tls: ssl.SSLContext | None = None
    max_connections: int = 1024
    passed: Mapping[str, socket.socket] = {}

    @property
    def tcp_address(self) -> str | None:
        """The TCP address as `host:port`, None without TCP."""
        if self.host is None:
            return None
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address_problem(host: str) -> str:
    """Return why no TCP socket can bind to an address, empty if one can.

    The port is not tried: a daemon may be listening on it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        return error.strerror or str(error)
    return ""


class Server:
    """A server for routes with bound handlers at an endpoint."""

    def __init__(
        self,
        title: str,
        routes: Sequence[Route],
        site: Site,
        endpoint: Endpoint,
        node_id: str | None = None,
        pages: Pages | None = None,
    ) -> None:
        self._node_id = node_id
        self._routes = routes
        self._site = site
        self._endpoint = endpoint
        self._tls = endpoint.tls
        self._callers = Callers(
            endpoint.tokens, {str(unix.path): unix.caller for unix in endpoint.sockets}
        )
        open_timeout_s = OPEN_TIMEOUT_S if endpoint.passed else 0
        self._gate = Gate(site, routes, self._callers, pages, node_id, open_timeout_s)
        self._turns = RequestTurns()
        self._pending: set[Connection] = set()
        self._bound: dict[Path, tuple[int, int]] = {}
        """By path, the identity of the file of each socket that this process made."""
        self.ungrouped: list[UnixSocket] = []
        """Sockets that only agentd's user can connect to, as they are not given to a group yet."""
        self._runner: web.AppRunner | None = None
        self._listeners: list[asyncio.Server] = []
        self._requests: dict[int, web.Request] = {}
        self.cancelled: list[str] = []
        """The requests that `stop` cancelled, as `METHOD /path`."""
        site.build_document = cache(lambda: build_document(title, routes))

    async def start(self, find_group: Callable[[str], int | None] = lambda _: None) -> None:
        """Start listening; `find_group` returns the id of a group, None of an unknown one.

        Raises:
            StartRefused: a socket or the address is unavailable.
        """
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._handle])
        app.on_response_prepare.append(self._add_node_header)
        for route in self._routes:
            path = route.path.replace("{rest}", "{rest:.+}") if route.proxied_routes else route.path
            app.router.add_route(route.method, path, route.handler, expect_handler=_answer_expect)
        self._runner = web.AppRunner(app, shutdown_timeout=CANCEL_TIMEOUT_S)
        await self._runner.setup()
        passed = dict(self._endpoint.passed)
        main, *others = self._endpoint.sockets
        expected = {str(unix.path) for unix in self._endpoint.sockets} | {
            self._endpoint.tcp_address
        }
        if unexpected := sorted(passed.keys() - expected):
            raise StartRefused(f"systemd passed unexpected sockets: {', '.join(unexpected)}")
        fraction = FURTHER_FRACTION / max(1, len(others))
        for unix in self._endpoint.sockets:
            limits = ConnectionLimit(self._endpoint.max_connections, fraction)
            if (sock := passed.get(str(unix.path))) is None:
                sock = bind_unix_socket(unix.path, unix.group)
                self._bound[unix.path] = socket_identity(unix.path)
                self.ungrouped += [unix] if unix.group is not None else []
                self.assign_groups(find_group)
            await self._listen(sock, None if unix is main else limits)
        if (host := self._endpoint.host) is not None:
            sock = passed.get(self._endpoint.tcp_address or "") or self._tcp_socket(host)
            limits = ConnectionLimit(self._endpoint.max_connections, TCP_FRACTION)
            await self._listen(sock, limits, lambda: self._tls)

    def assign_groups(self, find_group: Callable[[str], int | None]) -> None:
        """Give sockets to their groups, as far as these are known; one that fails stops no other.

        Raises:
            StartRefused: agentd may not give a socket to its group, or does not find its file.
        """
        refusals = []
        for unix in [*self.ungrouped]:
            if (group_id := find_group(unix.group or "")) is not None:
                try:
                    give_socket(unix.path, self._bound[unix.path], group_id)
                except StartRefused as error:
                    refusals.append(error)
                else:
                    self.ungrouped.remove(unix)
        if refusals:
            raise refusals[0]

    def _tcp_socket(self, host: str) -> socket.socket:
        """Return a listening socket; the host may get its address later."""
        try:
            listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_IP, IP_FREEBIND, 1)
            if ":" in host:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((host, self._endpoint.port))
            listener.listen(BACKLOG)
        except OSError as error:
            reason = error.strerror
            raise StartRefused(f"cannot listen on {host}:{self._endpoint.port}: {reason}") from None
        return listener

    async def _listen(
        self,
        sock: socket.socket,
        limits: ConnectionLimit | None,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        """Accept connections from a socket.

        Not by `create_unix_server`: since Python 3.13, that server removes the socket's file when
        it closes, even if systemd passed the socket and still holds it.
        """
        server = self._runner.server if self._runner is not None else None
        if server is None:
            raise RuntimeError("the server has not been set up")
        listener = await asyncio.get_running_loop().create_server(
            lambda: Connection(server, self._pending, limits, tls),
            sock=sock,
            backlog=ACCEPTED_AT_ONCE,
        )
        sock.listen(BACKLOG)
        self._listeners.append(listener)

    @property
    def has_tls(self) -> bool:
        """Whether the TCP endpoint uses TLS."""
        return self._tls is not None

    def conditions(self) -> Iterator[Condition]:
        """Yield a condition for each unix socket whose file was removed while it is served."""
        for unix in self._endpoint.sockets if self._listeners else ():
            if not unix.path.is_socket():
                reason = f"the socket {unix.path} was removed, so no client finds it"
                yield Condition("host", reason, "restart agentd", agents=())

    def address_conditions(self) -> Iterator[Condition]:
        """Yield a condition while this host does not have the address of the TCP endpoint."""
        if (host := self._endpoint.host) is not None and (reason := address_problem(host)):
            yield Condition("host", f"nobody can connect to {host}: {reason}", agents=())

    @property
    def current_tokens(self) -> Sequence[Token]:
        """The tokens in force."""
        return self._callers.tokens

    def replace_tls(self, context: ssl.SSLContext | None) -> None:
        """Replace the certificate for new connections; None keeps it."""
        self._tls = context or self._tls

    def replace_tokens(self, tokens: Sequence[Token]) -> None:
        """Replace the tokens and close connections that use revoked ones."""
        for name in self._callers.replace_tokens(tokens):
            self._site.streams.end_caller(name)

    async def stop(self, deadline: Deadline) -> None:
        """Remove the sockets, stop accepting, let open requests finish, and cancel the rest."""
        for path in self._bound:  # after the close, the file may be that of the next daemon
            path.unlink(missing_ok=True)
        await self._stop_accepting()
        await _wait_empty(self._pending, deadline.remaining_s(FIRST_REQUEST_S))
        self._site.streams.end_all()
        for connection in list(self._pending):
            connection.close()
        requests_deadline = deadline.earlier(2 * CANCEL_TIMEOUT_S)  # aiohttp waits before and after
        await _wait_empty(self._requests, requests_deadline.remaining_s(SHUTDOWN_TIMEOUT_S))
        requests = self._requests.values()
        self.cancelled += sorted(f"{request.method} {request.path}" for request in requests)
        if self._runner is not None:
            await self._runner.cleanup()

    async def _stop_accepting(self) -> None:
        """Stop accepting connections; serve those already accepted.

        asyncio silently drops a connection that it accepted for a server that is closed meanwhile.
        """
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            for sock in listener.sockets:
                loop.remove_reader(sock.fileno())
        for _ in range(ACCEPT_ROUNDS):
            await asyncio.sleep(0)
        for listener in self._listeners:
            listener.close()

    async def _add_node_header(self, _: web.Request, response: web.StreamResponse) -> None:
        if self._node_id is not None:
            response.headers[NODE_HEADER] = self._node_id

    @web.middleware
    async def _handle(self, request: web.Request, handler: RequestHandler) -> web.StreamResponse:
        """Pass a request through the gate, and turn every error into a problem."""
        connection = connection_of(request)
        connection.begin_request(request)
        self._requests[id(request)] = request
        try:
            if request.path not in PROBE_PATHS:
                await self._turns.begin(request, self._callers.turn_owner(request))
            response = await self._gate.handle(request, handler)
        except ConnectionError:
            raise  # the client disconnected; nobody reads the answer
        except Exception as error:  # noqa: BLE001 - what has no code of its own is logged
            response = error_response(request, error)
        finally:
            del self._requests[id(request)]
            end_turn(request)
            connection.finish_request()
        return response


async def _wait_empty(collection: Sized, timeout_s: float) -> None:
    """Wait until a collection is empty, for a limited time."""
    deadline = Deadline.after(timeout_s)
    while collection and deadline.remaining_s():  # noqa: ASYNC110 - only a stop waits for them
        await asyncio.sleep(POLL_S)


async def _answer_expect(request: web.Request) -> web.StreamResponse | None:
    """Answer an Expect header (RFC 9110): continue, or a problem."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        return problem_response(
            "ExpectationFailed", "unsupported Expect header: expected 100-continue"
        )
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return None
