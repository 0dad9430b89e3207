"""Calls to nodes, made by the gateway on behalf of a caller.

Each call tells the state of the fleet whether its node is reachable from here: the reason if it
failed, and that it was answered otherwise.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from http import HTTPStatus
from typing import Any, Self

import aiohttp
import msgspec
import structlog
from yarl import URL

from agentd.client.errors import error_from_response
from agentd.client.names import ThreadResolver
from agentd.client.paths import api_path
from agentd.core.access import Caller, Role
from agentd.errors import AgentdError, NodeUnavailable, UnknownKernel
from agentd.http.callers import CALLER_HEADER, NODE_HEADER
from agentd.http.connections.admission import enable_keepalive
from agentd.http.streaming.websocket import MAX_FRAME
from agentd_fleet.view.fleet_state import ANSWER_TIMEOUT_S, SILENT_STATUSES, FleetState
from agentd_fleet.view.fleet_view import FleetNode
from agentd_fleet.view.reports import UNREADABLE, unreachable_reason

log = structlog.get_logger()

REFUSAL_REASONS: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "refuses the gateway's token",
    HTTPStatus.MISDIRECTED_REQUEST: "is not the node at its address",
}
REDIRECT_STATUSES = range(300, 400)
KEEPALIVE_S = 3.0
"""Seconds for which an idle connection is used again: later its node may be behind a firewall."""
CALL_TIMEOUT_S = 30.0
"""Seconds that a node may take for calls that do not wait for a kernel."""
CREATE_TIMEOUT_S = 3600.0
PROBE_PATH = api_path("node")
TCP_USER_TIMEOUT_MS = 20_000
MAX_ANSWER = 64 << 20
"""Maximum bytes of an answer that is read completely: a page of a list has a fraction of it."""
NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, ValueError)
"""Errors without any connection, the last one for an address that is none."""
SILENT = "does not answer: "
UNIX = "unix:"
GATEWAY = Caller("fleet", Role.ADMIN)
"""The caller of the gateway's own calls."""


class NodeAnswer(msgspec.Struct, frozen=True):
    """The answer of a node."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_error(self) -> bool:
        return self.status >= HTTPStatus.BAD_REQUEST

    @property
    def is_unknown_kernel(self) -> bool:
        return self.is_error and self.error().code == UnknownKernel.code

    def content(self) -> dict[str, Any]:
        """Return the object of a successful answer.

        Raises:
            NodeAnswerLost: it is malformed.
        """
        try:
            return msgspec.json.decode(self.body, type=dict[str, Any])
        except UNREADABLE as error:
            node_id = self.headers.get(NODE_HEADER)
            raise NodeAnswerLost(f"malformed answer of node {node_id}: {error}") from None

    def error(self) -> AgentdError:
        """Return the error of a problem answer."""
        return error_from_response(self.status, self.body, self.headers.get("Retry-After"))


class NodeNotCalled(NodeUnavailable):
    """No connection to the node could be made, so it did nothing."""


class NodeAnswerLost(NodeUnavailable):
    """The node may have been called, but its answer is missing."""


class Nodes:
    """Persistent connections to nodes; an async context manager."""

    def __init__(
        self, state: FleetState, token: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        self._state = state
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._tls = tls
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._replaced: list[aiohttp.ClientSession] = []
        self._told: set[str] = set()
        """The nodes that are unreachable according to the last line of the log about them."""
        self._probes: set[asyncio.Task[None]] = set()
        state.probe_soon = self._probe_soon

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._probes:
            task.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        for session in (*self._sessions.values(), *self._replaced):
            await session.close()
        self._sessions = {}

    def replace_credentials(self, token: str, tls: ssl.SSLContext) -> None:
        """Use other credentials for calls from now on; calls in progress go on."""
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._tls = tls
        if (session := self._sessions.pop("", None)) is not None:
            self._replaced.append(session)

    async def call(
        self,
        node: FleetNode,
        caller: Caller,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        patience_s: float = CALL_TIMEOUT_S,
    ) -> NodeAnswer:
        """Call a node and return its answer, even a problem.

        The call takes at most `patience_s`, and `ANSWER_TIMEOUT_S` once the node turns silent and
        does not answer a probe. One that is silent, or did not answer this gateway's last call,
        must answer a probe first.

        Raises:
            NodeNotCalled: no connection could be made.
            NodeAnswerLost: there is no answer.
        """
        if path != PROBE_PATH:
            await self.require_answer(node)
        opening = self.open_response(node, caller, method, path, body=body, headers=headers)
        try:
            async with self.call_timeout(node, patience_s), opening as response:
                content = await _read_body(node, response)
        except (aiohttp.ClientError, OSError) as error:
            raise self._failed(node, NodeAnswerLost, _reason(error), SILENT) from None
        if response.status == HTTPStatus.FORBIDDEN and b"gateway = true" in content:
            reason = "does not accept the token as a gateway's (gateway = true)"
            raise self._failed(node, NodeNotCalled, reason)
        self._note(node, "")
        return NodeAnswer(response.status, response.headers, content)

    def _failed(
        self, node: FleetNode, kind: type[NodeUnavailable], reason: str, lead: str = ""
    ) -> NodeUnavailable:
        """Return the error of a call that failed, after noting its reason."""
        self._note(node, reason)
        return kind(f"node {node.node_id} {lead}{reason}")

    def _note(self, node: FleetNode, reason: str) -> None:
        """Note why calls to a node fail, or with "" that one was answered."""
        current = self._state.node(node.node_id)
        if current is None or current.url != node.url:
            return
        self._log(current, reason)
        self._state.set_unreachable(node.node_id, reason)

    def _log(self, node: FleetNode, reason: str) -> None:
        is_new = reason and not node.unreachable and node.status not in SILENT_STATUSES
        if is_new and self._state.may_log(node.node_id, "node.unreachable", reason):
            self._told.add(node.node_id)
            log.warning("node.unreachable", node_id=node.node_id, address=node.url, reason=reason)
        elif not reason and node.node_id in self._told:
            self._told.remove(node.node_id)
            log.info("node.reached", node_id=node.node_id)

    @contextmanager
    def _reported(self, node: FleetNode) -> Iterator[None]:
        """Raise errors until the head of an answer as `NodeNotCalled` or `NodeAnswerLost`."""
        try:
            yield
        except aiohttp.WSServerHandshakeError:
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            kind = NodeNotCalled if isinstance(error, NOT_CONNECTED) else NodeAnswerLost
            raise self._failed(node, kind, _reason(error), SILENT) from None

    def call_timeout(self, node: FleetNode, limit_s: float) -> AbstractAsyncContextManager[None]:
        """Limit a call (`FleetState.call_timeout`)."""
        return self._state.call_timeout(node.node_id, limit_s)

    async def probe(self, node: FleetNode) -> None:
        """Call a node, only to know whether this gateway reaches it.

        Raises:
            NodeNotCalled: it does not.
        """
        try:
            await self.call(node, GATEWAY, "GET", PROBE_PATH, patience_s=ANSWER_TIMEOUT_S)
        except NodeAnswerLost as error:
            raise NodeNotCalled(str(error)) from None

    async def require_answer(self, node: FleetNode) -> None:
        """Probe a node that may be silent, before a call that has its own time.

        Raises:
            NodeNotCalled: it does not answer.
        """
        if node.node_id in self._state.unreachable or self._state.is_silent(node.node_id):
            await self.probe(node)

    def _probe_soon(self, node_id: str) -> None:
        if (node := self._state.node(node_id)) is not None:
            task = asyncio.create_task(self._probe_quietly(node))
            self._probes.add(task)
            task.add_done_callback(self._probes.discard)

    async def _probe_quietly(self, node: FleetNode) -> None:
        with suppress(NodeUnavailable):
            await self.probe(node)

    @asynccontextmanager
    async def open_response(
        self,
        node: FleetNode,
        caller: Caller,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Call a node and yield its answer, to be read.

        Raises:
            NodeNotCalled: no connection could be made.
            NodeAnswerLost: there is no answer.
        """
        session, url, identity = self._target(node, caller, path)
        request_headers = {**(headers or {}), **identity}
        data: dict[str, Any] = {"data": body} if body is not None else {}
        with self._reported(node):
            response = await session.request(
                method, url, headers=request_headers, allow_redirects=False, **data
            )
        async with response:
            if (reason := REFUSAL_REASONS.get(response.status)) is not None:
                raise self._failed(node, NodeNotCalled, reason)
            if (
                response.headers.get(NODE_HEADER) != node.node_id
                or response.status in REDIRECT_STATUSES
            ):
                raise self._failed(node, NodeAnswerLost, _WrongServer.strerror)
            if response.status != HTTPStatus.FORBIDDEN:  # `call` reads its reason
                self._note(node, "")
            yield response

    async def open_websocket(
        self, node: FleetNode, caller: Caller, path: str
    ) -> aiohttp.ClientWebSocketResponse | None:
        """Open a WebSocket to a node; None if it refuses.

        Raises:
            NodeNotCalled: no connection could be made.
            NodeAnswerLost: there is no answer.
        """
        await self.require_answer(node)
        try:
            with self._reported(node):
                async with self.call_timeout(node, CALL_TIMEOUT_S):
                    session, url, identity = self._target(node, caller, path)
                    return await session.ws_connect(
                        url, headers=identity, max_msg_size=MAX_FRAME + 1, autoping=False
                    )
        except aiohttp.WSServerHandshakeError:
            return None

    def _target(
        self, node: FleetNode, caller: Caller, path: str
    ) -> tuple[aiohttp.ClientSession, URL, dict[str, str]]:
        """Return the session, the URL and the headers of a call.

        Raises:
            NodeNotCalled: the node must not be called.
        """
        if reason := unreachable_reason(node.url):
            raise NodeNotCalled(f"node {node.node_id}: {node.exclusion_reason or reason}")
        session, address = self._session(node.url)
        token = {} if node.url.startswith(UNIX) else self._headers
        identity = {**token, CALLER_HEADER: caller.to_text(), NODE_HEADER: node.node_id}
        with self._reported(node):
            return session, URL(f"{address}{path}", encoded=True), identity

    def _session(self, url: str) -> tuple[aiohttp.ClientSession, str]:
        path = url.removeprefix(UNIX) if url.startswith(UNIX) else ""
        session = self._sessions.get(path)
        if session is None:
            connector = (
                aiohttp.UnixConnector(path, limit=0)
                if path
                else aiohttp.TCPConnector(
                    limit=0,
                    ssl=self._tls or True,
                    socket_factory=_socket_with_timeout,
                    resolver=ThreadResolver(),
                    keepalive_timeout=KEEPALIVE_S,
                )
            )
            timeout = aiohttp.ClientTimeout(total=None, connect=ANSWER_TIMEOUT_S)
            session = aiohttp.ClientSession(
                connector=connector,
                timeout=timeout,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trace_configs=[_trace_websockets()],
            )
            self._sessions[path] = session
        return session, "http://node" if path else url.rstrip("/")


class _WrongServer(aiohttp.ClientError):
    """Another server answers at the node's address."""

    strerror = "another server answers at its address"


def _trace_websockets() -> aiohttp.TraceConfig:
    """Return a trace that checks redirects and the node id, which `ws_connect` hides."""

    async def on_redirect(*_: object) -> None:
        raise _WrongServer

    async def on_end(_: object, __: object, params: aiohttp.TraceRequestEndParams) -> None:
        is_socket = params.response.status == HTTPStatus.SWITCHING_PROTOCOLS
        if is_socket and params.response.headers.get(NODE_HEADER) != params.headers.get(
            NODE_HEADER
        ):
            params.response.close()
            raise _WrongServer

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(on_redirect)
    trace.on_request_end.append(on_end)
    return trace


def _socket_with_timeout(address_info: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket with a short TCP timeout for dead peers (tcp(7))."""
    family, kind, protocol, _, _ = address_info
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    enable_keepalive(sock)
    return sock


async def _read_body(node: FleetNode, response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > MAX_ANSWER:
            raise NodeAnswerLost(f"node {node.node_id}: its answer exceeds {MAX_ANSWER >> 20} MiB")
    return bytes(content)


def _reason(error: Exception) -> str:
    """Return the reason of a failed call, without the address."""
    cause = getattr(error, "certificate_error", getattr(error, "os_error", error))
    if isinstance(cause, ssl.SSLCertVerificationError):
        return cause.verify_message
    if isinstance(cause, socket.gaierror):
        return f"its name cannot be resolved: {cause.strerror}"
    if isinstance(cause, OSError) and cause.errno and not isinstance(cause, ssl.SSLError):
        return os.strerror(cause.errno)
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
