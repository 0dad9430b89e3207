"""The HTTP server: who may call, what an error looks like, and where it listens.

On the unix socket the file's mode decides who may call; on TCP a bearer token does. Every
error is a problem (RFC 9457) with a stable code.
"""

from __future__ import annotations

import grp
import hmac
import json
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import structlog
from aiohttp import web

from agentd.errors import AgentdError, StartRefused, Unavailable
from agentd.rpc.handlers import Handlers
from agentd.rpc.routes import OPEN_PATHS, ROUTES, openapi

log = structlog.get_logger()

MAX_BODY = 1024 * 1024
SOCKET_MODE = 0o660
SHUTDOWN_TIMEOUT_S = 3.0
SERVER_ERROR = 500

STATUSES = {
    "UnsupportedResource": 422,
    "InvalidRequest": 422,
    "InvalidSlotAmount": 422,
    "InvalidSlotCombination": 422,
    "ImageNotFound": 422,
    "CommandNotFound": 422,
    "InsufficientResource": 409,
    "KernelConflict": 409,
    "UnknownAgent": 404,
    "UnknownKernel": 404,
    "UnknownDevice": 404,
    "UnknownRuntime": 404,
    "UnknownPlugin": 404,
    "NotFound": 404,
    "MethodNotAllowed": 405,
    "BodyTooLarge": 413,
    "Unauthorized": 401,
    "Forbidden": 403,
    "Internal": 500,
    "RuntimeFailure": 502,
    "PluginUnavailable": 503,
    "RuntimeUnavailable": 503,
    "StateUnavailable": 503,
    "NotReady": 503,
    "Draining": 503,
}
_HTTP_CODES = {404: "NotFound", 405: "MethodNotAllowed", 413: "BodyTooLarge", 403: "Forbidden"}

_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


def problem(
    code: str, detail: str, facts: object = None, headers: dict[str, str] | None = None
) -> web.Response:
    """Return an error as a problem; `facts` are its further members."""
    content = {
        "type": "about:blank",
        "title": code,
        "status": STATUSES[code],
        "detail": detail,
        "code": code,
        **(facts if isinstance(facts, dict) else {}),
    }
    return web.Response(
        body=json.dumps(content).encode(),
        status=STATUSES[code],
        content_type="application/problem+json",
        headers=headers,
    )


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to listen: a unix socket, and TCP if `host` is set; `token` guards TCP."""

    path: Path
    group: str | None = None
    host: str | None = None
    port: int = 0
    token: str | None = None
    tls: ssl.SSLContext | None = None


class Server:
    """Serves `Handlers` at an endpoint."""

    def __init__(self, handlers: Handlers, endpoint: Endpoint) -> None:
        self._handlers = handlers
        self._endpoint = endpoint
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            StartRefused: the socket or the address cannot be had.
        """
        self._handlers.describe(openapi)
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._answer])
        for route in ROUTES:
            bound = route.handler.__get__(self._handlers)
            app.router.add_route(route.method, route.path, bound, name=None)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
        await runner.setup()
        self._runner = runner
        site = web.SockSite(runner, unix_socket(self._endpoint.path, self._endpoint.group))
        await site.start()
        if self._endpoint.host is not None:
            await self._start_tcp(runner)

    async def _start_tcp(self, runner: web.AppRunner) -> None:
        end = self._endpoint
        tcp = web.TCPSite(runner, end.host, end.port, ssl_context=end.tls)
        try:
            await tcp.start()
        except OSError as error:
            raise StartRefused(
                f"cannot listen on {end.host}:{end.port}: {error.strerror}"
            ) from None

    async def stop(self) -> None:
        """Stop accepting, let open requests end, and remove the socket."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._endpoint.path.unlink(missing_ok=True)

    @web.middleware
    async def _answer(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Refuse who may not call, or what cannot be asked; turn every error into a problem."""
        try:
            if (refused := self._unauthorized(request)) is not None:
                return refused
            if (refused := _unknown_query(request)) is not None:
                return refused
            return await handler(request)
        except AgentdError as error:
            headers = {}
            if isinstance(error, Unavailable):
                headers["Retry-After"] = str(error.retry_after_s)
            return problem(error.code, str(error), dict(error.facts()), headers)
        except web.HTTPException as error:
            unnamed = "InvalidRequest" if error.status < SERVER_ERROR else "Internal"
            code = _HTTP_CODES.get(error.status, unnamed)
            allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            detail = f"{request.method} {request.path}: {error.reason}"
            if code == "BodyTooLarge":
                detail = f"the body is larger than {MAX_BODY} bytes"
            return problem(code, detail, None, allow)
        except ConnectionError:
            raise  # the caller has gone; there is nobody to answer
        except Exception as error:
            log.exception("rpc.failed", method=request.method, path=request.path)
            return problem("Internal", f"{type(error).__name__}; the log has more")

    def _unauthorized(self, request: web.Request) -> web.Response | None:
        """Return the refusal of a caller without the token.

        Raises:
            NotReady: the start is not over, and the path has to wait for that.
        """
        path = request.path
        if _is_tcp(request) and path not in ("/livez", "/readyz") and not self._has_token(request):
            challenge = {"WWW-Authenticate": 'Bearer realm="agentd"'}
            return problem("Unauthorized", "a bearer token is needed", None, challenge)
        if path not in OPEN_PATHS:
            self._handlers.require_open()
        return None

    def _has_token(self, request: web.Request) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        wanted = self._endpoint.token or ""
        is_equal = hmac.compare_digest(
            given.strip().encode(errors="surrogateescape"), wanted.encode()
        )
        return scheme.lower() == "bearer" and bool(wanted) and is_equal


_QUERIES = {(route.method, route.path): route.query for route in ROUTES}


def _unknown_query(request: web.Request) -> web.Response | None:
    """Return the refusal of query parameters that a route does not know: a typo is no order."""
    if not request.query_string:
        return None
    resource = request.match_info.route.resource
    known = _QUERIES.get((request.method, resource.canonical if resource else ""), ())
    unknown = sorted(set(request.query) - set(known))
    if not unknown:
        return None
    allowed = ", ".join(known) or "none"
    detail = f"unknown query parameter {', '.join(unknown)}; allowed: {allowed}"
    errors = [{"where": name, "why": "unknown query parameter"} for name in unknown]
    return problem("InvalidRequest", detail, {"errors": errors})


def _is_tcp(request: web.Request) -> bool:
    transport = request.transport
    return transport is None or isinstance(transport.get_extra_info("sockname"), tuple)


def unix_socket(path: Path, group: str | None) -> socket.socket:
    """Bind a unix socket with mode 0660; one that nobody listens on any more is replaced.

    Raises:
        StartRefused: it is in use, or cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_socket():
            _refuse_in_use(path)
            path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o777 & ~SOCKET_MODE)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        if group is not None:
            os.chown(path, -1, grp.getgrnam(group).gr_gid)
    except KeyError:
        raise StartRefused(f"rpc.socket-group: no group {group!r} on this machine") from None
    except OSError as error:
        raise StartRefused(f"rpc.socket {path}: {error.strerror}") from None
    return listener


def _refuse_in_use(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
    raise StartRefused(f"rpc.socket {path} is in use by another process")
