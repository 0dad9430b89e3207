"""One connection: how long a caller may take to say what it wants, and how many there may be.

What is no HTTP is answered with a problem like every other error, and logged without a
traceback, at a bounded rate.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable
from typing import Any

import structlog
from aiohttp import web

log = structlog.get_logger()

HEADER_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 75.0
LOG_PAUSE_S = 1.0
"""At most one line of log in this time says what was wrong with requests."""


class Limits:
    """How many TCP connections there are, and may be; one for all of a server's connections."""

    def __init__(self, most: int) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = min(most, descriptors // 2)
        self._open = 0
        self._quiet_until = 0.0
        self._unsaid = 0

    def admit(self) -> bool:
        """Count one more, if there may be one more."""
        if self._open >= self._most:
            self.complain("rpc.too_many_connections", most=self._most)
            return False
        self._open += 1
        return True

    def release(self) -> None:
        """Count one less."""
        self._open -= 1

    def complain(self, event: str, **facts: object) -> None:
        """Log what is wrong with a caller, and not each of a flood."""
        now = time.monotonic()
        if now < self._quiet_until:
            self._unsaid += 1
            return
        log.warning(event, further=self._unsaid, **facts)
        self._quiet_until, self._unsaid = now + LOG_PAUSE_S, 0


class Connection(web.RequestHandler):
    """A connection that is closed if a request's header does not come in time."""

    def __init__(
        self,
        server: web.Server,
        limits: Limits,
        broken: Callable[[str], web.Response],
        *,
        is_tcp: bool,
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, keepalive_timeout=KEEP_ALIVE_S)
        self._limits = limits
        self._broken = broken
        self._is_tcp = is_tcp
        self._is_counted = False
        self._in_request = False
        self._deadline: asyncio.TimerHandle | None = None
        self._stream: asyncio.Task[object] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._is_tcp:
            self._is_counted = self._limits.admit()
            if not self._is_counted:
                self.force_close()
                return
        self._expect_header()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._is_counted:
            self._limits.release()
            self._is_counted = False
        self._forget_deadline()
        if self._stream is not None:
            self._stream.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._in_request and self._deadline is None:
            self._expect_header()
        super().data_received(data)

    def began(self) -> None:
        """Note that all of a request's header is there."""
        self._in_request = True
        self._forget_deadline()

    def ended(self) -> None:
        """Note that a request was answered; the next one may take its time to begin."""
        self._in_request = False
        self._stream = None

    def carries(self, stream: asyncio.Task[object]) -> None:
        """Have what answers without an end cancelled as soon as the connection is lost."""
        self._stream = stream

    def _expect_header(self) -> None:
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(HEADER_TIMEOUT_S, self.force_close)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no request with a problem."""
        why = (message or str(exc) or "it is no HTTP").splitlines()
        self._limits.complain("rpc.broken_request", status=status, reason=why[0][:200])
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        response = self._broken(" ".join(part.strip() for part in why)[:500])
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the parent's signature
        """Leave out what the parent would say of callers that go away; `handle_error` says more."""
        del args, kwargs
