"""One process of a plugin, seen from the daemon.

A call has a deadline; one that misses it, or an answer that is no answer, ends the
process. Ending it is asked of the kernel and waited for briefly: a process that is stuck
in a driver cannot be killed, and then it is left behind, with its pid in the reason.
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
from typing import IO, Any, Self

import msgspec
import structlog

from agentd.adapters.plugin_wire import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    PROTOCOL,
    RESULTS,
    Answer,
    Call,
    Changed,
    Message,
    Order,
    framed,
)

log = structlog.get_logger()

KILL_PATIENCE_S = 2.0
_OWN_END_S = 0.2
_MAX_LINE = 2000
_LINES_AT_ONCE, _QUIET_S = 50, 10.0
_LAST_READS = 16
_NOT_FOR_PLUGINS = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID")


class PluginLost(Exception):
    """The process is gone, or had to be ended; the message says why."""


class PluginRefused(Exception):
    """The plugin answered that it cannot, or with what is no answer; it lives."""


class PluginProcess:
    """A plugin's process; made by `start`, ended by `end`."""

    def __init__(
        self, name: str, popen: subprocess.Popen[bytes], changed: Callable[[], None]
    ) -> None:
        self._name = name
        self._popen = popen
        self._changed = changed
        self._numbers = 0
        self._answer: asyncio.Future[Answer] | None = None
        self._turn = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._exchanges: set[asyncio.Task[Any]] = set()
        self._output = _Output(name)
        self._is_ending = False
        self.lost = asyncio.Event()
        self.reason = ""

    @classmethod
    async def start(
        cls, name: str, target: str, settings: Mapping[str, Any], changed: Callable[[], None]
    ) -> Self:
        """Start the process of a plugin; `changed` is called when it tells of a change.

        Raises:
            PluginLost: it does not start.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                popen = _popen(name, theirs)
            except OSError as error:
                ours.close()
                raise PluginLost(f"its process does not start: {error.strerror}") from None
        made = cls(name, popen, changed)
        await made._connect(ours)
        order = Order(PROTOCOL, [*filter(None, sys.path)], target, name, _plain(settings))
        made._write(framed(order))
        return made

    @property
    def pid(self) -> int:
        return self._popen.pid

    async def _connect(self, channel: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=channel)
        self._reading = asyncio.create_task(self._read(reader), name=f"plugin-{self._name}")
        if self._popen.stdout is not None:
            self._output.follow(self._popen.stdout)

    async def call(self, method: str, *arguments: object, timeout_s: float) -> Any:  # noqa: ANN401 - by RESULTS
        """Call a method, and return what RESULTS says of it.

        Calls wait for each other; `timeout_s` counts from a call's own turn. A caller that
        gives up does not stop the call.

        Raises:
            PluginRefused: the plugin raised, or its answer is none.
            PluginLost: the process ended, or was ended as its time was over.
        """
        return await asyncio.shield(self.begin(method, *arguments, timeout_s=timeout_s))

    def begin(self, method: str, *arguments: object, timeout_s: float) -> asyncio.Task[Any]:
        """Take a place in the row of calls, and return the call; see `call`."""
        exchange = asyncio.create_task(self._exchange(method, arguments, timeout_s))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchanges.discard)
        exchange.add_done_callback(lambda task: task.cancelled() or task.exception())
        return exchange

    async def _exchange(self, method: str, arguments: tuple[object, ...], timeout_s: float) -> Any:  # noqa: ANN401 - as `call`
        async with self._turn:
            if self.lost.is_set():
                raise PluginLost(self.reason)
            self._numbers += 1
            self._answer = asyncio.get_running_loop().create_future()
            try:
                self._write(framed(Call(self._numbers, method, list(arguments))))
                async with asyncio.timeout(timeout_s):
                    answer = await self._answer
            except TimeoutError:
                await self.end(f"{method}: no answer within {timeout_s:g} s")
                raise PluginLost(self.reason) from None
            finally:
                self._answer = None
        if answer.error is not None:
            raise PluginRefused(answer.error)
        try:
            return msgspec.msgpack.decode(answer.result, type=RESULTS[method])
        except (msgspec.DecodeError, ValueError) as error:
            raise PluginRefused(f"it answered {method} with what is no answer: {error}") from None

    def _write(self, frame: bytes) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        why = ""
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
                if length > MAX_FRAME_BYTES:
                    why = f"it sent a frame of {length} bytes"
                    break
                body = await reader.readexactly(length)
                self._took(msgspec.msgpack.decode(body, type=Message))
        except (asyncio.IncompleteReadError, OSError):
            pass
        except (msgspec.DecodeError, ValueError) as error:
            why = f"it sent what is no message: {error}"
        await self.end(why)

    def _took(self, message: Message) -> None:
        if isinstance(message, Changed):
            self._changed()
        elif self._answer and not self._answer.done() and message.number == self._numbers:
            self._answer.set_result(message)

    async def end(self, why: str = "") -> None:
        """End the process; `why` is the reason, unless it ended by itself."""
        if self._is_ending:
            await self.lost.wait()
            return
        self._is_ending = True
        status = None if why else await self._exit_status(_OWN_END_S)
        if status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            if await self._exit_status(KILL_PATIENCE_S) is None:
                why = f"{why or 'it was ended'}; process {self.pid} cannot be killed, left behind"
                log.error("plugin.abandoned", plugin=self._name, pid=self.pid)
        self.reason = why or _how_it_ended(status)
        self._output.close()
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None and self._reading is not asyncio.current_task():
            self._reading.cancel()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(PluginLost(self.reason))
        self.lost.set()
        self._changed()

    def memory_bytes(self) -> int:
        """Return its resident memory; zero if it has ended."""
        try:
            statm = Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii")
        except OSError:
            return 0
        return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def is_alive(self) -> bool:
        """Whether the process is still there, as one that was left behind may be."""
        return self._popen.poll() is None

    async def _exit_status(self, patience_s: float) -> int | None:
        """Wait for the end, looking ever less often; None if it does not come."""
        end, pause_s = time.monotonic() + patience_s, 0.001
        while (status := self._popen.poll()) is None and time.monotonic() < end:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return status


def _popen(name: str, channel: socket.socket) -> subprocess.Popen[bytes]:
    environ = {k: v for k, v in os.environ.items() if k not in _NOT_FOR_PLUGINS}
    return subprocess.Popen(  # noqa: S603 - our own program
        [
            *(sys.executable, "-P", "-m", "agentd.adapters.plugin_child"),
            *(name, str(channel.fileno()), str(os.getpid())),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(channel.fileno(),),
        cwd="/",
        env={**environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
        bufsize=0,
    )


def _plain(value: Any) -> Any:  # noqa: ANN401 - TOML
    """Return a TOML value in the types that cross the channel; a date becomes its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(below) for key, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(below) for below in value]
    if isinstance(value, float):
        return float(value)
    return value if isinstance(value, (str, int)) else str(value)


def _how_it_ended(status: int | None) -> str:
    if status is None:
        return "it was ended"
    if status >= 0:
        return f"it exited with status {status}"
    try:
        return f"it was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"it was killed by signal {-status}"


class _Output:
    """What a plugin prints goes to the log under its name, so much at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._file: IO[bytes] | None = None
        self._rest = b""
        self._window_end = 0.0
        self._lines = 0

    def follow(self, file: IO[bytes]) -> None:
        os.set_blocking(file.fileno(), False)
        self._file = file
        asyncio.get_running_loop().add_reader(file, self._readable)

    def _readable(self) -> bool:
        """Take what there is; False if there is nothing, or nothing more to come."""
        if self._file is None:
            return False
        try:
            chunk = os.read(self._file.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _MAX_LINE or not chunk:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._say(line)
        if not chunk:
            self._let_go()
        return bool(chunk)

    def _say(self, line: bytes) -> None:
        text = line[:_MAX_LINE].decode(errors="replace").strip()
        now = time.monotonic()
        if now >= self._window_end:
            if (more := self._lines - _LINES_AT_ONCE) > 0:
                log.warning("plugin.printed_more", plugin=self._name, lines=more)
            self._window_end, self._lines = now + _QUIET_S, 0
        self._lines += bool(text)
        if text and self._lines <= _LINES_AT_ONCE:
            log.info("plugin.printed", plugin=self._name, text=text)

    def close(self) -> None:
        """Take what is left, a bounded part of it, and follow no more."""
        for _ in range(_LAST_READS):
            if not self._readable():
                break
        self._let_go()

    def _let_go(self) -> None:
        if self._file is not None:
            asyncio.get_running_loop().remove_reader(self._file)
            self._file.close()
            self._file = None
