"""The process of a plugin: `python -m agentd.pluginhost.child NAME FD`.

It imports the plugin, makes the daemon's calls, and knows nothing else. Calls are handled one after
another; a plugin that waits for events does so in a thread of its own. The process dies with the
daemon: Linux kills it when its parent ends, even in an interruptible driver call, and otherwise it
ends with the channel.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentd.plugin_api import (
    API_VERSION,
    AcceleratorPlugin,
    AllocatedDevice,
    DeviceInfo,
    Features,
    KernelEvent,
    NotPresent,
)
from agentd.pluginhost.protocol import (
    PROTOCOL,
    RESULTS,
    Changed,
    DeviceListing,
    Failure,
    Message,
    PluginAnswer,
    PluginCall,
    PluginFacts,
    PluginStart,
    Watched,
    encode,
    encode_frame,
    receive_frame,
)

_PR_SET_PDEATHSIG = 1
_EVENT_WAIT_S = 60.0
_MIN_PAUSE_S = 0.1
_OOM_SCORE = "500"


class NoPluginError(TypeError):
    """The entry point is not a plugin that this agentd can run."""


class PluginServer:
    """One plugin and its channel."""

    def __init__(self, channel: socket.socket, start: PluginStart) -> None:
        self._channel = channel
        self._start = start
        self._sending = threading.Lock()
        self._class: type[AcceleratorPlugin] | None = None
        self._plugin: AcceleratorPlugin | None = None
        self._is_open = False
        self._closing = threading.Event()

    def serve(self) -> None:
        """Answer calls until the channel ends."""
        while (body := receive_frame(self._channel)) is not None:
            call = msgspec.msgpack.decode(body, type=PluginCall)
            self._send(self._answer(call))

    def _answer(self, call: PluginCall) -> PluginAnswer:
        try:
            if call.method not in RESULTS:
                raise LookupError(f"unknown method {call.method}")
            result = encode(getattr(self, call.method)(*call.arguments))
            return PluginAnswer(call.number, msgspec.Raw(result))
        except BaseException as error:
            failure = _failure_kind(error)
            text = describe_error(error)
            if failure is Failure.ABSENT:  # an answer, not an error of the plugin
                text = text.removeprefix(f"{type(error).__name__}: ")
            return PluginAnswer(call.number, error=text, failure=failure)

    def _send(self, message: Message) -> None:
        try:
            frame = encode_frame(message)
        except ValueError as error:
            if not isinstance(message, PluginAnswer):
                raise
            frame = encode_frame(PluginAnswer(message.number, error=describe_error(error)))
        with self._sending:
            self._channel.sendall(frame)

    def load(self) -> PluginFacts:
        module, _, attributes = self._start.target.partition(":")
        before = set(sys.modules)
        loaded: Any = importlib.import_module(module)
        for attribute in filter(None, attributes.split(".")):
            loaded = getattr(loaded, attribute)
        if not (isinstance(loaded, type) and issubclass(loaded, AcceleratorPlugin)):
            raise NoPluginError(f"the entry point is not an AcceleratorPlugin: {loaded!r}")
        self._class = loaded
        return PluginFacts(
            loaded.api_version,
            bool(loaded.needs_table),
            _overrides(loaded, "measure"),
            _overrides(loaded, "kernel_event"),
            sorted(name for name in {*sys.modules} - before if name.startswith("agentd.")),
            _overrides(loaded, "partition"),
            _overrides(loaded, "clear"),
        )

    def validate(self) -> Sequence[Any]:
        return list(self._loaded.validate(self._start.settings))

    def open(self) -> None:
        plugin = self._instance
        if plugin.api_version != API_VERSION:
            raise NoPluginError(
                f"unsupported plugin API {plugin.api_version} (supported: {API_VERSION})"
            )
        plugin.open()
        self._is_open = True
        if _overrides(type(plugin), "wait_for_change"):
            threading.Thread(target=self._report_changes, name="events", daemon=True).start()

    def listing(self) -> DeviceListing:
        plugin = self._opened
        slot_types, devices = list(plugin.slot_types()), list(plugin.list_devices())
        return DeviceListing(slot_types, devices, list(plugin.conditions()))

    def clear(self, device_ids: Sequence[str]) -> None:
        self._opened.clear(device_ids)

    def partition(self, devices: object, agents: object) -> object:
        return self._opened.partition(
            msgspec.convert(devices, type=list[DeviceInfo]),
            msgspec.convert(agents, type=list[str]),
        )

    def container_edits(self, allocation: object, features: object) -> object:
        devices = msgspec.convert(allocation, type=list[AllocatedDevice])
        plugin = self._opened if devices else self._instance
        return plugin.container_edits(devices, msgspec.convert(features, type=Features))

    def measure(self) -> Sequence[object]:
        return list(self._opened.measure())

    def kernel_event(self, event: object) -> None:
        self._opened.kernel_event(msgspec.convert(event, type=KernelEvent))

    def close(self) -> None:
        self._closing.set()
        self._opened.close()

    @property
    def _loaded(self) -> type[AcceleratorPlugin]:
        if self._class is None:
            raise LookupError("the plugin is not loaded")
        return self._class

    @property
    def _instance(self) -> AcceleratorPlugin:
        if self._plugin is None:
            self._plugin = self._loaded(self._start.name, self._start.settings)
        return self._plugin

    @property
    def _opened(self) -> AcceleratorPlugin:
        if not self._is_open:
            raise LookupError("the plugin is not open")
        return self._instance

    def _report_changes(self) -> None:
        """Report changes until the plugin closes; after a failure, wait again after a pause."""
        failure, pause_s = "", _MIN_PAUSE_S
        while not self._closing.is_set():
            started_s, failure_before = time.monotonic(), failure
            try:
                has_changed, failure = self._opened.wait_for_change(_EVENT_WAIT_S), ""
            except BaseException as error:
                has_changed, failure = False, describe_error(error)
            try:
                if failure != failure_before:
                    self._send(Watched(failure))
                if has_changed or (failure_before and not failure):
                    self._send(Changed())
            except OSError:  # the daemon has closed the channel
                return
            pause_s = min(2 * pause_s, _EVENT_WAIT_S) if failure else _MIN_PAUSE_S
            self._closing.wait(max(0.0, pause_s - (time.monotonic() - started_s)))


def _overrides(loaded: type[AcceleratorPlugin], method: str) -> bool:
    return getattr(loaded, method) is not getattr(AcceleratorPlugin, method)


def _failure_kind(error: BaseException) -> Failure:
    if isinstance(error, NotPresent):
        return Failure.ABSENT
    return Failure.INVALID if isinstance(error, NoPluginError) else Failure.RAISED


def describe_error(error: BaseException) -> str:
    """Return an exception's type and text, in one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "no text"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _die_with_the_daemon(parent: int) -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _be_killed_before_the_daemon() -> None:
    """Raise the OOM score, so that a leaking plugin is killed before the daemon."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def main() -> None:
    """Read the start message and serve."""
    _, _, number, parent = sys.argv
    _die_with_the_daemon(int(parent))
    _be_killed_before_the_daemon()
    channel = socket.socket(fileno=int(number))
    channel.set_inheritable(False)
    body = receive_frame(channel)
    if body is None:
        return
    start = msgspec.msgpack.decode(body, type=PluginStart)
    if start.protocol != PROTOCOL:
        raise SystemExit(f"unsupported plugin protocol: got {start.protocol}, expected {PROTOCOL}")
    sys.path[:] = start.path
    with contextlib.suppress(ConnectionError):
        PluginServer(channel, start).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
