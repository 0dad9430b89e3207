"""The proxy: answers of nodes passed on as they arrive: logs, events, exec and all others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack

import aiohttp
import structlog
from aiohttp import web

from agentd.client.exec import close_websocket, read_frames
from agentd.client.paths import next_query
from agentd.concurrency import complete_shielded
from agentd.errors import NodeUnavailable
from agentd.http.callers import caller_of
from agentd.http.problem_responses import problem_members
from agentd.http.queries import receive_body
from agentd.http.streaming.streaming_responses import LOG_KERNEL, LOG_POSITION
from agentd.http.streaming.websocket import LimitedSocket, TooManyControlFrames, send_heartbeats
from agentd_fleet.nodes.calls import CALL_TIMEOUT_S, CREATE_TIMEOUT_S, Nodes
from agentd_fleet.view.fleet_view import FleetNode

log = structlog.get_logger()

REQUEST_HEADERS = ("Content-Type", "Last-Event-ID", "Prefer", "Accept")
RESPONSE_HEADERS = (
    "Content-Type",
    "Cache-Control",
    "Location",
    "Link",
    "Retry-After",
    "Preference-Applied",
    "X-Accel-Buffering",
    LOG_POSITION,
    LOG_KERNEL,
)


def pick_headers(headers: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return those of the named headers that there are."""
    return {name: headers[name] for name in names if name in headers}


async def proxy_request(
    nodes: Nodes, node: FleetNode, request: web.Request, path: str
) -> web.StreamResponse:
    """Proxy a request to a node, and its answer back, byte for byte.

    Raises:
        NodeUnavailable: the node does not answer.
    """
    body = await receive_body(request) if request.body_exists else None
    headers = pick_headers(request.headers, REQUEST_HEADERS)
    opening = nodes.open_response(
        node, caller_of(request), request.method, path, body=body, headers=headers
    )
    patience_s = CALL_TIMEOUT_S if request.method == "GET" else CREATE_TIMEOUT_S
    await nodes.require_answer(node)
    async with AsyncExitStack() as stack:
        try:
            async with nodes.call_timeout(node, patience_s):
                node_response = await stack.enter_async_context(opening)
        except TimeoutError:
            raise NodeUnavailable(f"node {node.node_id} does not answer") from None
        response_headers = pick_headers(node_response.headers, RESPONSE_HEADERS)
        if (query := next_query(response_headers.pop("Link", None))) is not None:
            response_headers["Link"] = f'<{request.rel_url.raw_path}?{query}>; rel="next"'
        response = web.StreamResponse(status=node_response.status, headers=response_headers)
        await response.prepare(request)
        try:
            async for chunk in node_response.content.iter_any():
                await response.write(chunk)
        except aiohttp.ClientError as error:
            raise ConnectionResetError(str(error)) from None  # the stream is cut here, too
        await response.write_eof()
    return response


async def proxy_websocket(
    nodes: Nodes, node: FleetNode, request: web.Request, path: str
) -> web.StreamResponse:
    """Connect a client's WebSocket with a node's, frame by frame; each end closes the other.

    If the node refuses, the request is repeated without a WebSocket, whose refusal has no reason.

    Raises:
        NodeUnavailable: the node does not answer.
    """
    client_socket = LimitedSocket()
    node_socket = None
    if client_socket.can_prepare(request).ok:
        node_socket = await nodes.open_websocket(node, caller_of(request), path)
    if node_socket is None:
        return await proxy_request(nodes, node, request, path)
    flood: TooManyControlFrames | None = None
    try:
        await client_socket.prepare(request)
        to_node = asyncio.create_task(_copy_to_node(client_socket, node_socket))
        to_client = asyncio.create_task(_copy_to_client(node, node_socket, client_socket))
        probing = asyncio.create_task(send_heartbeats(client_socket))
        try:
            await asyncio.wait([to_node, to_client, probing], return_when=asyncio.FIRST_COMPLETED)
            if to_node.done():
                error = to_node.exception()
                flood = error if isinstance(error, TooManyControlFrames) else None
                if error is not None and flood is None:
                    await asyncio.wait([to_client])  # the reason may still arrive
        finally:
            for task in (to_node, to_client, probing):
                task.cancel()
            await asyncio.gather(to_node, to_client, probing, return_exceptions=True)
        if node_socket.close_code == aiohttp.WSCloseCode.POLICY_VIOLATION:
            flood = TooManyControlFrames()
        if flood is not None:
            log.warning("exec.aborted", path=request.path, reason=str(flood))
        await client_socket.end(flood)
    finally:
        await complete_shielded(close_websocket(node_socket))
    return client_socket


async def _copy_to_node(
    client_socket: LimitedSocket, node_socket: aiohttp.ClientWebSocketResponse
) -> None:
    async for frame in client_socket.frames():
        if frame.type is aiohttp.WSMsgType.BINARY:
            await node_socket.send_bytes(frame.data)
        else:
            await node_socket.send_str(frame.data)


async def _copy_to_client(
    node: FleetNode, node_socket: aiohttp.ClientWebSocketResponse, client_socket: LimitedSocket
) -> None:
    try:
        async for frame in read_frames(node_socket):
            if frame.type is aiohttp.WSMsgType.BINARY:
                await client_socket.send_bytes(frame.data)
            elif frame.type is aiohttp.WSMsgType.TEXT:
                await client_socket.send_str(frame.data)
    except TimeoutError as silence:
        problem = problem_members(NodeUnavailable.code, f"node {node.node_id}: {silence}")
        await client_socket.send_str(json.dumps({"problem": problem}))
