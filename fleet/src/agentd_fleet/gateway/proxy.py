"""The proxy: answers of nodes passed on as they arrive: logs, events, exec and all others."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import aiohttp
import structlog
from aiohttp import web

from agentd.client.exec import hang_up
from agentd.client.paths import next_query
from agentd.concurrency import to_the_end
from agentd.errors import NodeUnavailable
from agentd.http.callers import caller_of
from agentd.http.queries import body_of
from agentd.http.streaming.websocket import LimitedSocket, TooManyControlFrames, probe
from agentd_fleet.nodes.calls import CREATE_PATIENCE_S, PATIENCE_S, Nodes
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.fleet_view import FleetNode

log = structlog.get_logger()

SENT = ("Content-Type", "Last-Event-ID", "Prefer", "Accept")
KEPT = ("Content-Type", "Cache-Control", "Location", "Link", "Retry-After", "Preference-Applied")


async def pass_on(
    nodes: Nodes, state: FleetState, node: FleetNode, request: web.Request, path: str
) -> web.StreamResponse:
    """Proxy a request to a node, and its answer back, byte for byte.

    Raises:
        NodeUnavailable: the node does not answer.
    """
    body = await body_of(request) if request.body_exists else None
    headers = {name: request.headers[name] for name in SENT if name in request.headers}
    asked = nodes.opened(node, caller_of(request), request.method, path, body=body, headers=headers)
    patience_s = PATIENCE_S if request.method == "GET" else CREATE_PATIENCE_S
    async with AsyncExitStack() as stack:
        try:
            async with state.patience(node.node_id, patience_s, PATIENCE_S):
                given = await stack.enter_async_context(asked)
        except TimeoutError:
            raise NodeUnavailable(f"node {node.node_id} does not answer") from None
        kept = {name: given.headers[name] for name in KEPT if name in given.headers}
        if (query := next_query(kept.pop("Link", None))) is not None:
            kept["Link"] = f'<{request.rel_url.raw_path}?{query}>; rel="next"'
        response = web.StreamResponse(status=given.status, headers=kept)
        await response.prepare(request)
        try:
            async for chunk in given.content.iter_any():
                await response.write(chunk)
        except aiohttp.ClientError as error:
            raise ConnectionResetError(str(error)) from None  # the stream is cut here, too
        await response.write_eof()
    return response


async def pass_socket(
    nodes: Nodes, state: FleetState, node: FleetNode, request: web.Request, path: str
) -> web.StreamResponse:
    """Connect a client's WebSocket with a node's, frame by frame; each end closes the other.

    If the node refuses, the request is repeated without a WebSocket, whose refusal has no reason.

    Raises:
        NodeUnavailable: the node does not answer.
    """
    near = LimitedSocket()
    far = None
    if near.can_prepare(request).ok:
        far = await nodes.connected(node, caller_of(request), path)
    if far is None:
        return await pass_on(nodes, state, node, request, path)
    flood: TooManyControlFrames | None = None
    try:
        await near.prepare(request)
        given = asyncio.create_task(_pass_to_node(near, far))
        told = asyncio.create_task(_pass_to_caller(far, near))
        probing = asyncio.create_task(probe(near))
        try:
            await asyncio.wait([given, told, probing], return_when=asyncio.FIRST_COMPLETED)
            if given.done():
                error = given.exception()
                flood = error if isinstance(error, TooManyControlFrames) else None
                if error is not None and flood is None:
                    await asyncio.wait([told])  # the reason may still arrive
        finally:
            for task in (given, told, probing):
                task.cancel()
            await asyncio.gather(given, told, probing, return_exceptions=True)
        if far.close_code == aiohttp.WSCloseCode.POLICY_VIOLATION:
            flood = TooManyControlFrames()
        if flood is not None:
            log.warning("exec.aborted", path=request.path, reason=str(flood))
        await near.end(flood)
    finally:
        await to_the_end(hang_up(far))
    return near


async def _pass_to_node(near: LimitedSocket, far: aiohttp.ClientWebSocketResponse) -> None:
    async for frame in near.frames():
        if frame.type is aiohttp.WSMsgType.BINARY:
            await far.send_bytes(frame.data)
        else:
            await far.send_str(frame.data)


async def _pass_to_caller(far: aiohttp.ClientWebSocketResponse, near: LimitedSocket) -> None:
    async for frame in far:
        if frame.type is aiohttp.WSMsgType.BINARY:
            await near.send_bytes(frame.data)
        elif frame.type is aiohttp.WSMsgType.TEXT:
            await near.send_str(frame.data)
        elif frame.type is aiohttp.WSMsgType.PING:
            await far.pong(frame.data)
