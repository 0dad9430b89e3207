"""aiohttp's handler of a connection's requests, with problems for malformed HTTP.

aiohttp has no other place for them (https://github.com/aio-libs/aiohttp/issues/3287).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from aiohttp import web

from agentd.http.connections.client_warnings import warn_of_client
from agentd.http.problem_responses import problem_response

if TYPE_CHECKING:
    from agentd.http.connections.connection import Connection

KEEP_ALIVE_S = 75.0

_disabled_log = logging.getLogger("agentd.http.aiohttp")
_disabled_log.disabled = True


class ConnectionHandler(web.RequestHandler):
    """The handler of one connection."""

    def __init__(self, server: web.Server, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=KEEP_ALIVE_S,
            logger=_disabled_log,
            auto_decompress=False,  # a small compressed body can be of any size
        )
        self.connection = connection

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer malformed HTTP with a problem.

        Raises:
            ConnectionError: the client disconnected during the response.
        """
        del request
        if isinstance(exc, ConnectionError):
            raise exc
        lines = (message or str(exc) or "not HTTP").splitlines()
        warn_of_client("request.rejected", status=status, reason=lines[0][:200])
        reason = " ".join(line.strip() for line in lines)[:500]
        response = problem_response("BadRequest", f"malformed HTTP/1.1 request: {reason}")
        response.force_close()
        return response
