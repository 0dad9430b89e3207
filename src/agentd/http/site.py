"""A site: the part of a server that daemon and gateway have in common besides routes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from aiohttp import web

from agentd.core.access import Caller, Right
from agentd.http.audit import AuditedCall
from agentd.http.callers import caller_of, caller_view
from agentd.http.responses import json_response
from agentd.http.streaming.streaming_responses import Streams


class Site(ABC):
    """Rights, open streams, and the routes of every site."""

    def __init__(self) -> None:
        self.streams = Streams()
        self.build_document: Callable[[], Mapping[str, Any]] = dict
        """Builds the OpenAPI document on request; set by the server."""

    @abstractmethod
    async def wait_open(self, patience_s: float) -> None:
        """Wait until requests are answered.

        Raises:
            NotReady: they are not within `patience_s` seconds.
        """

    @abstractmethod
    def authorize(self, request: web.Request, caller: Caller, right: Right) -> None:
        """Refuse a caller that cannot see the target or lacks the right.

        Raises:
            RequestError: the target is unknown to the caller, or the right is missing.
        """

    @abstractmethod
    def audit_call(self, request: web.Request, action: str) -> AbstractContextManager[AuditedCall]:
        """Return the audit context of a mutating call."""

    async def livez(self, _: web.Request) -> web.Response:
        """Answer the liveness probe."""
        return json_response({"status": "ok"})

    async def whoami(self, request: web.Request) -> web.Response:
        """Show the caller's identity and role."""
        return json_response(caller_view(caller_of(request)))

    async def get_openapi(self, _: web.Request) -> web.Response:
        """Return the OpenAPI document of this API."""
        return json_response(self.build_document())
