"""Exec: a command in a running kernel, over a WebSocket (RFC 6455).

The client's first text frame names the command. Its binary frames are input, unchanged. Binary
frames to the client begin with one byte for the stream, 1 or 2. Text frames are JSON:
`{"resize": [columns, rows]}`, `{"stdin": "closed"}` and `{"signal": "INT"}` from the client. The
last one to the client is `{"exit_code": 0}`, or `{"problem": …}` (RFC 9457) if the command did not
start. The client gets a pong each second, and takes ten seconds of silence for a lost connection.
A client that disconnects ends the command.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

import msgspec
import structlog
from aiohttp import WSMessage, WSMsgType, web

from agentd.concurrency import complete_shielded
from agentd.core.kernel.exec_spec import ExecSpec
from agentd.errors import AgentdError, InvalidRequest, Problem
from agentd.http.bodies import read_body
from agentd.http.connections.client_warnings import warn_of_client
from agentd.http.problem_responses import problem_members
from agentd.http.streaming.websocket import LimitedSocket, TooManyControlFrames, send_heartbeats
from agentd.rpc.requests import ExecRequest
from agentd.services.protocols import Session

log = structlog.get_logger()

FIRST_FRAME_S = 10.0
QUEUED = 4
"""Input frames that may wait for the command; signals overtake them."""
MAX_SIZE = 10_000
NO_SOCKET = "expected a WebSocket (RFC 6455): Upgrade: websocket"


async def run_exec(
    request: web.Request, begin: Callable[[ExecSpec], Awaitable[Session]]
) -> web.WebSocketResponse:
    """Run a client's command and copy its input and output."""
    websocket = LimitedSocket()
    if not websocket.can_prepare(request).ok:
        raise InvalidRequest([Problem("Upgrade", NO_SOCKET)])
    await websocket.prepare(request)
    session: Session | None = None
    overflow: TooManyControlFrames | None = None
    frames = websocket.frames()
    heartbeat_task = asyncio.create_task(send_heartbeats(websocket))  # before the command, too
    try:
        session = await begin(await _receive_request(frames))
        await _copy_streams(websocket, frames, session, heartbeat_task)
    except TooManyControlFrames as error:
        overflow = error
        warn_of_client("exec.aborted", path=request.path, reason=str(error))
    except AgentdError as error:
        problem = problem_members(error.code, str(error), error.facts())
        with suppress(ConnectionError):
            await websocket.send_str(json.dumps({"problem": problem}))
    except ConnectionError:
        pass  # the client disconnected
    except Exception as error:
        log.exception("exec.failed", path=request.path)
        problem = problem_members("Internal", f"{type(error).__name__}; the log has more")
        with suppress(ConnectionError):
            await websocket.send_str(json.dumps({"problem": problem}))
    finally:
        heartbeat_task.cancel()
        await asyncio.gather(heartbeat_task, return_exceptions=True)
        if session is not None:
            await complete_shielded(session.close())
        await websocket.end(overflow)
    return websocket


async def _receive_request(frames: AsyncGenerator[WSMessage]) -> ExecSpec:
    """Read the first frame.

    Raises:
        InvalidRequest: the frame is malformed or missing.
    """
    try:
        async with asyncio.timeout(FIRST_FRAME_S):
            frame = await anext(frames, None)
    except TimeoutError:
        raise InvalidRequest([Problem("", f"no first frame in {FIRST_FRAME_S:g} s")]) from None
    if frame is None or frame.type is not WSMsgType.TEXT:
        reason = 'expected a text frame: {"command": [...], "tty": false, "env": {}}'
        raise InvalidRequest([Problem("", reason)])
    return read_body(ExecRequest, frame.data).to_spec()


async def _copy_streams(
    websocket: LimitedSocket,
    frames: AsyncGenerator[WSMessage],
    session: Session,
    heartbeat_task: asyncio.Task[None],
) -> None:
    """Copy both directions until the command ends or the client disconnects."""
    input_queue: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUED)
    input_task = asyncio.create_task(_write_input(session, input_queue))
    frames_task = asyncio.create_task(_read_frames(frames, session, input_queue))
    output_task = asyncio.create_task(_send_output(websocket, session))
    try:
        ends = [output_task, frames_task, heartbeat_task]
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (input_task, frames_task, output_task):
            task.cancel()
        await asyncio.gather(input_task, frames_task, output_task, return_exceptions=True)


async def _send_output(websocket: LimitedSocket, session: Session) -> None:
    """Send the output of the command, then its exit code."""
    async with aclosing(session.output()) as output:
        async for stream, data in output:
            await websocket.send_bytes(bytes([stream]) + data)
    await websocket.send_str(json.dumps({"exit_code": await session.wait()}))


async def _write_input(session: Session, input_queue: asyncio.Queue[bytes | None]) -> None:
    while (data := await input_queue.get()) is not None:
        await session.write(data)
    await session.close_input()


async def _read_frames(
    frames: AsyncGenerator[WSMessage], session: Session, input_queue: asyncio.Queue[bytes | None]
) -> None:
    is_closed = False
    async for frame in frames:
        if frame.type is WSMsgType.BINARY:
            if frame.data and not is_closed:
                await input_queue.put(frame.data)
        elif (control := _parse_control(frame.data)) != {"stdin": "closed"}:
            await _apply_control(session, control)
        elif not is_closed:
            is_closed = True  # input after this is ignored
            await input_queue.put(None)


def _parse_control(text: str) -> Mapping[str, Any]:
    """Parse a control frame.

    Raises:
        InvalidRequest: the frame is not a JSON object.
    """
    with suppress(msgspec.MsgspecError, RecursionError):
        control = msgspec.json.decode(text)
        if isinstance(control, Mapping):
            return control
    raise InvalidRequest([Problem("", "expected a JSON object")])


def _signal_number(name: str) -> int | None:
    """Return the number of a signal by name (`INT` or `SIGINT`), or None if it is unknown."""
    member = signal.Signals.__members__.get(f"SIG{name.removeprefix('SIG')}")
    return None if member is None else member.value


async def _apply_control(session: Session, control: Mapping[str, Any]) -> None:
    match control:
        case {"resize": [int(columns), int(rows)]} if 0 < columns < MAX_SIZE > rows > 0:
            await session.resize(columns, rows)
        case {"signal": str(name)} if (number := _signal_number(name)) is not None:
            await session.send_signal(number)
        case _:
            frames = '{"resize": [columns, rows]}, {"stdin": "closed"}, {"signal": "INT"}'
            raise InvalidRequest([Problem("", f"expected one of {frames}")])
