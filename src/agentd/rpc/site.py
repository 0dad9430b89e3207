"""The node as a site: rights by agent, kernel and device, and readiness."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager

from aiohttp import web

from agentd.concurrency import wait_event
from agentd.core.access import Caller, Right
from agentd.core.devices import DeviceId
from agentd.errors import NotReady
from agentd.http.audit import AuditedCall, audit_call
from agentd.http.responses import json_response
from agentd.http.site import Site
from agentd.services.access import Access
from agentd.services.node import Node
from agentd.services.refusals import Refusals


class NodeSite(Site):
    """A node's site: requests below /v1 wait until it is opened."""

    def __init__(self, node: Node, access: Access, refusals: Refusals) -> None:
        super().__init__()
        self._state, self._devices = node.state, node.devices
        self._access = access
        self._events = node.events
        self._refusals = refusals
        self._opened = asyncio.Event()

    def open(self) -> None:
        """Open the site: requests are answered from now on."""
        self._opened.set()

    async def wait_open(self, patience_s: float) -> None:
        if not await wait_event(self._opened, patience_s):
            raise NotReady("the daemon has not finished starting")

    def authorize(self, request: web.Request, caller: Caller, right: Right) -> None:
        """Refuse a caller that cannot see the target or lacks the right; see `Access.authorize`."""
        match = request.match_info
        name = match.get("device_name")
        self._access.authorize(
            caller,
            right,
            agent=match.get("agent"),
            kernel=match.get("kernel"),
            claim=match.get("claim"),
            device=DeviceId(name, match["id"]) if name is not None else None,
        )

    def audit_call(self, request: web.Request, action: str) -> AbstractContextManager[AuditedCall]:
        kernel = self._state.kernels.get(request.match_info.get("kernel", ""))
        claim = self._state.claims.get(request.match_info.get("claim", ""))
        item = kernel or claim
        agent = request.match_info.get("agent") or (item.agent_id if item else "")
        is_create = (
            action in ("create_kernel", "create_claim") and agent in self._devices.split.partitions
        )
        on_error = self._refusals.record if is_create else None
        return audit_call(self._events, on_error, request, action, agent)

    async def readyz(self, _: web.Request) -> web.Response:
        """Answer the readiness probe: ready after the start, including adoption."""
        await self.wait_open(0)
        return json_response({"status": "ok"})
