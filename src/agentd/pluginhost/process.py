"""One process of a plugin, seen from the daemon.

A call has a deadline. A call that misses it, or a frame that cannot be decoded, ends the process.
The process is killed and awaited briefly. One that is stuck in a driver cannot be killed; it is
abandoned, with its pid in the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
import structlog

from agentd.failpoints import hit_async
from agentd.host.processes import Proc, read_stat
from agentd.pluginhost.descendants import MARK, kill_marked, new_mark
from agentd.pluginhost.output import PluginOutput, one_line
from agentd.pluginhost.protocol import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    PROTOCOL,
    RESULTS,
    Changed,
    Failure,
    Message,
    PluginAnswer,
    PluginCall,
    PluginStart,
    Watched,
    encode_frame,
)
from agentd.pluginhost.validation import InvalidAnswer
from agentd.program.process import python_command

log = structlog.get_logger()

KILL_TIMEOUT_S = 2.0
_EXIT_GRACE_S = 0.2
_WITHHELD_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID")


class PluginLost(Exception):
    """The process has ended, or was ended; the message has the reason."""


class PluginRefused(Exception):
    """The plugin raised; its process still runs."""


class PluginAbsent(PluginRefused):
    """The plugin found none of its hardware on this node (`plugin_api.NotPresent`)."""


_FAILURES = {
    Failure.RAISED: PluginRefused,
    Failure.ABSENT: PluginAbsent,
    Failure.INVALID: InvalidAnswer,
}


class PluginProcess:
    """A plugin's process; created by `start`, ended by `end`."""

    def __init__(
        self,
        name: str,
        popen: subprocess.Popen[bytes],
        mark: str,
        on_change: Callable[[], None],
        channel: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._name = name
        self._mark = mark
        self._popen = popen
        self._on_change = on_change
        self._last_number = 0
        self._answer: asyncio.Future[PluginAnswer] | None = None
        self._call_lock = asyncio.Lock()
        self._exchanges: set[asyncio.Task[Any]] = set()
        self._is_ending = False
        self.lost = asyncio.Event()
        self.reason = ""
        self.watch_failure = ""
        """Why the plugin cannot wait for changes now; empty if it can."""
        self._last_watch_failure = ""
        reader, self._writer = channel
        self._output = PluginOutput(name, popen.stdout) if popen.stdout is not None else None
        self._tasks = [
            asyncio.create_task(self._read(reader), name=f"plugin-{name}"),
            asyncio.create_task(self._watch_exit(), name=f"plugin-end-{name}"),
        ]

    @classmethod
    async def start(
        cls, name: str, target: str, settings: Mapping[str, Any], on_change: Callable[[], None]
    ) -> Self:
        """Start the process of a plugin; `on_change` is called when it reports a change.

        Raises:
            PluginLost: the process does not start.
        """
        start_frame = encode_frame(
            PluginStart(PROTOCOL, [*filter(None, sys.path)], target, name, _to_plain(settings))
        )
        mark = new_mark()
        try:
            await hit_async("plugin.before_spawn")
            channel, child_end = socket.socketpair()
            with child_end:
                try:
                    popen = _popen(name, child_end, mark)
                except OSError:
                    channel.close()
                    raise
        except OSError as error:
            raise PluginLost(f"the process does not start: {error.strerror}") from None
        process = cls(name, popen, mark, on_change, await asyncio.open_connection(sock=channel))
        await hit_async("plugin.after_spawn")
        process._write(start_frame)
        return process

    @property
    def pid(self) -> int:
        return self._popen.pid

    async def _watch_exit(self) -> None:
        """Detect the end of the process, also if a copy of it keeps the channel open."""
        stat = read_stat(self.pid)
        if stat is not None:
            await Proc(stat.pid, stat.start_time).wait()
        await asyncio.sleep(_EXIT_GRACE_S)  # read its last output first
        await self.kill()

    async def call(self, method: str, *arguments: object, timeout_s: float) -> Any:
        """Call a method and return a result of the type in RESULTS.

        Calls wait for each other; `timeout_s` counts from a call's own turn. Cancelling the caller
        does not stop the call.

        Raises:
            PluginRefused: the plugin raised.
            PluginAbsent: the plugin found no hardware.
            InvalidAnswer: it is not a plugin, or its answer has the wrong type.
            PluginLost: the process ended, or was ended because the call timed out.
        """
        return await asyncio.shield(self.queue_call(method, *arguments, timeout_s=timeout_s))

    def queue_call(self, method: str, *arguments: object, timeout_s: float) -> asyncio.Task[Any]:
        """Queue a call behind earlier ones, and return its task; see `call`."""
        exchange = asyncio.create_task(self._exchange(method, arguments, timeout_s))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchanges.discard)
        exchange.add_done_callback(lambda task: task.cancelled() or task.exception())
        return exchange

    async def _exchange(self, method: str, arguments: tuple[object, ...], timeout_s: float) -> Any:
        async with self._call_lock:
            if self.lost.is_set():
                raise PluginLost(self.reason)
            self._last_number += 1
            self._answer = asyncio.get_running_loop().create_future()
            try:
                self._write(encode_frame(PluginCall(self._last_number, method, list(arguments))))
                async with asyncio.timeout(timeout_s):
                    answer = await self._answer
            except TimeoutError:
                await self.kill(f"{method}: no answer within {timeout_s:g} s")
                raise PluginLost(self.reason) from None
            finally:
                self._answer = None
        if answer.error is not None:
            raise _FAILURES[answer.failure](one_line(answer.error))
        return self._decode(method, bytes(answer.result))

    def _decode(self, method: str, result: bytes) -> Any:
        try:
            return msgspec.msgpack.decode(result, type=RESULTS[method])
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            reason = f"invalid answer to {method}: {error}"
            raise InvalidAnswer(one_line(reason)) from None

    def _write(self, frame: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        reason = ""
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
                if length > MAX_FRAME_BYTES:
                    reason = f"frame of {length} bytes exceeds the limit"
                    break
                body = await reader.readexactly(length)
                self._handle_message(msgspec.msgpack.decode(body, type=Message))
        except (asyncio.IncompleteReadError, OSError):
            pass
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            reason = f"invalid message: {error}"
        await self.kill(reason)

    def _handle_message(self, message: Message) -> None:
        if isinstance(message, Changed):
            self._on_change()
        elif isinstance(message, Watched):
            self.watch_failure = reason = one_line(message.error)
            if reason and reason != self._last_watch_failure:
                log.warning("plugin.watch_failed", plugin=self._name, reason=reason)
                self._last_watch_failure = reason
        elif self._answer and not self._answer.done() and message.number == self._last_number:
            self._answer.set_result(message)

    async def kill(self, reason: str = "") -> None:
        """End the process; `reason` is the reason, unless it ended by itself."""
        if self._is_ending:
            await self.lost.wait()
            return
        self._is_ending = True
        await hit_async("plugin.before_kill")
        status = None if reason else await self._wait_exit(_EXIT_GRACE_S)
        if status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            if await self._wait_exit(KILL_TIMEOUT_S) is None:
                reason = (
                    f"{reason or 'ended'}; process {self.pid} cannot be killed and was abandoned"
                )
                log.error("plugin.abandoned", plugin=self._name, pid=self.pid)
        await hit_async("plugin.after_kill")
        await kill_marked(self._mark)
        self.reason = reason or _describe_exit(status)
        if self._output is not None:
            await self._output.close()
        self._writer.close()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(PluginLost(self.reason))
        self.lost.set()
        self._on_change()

    def memory_bytes(self) -> int:
        """Return the resident memory in bytes, zero if it has ended."""
        try:
            statm = Path(f"/proc/{self.pid}/statm").read_bytes()
        except OSError:
            return 0
        return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def is_alive(self) -> bool:
        """Whether the process still exists, as an abandoned one may."""
        return self._popen.poll() is None

    async def _wait_exit(self, patience_s: float) -> int | None:
        """Poll for the end at growing intervals; None if it does not come."""
        deadline, pause_s = time.monotonic() + patience_s, 0.001
        while (status := self._popen.poll()) is None and time.monotonic() < deadline:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return status


def _popen(name: str, channel: socket.socket, mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - our own program
        [
            *(*python_command(), "-u", "-m", "agentd.pluginhost.child"),
            *(name, str(channel.fileno()), str(os.getpid())),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(channel.fileno(),),
        cwd="/",
        env=_environment(mark),
        start_new_session=True,
        bufsize=0,
    )


def _environment(mark: str) -> dict[str, str]:
    environ = {k: v for k, v in os.environ.items() if k not in _WITHHELD_VARIABLES}
    return environ | {MARK: mark}


def _to_plain(value: Any) -> Any:
    """Convert a TOML value to types of the channel; a date and a huge number become their text."""
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    if isinstance(value, float):
        return float(value)
    is_plain = isinstance(value, str) or (isinstance(value, int) and -(2**63) <= value < 2**63)
    return value if is_plain else str(value)


def _describe_exit(status: int | None) -> str:
    if status is None:
        return "ended"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
