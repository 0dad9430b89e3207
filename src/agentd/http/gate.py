"""The gate: every request is authenticated and authorized before its handler runs.

The order of checks is part of the contract: foreign pages, own pages, the right node,
authentication (`callers`), the end of the start, names, query parameters, rights (`services.access`
of the node or gateway); then the handler.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

import structlog
from aiohttp import web

from agentd.core.access import Caller
from agentd.errors import AgentdError, Unavailable
from agentd.http.callers import NODE_HEADER, Callers, attach_caller
from agentd.http.connections.request_turns import end_turn, limit_turn
from agentd.http.problem_responses import HTTP_CODES, STANDARD_MEMBERS, problem_response
from agentd.http.queries import Query, attach_query, read_query, receive_body
from agentd.http.route import OPEN_PATHS, Route, require_names
from agentd.http.site import Site
from agentd.http.static import Pages, is_foreign

log = structlog.get_logger()

MAX_BODY = 1024 * 1024
SERVER_ERROR = 500

RequestHandler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gate:
    """The gate between requests and the handlers of a site.

    `open_timeout_s` is the time that a request waits for the end of the start, in seconds.
    """

    def __init__(
        self,
        site: Site,
        routes: Sequence[Route],
        callers: Callers,
        pages: Pages | None,
        node_id: str | None,
        open_timeout_s: float,
    ) -> None:
        self._site = site
        self._routes = {(route.method, route.path): route for route in routes}
        self._callers = callers
        self._pages = pages
        self._node_id = node_id
        self._open_timeout_s = open_timeout_s

    async def handle(self, request: web.Request, handler: RequestHandler) -> web.StreamResponse:
        """Check a request and run its handler.

        Raises:
            AgentdError: the request is refused or fails.
            web.HTTPException: the same, raised by aiohttp.
        """
        if (public_response := self._public_response(request)) is not None:
            return public_response
        caller = await self._identify(request)
        route = self._find_route(request)
        is_public = route is not None and route.right is None
        if caller is None and not is_public:
            challenge = {"WWW-Authenticate": 'Bearer realm="agentd"'}
            return problem_response(
                "Unauthorized", "missing or unknown bearer token", None, challenge
            )
        if request.path not in OPEN_PATHS:
            await self._site.wait_open(self._open_timeout_s)
        if route is None or caller is None or route.right is None:
            return await handler(request)
        attach_caller(request, caller)
        require_names(request.match_info)
        query = Query() if route.proxied_routes else read_query(route.query, request.query)
        attach_query(request, query)
        if not route.is_audited or getattr(query, "dry_run", False):
            self._site.authorize(request, caller, route.right)
            with limit_turn(request):
                return await handler(request)
        with self._site.audit_call(request, route.action) as call:
            self._site.authorize(request, caller, route.right)
            end_turn(request)
            response = await handler(request)
            call.set_outcome(str(response.status))
        return response

    async def _identify(self, request: web.Request) -> Caller | None:
        """Identify the caller again after the body has arrived: its token may be revoked by then.

        A body that is too large is refused later, by the handler, after rights and names.
        """
        caller = self._callers.identify(request)
        if caller is not None and not request.content.is_eof():
            with suppress(web.HTTPRequestEntityTooLarge):
                await receive_body(request)
            caller = self._callers.identify(request)
        return caller

    def _public_response(self, request: web.Request) -> web.Response | None:
        """Return a response that needs no authentication: a page, or a refusal of the request."""
        if is_foreign(request):
            return problem_response("Forbidden", "request from a foreign origin or host name")
        if self._pages is not None and (page := self._pages.response_for(request)) is not None:
            return page
        if (
            self._node_id is not None
            and request.headers.get(NODE_HEADER, self._node_id) != self._node_id
        ):
            return problem_response("WrongNode", f"this is node {self._node_id}")
        return None

    def _find_route(self, request: web.Request) -> Route | None:
        resource = request.match_info.route.resource
        return self._routes.get((request.method, resource.canonical)) if resource else None


def error_response(request: web.Request, error: Exception) -> web.Response:
    """Return the problem response for an error."""
    if isinstance(error, AgentdError):
        headers = dict(error.headers)
        if isinstance(error, Unavailable):
            headers["Retry-After"] = str(error.retry_after_s)
        facts = {k: v for k, v in error.content.items() if k not in STANDARD_MEMBERS}
        return problem_response(error.code, str(error), facts or error.members(), headers)
    if isinstance(error, web.HTTPException):
        default_code = "InvalidRequest" if error.status < SERVER_ERROR else "Internal"
        code = HTTP_CODES.get(error.status, default_code)
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        detail = f"{request.method} {request.path}: {error.reason}"
        if code == "BodyTooLarge":
            detail = f"the body is larger than {MAX_BODY} bytes"
        return problem_response(code, detail, None, allow)
    log.error("request.failed", method=request.method, path=request.path, exc_info=error)
    return problem_response("Internal", f"{type(error).__name__}; the log has more")
