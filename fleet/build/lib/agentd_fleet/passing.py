"""A node's answer passed through as it comes: logs, events, and everything else that it serves."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import aiohttp
from aiohttp import web

from agentd.errors import NodeUnavailable
from agentd.rpc.callers import caller_of
from agentd.rpc.queries import body_of
from agentd_fleet.nodes import CREATE_PATIENCE_S, PATIENCE_S, Nodes
from agentd_fleet.view import FleetNode

SENT = ("Content-Type", "Last-Event-ID", "Prefer", "Accept")
KEPT = ("Content-Type", "Cache-Control", "Location", "Link", "Retry-After", "Preference-Applied")


async def pass_on(
    nodes: Nodes, node: FleetNode, request: web.Request, path: str
) -> web.StreamResponse:
    """Ask a node what the gateway was asked, and answer what it answers, byte for byte.

    Raises:
        NodeUnavailable: it does not answer.
    """
    body = await body_of(request) if request.can_read_body else None
    headers = {name: request.headers[name] for name in SENT if name in request.headers}
    asked = nodes.opened(node, caller_of(request), request.method, path, body=body, headers=headers)
    patience_s = PATIENCE_S if request.method == "GET" else CREATE_PATIENCE_S
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(patience_s):
                given = await stack.enter_async_context(asked)
        except TimeoutError:
            why = f"node {node.node_id} does not answer within {patience_s:g} s"
            raise NodeUnavailable(why) from None
        kept = {name: given.headers[name] for name in KEPT if name in given.headers}
        response = web.StreamResponse(status=given.status, headers=kept)
        await response.prepare(request)
        try:
            async for chunk in given.content.iter_any():
                await response.write(chunk)
        except aiohttp.ClientError as error:
            raise ConnectionResetError(str(error)) from None  # the stream is cut here, too
        await response.write_eof()
    return response
