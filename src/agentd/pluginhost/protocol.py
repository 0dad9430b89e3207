"""The protocol between the daemon and a plugin's process.

Both ends of a socket pair send frames: four bytes of length, most significant first, then one
MessagePack value. The daemon sends one `PluginStart`, then `PluginCall`s. The child answers each
with a `PluginAnswer` of the same number, and may send a `Changed` at any time. Frames carry data
only: nothing in them can name code to run, and every answer is decoded against its type.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from agentd.plugin_api import (
    ConditionInfo,
    ContainerEdits,
    DeviceInfo,
    Measurement,
    PartitionInfo,
    SettingProblem,
    SlotTypeInfo,
)

PROTOCOL = 1
LENGTH_BYTES = 4
MAX_FRAME_BYTES = 16 << 20
"""Maximum bytes of a frame: enough for any listing, and harmless for the daemon."""


class PluginStart(msgspec.Struct, frozen=True):
    """The first frame: the plugin to load, and the path of its code."""

    protocol: int
    path: list[str]
    target: str
    name: str
    settings: dict[str, Any]


class PluginCall(msgspec.Struct, frozen=True):
    """One method call with its arguments."""

    number: int
    method: str
    arguments: list[Any] = []


class Failure(StrEnum):
    """The kind of a failure: the plugin raised, found no hardware, or is not a plugin."""

    RAISED = "raised"
    ABSENT = "absent"
    INVALID = "invalid"


class PluginAnswer(msgspec.Struct, frozen=True, tag=True):
    """The outcome of a call: the encoded result, or the error and its kind."""

    number: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str | None = None
    failure: Failure = Failure.RAISED


class Changed(msgspec.Struct, frozen=True, tag=True):
    """The plugin's devices may have changed; a new listing shows how."""


class Watched(msgspec.Struct, frozen=True, tag=True):
    """The plugin cannot wait for changes, with the error; or can again, if it is empty."""

    error: str = ""


Message: TypeAlias = PluginAnswer | Changed | Watched


class PluginFacts(msgspec.Struct, frozen=True):
    """Facts that a plugin's class declares."""

    api_version: object
    needs_table: bool
    has_measurements: bool
    hears_kernels: bool
    imports_of_agentd: Sequence[str] = ()
    has_partition: bool = False
    has_clear: bool = False


class DeviceListing(msgspec.Struct, frozen=True):
    """The current slot types, devices and conditions of a plugin."""

    slot_types: Sequence[SlotTypeInfo]
    devices: Sequence[DeviceInfo]
    conditions: Sequence[ConditionInfo] = ()


RESULTS: Mapping[str, Any] = {
    "load": PluginFacts,
    "validate": list[SettingProblem],
    "open": None,
    "listing": DeviceListing,
    "clear": None,
    "partition": PartitionInfo | None,
    "container_edits": ContainerEdits,
    "measure": list[Measurement],
    "kernel_event": None,
    "close": None,
}
"""The methods of a child, and the type of each result."""

encode = msgspec.msgpack.encode


def encode_frame(message: object) -> bytes:
    """Return a frame.

    Raises:
        TypeError: the message holds a value that cannot be encoded.
        ValueError: the message is too long.
    """
    body = encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"{len(body)} bytes exceed the frame limit of {MAX_FRAME_BYTES}")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def receive_frame(channel: socket.socket) -> bytes | None:
    """Read the body of one frame, blocking; None at the end."""
    length = _read_exactly(channel, LENGTH_BYTES)
    return _read_exactly(channel, int.from_bytes(length, "big")) if length else None


def _read_exactly(channel: socket.socket, size: int) -> bytes | None:
    chunks = []
    while size:
        chunk = channel.recv(min(size, 1 << 16))
        if not chunk:
            return None
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)
