"""What the daemon and a plugin's process say to each other.

Both ends of a socket pair send frames: four bytes of length, the most significant first,
then one MessagePack value. The daemon sends one `PluginStart`, then `PluginCall`s; the child
answers each with a `PluginAnswer` of the same number, and may send a `Changed` at any time. Data
only: nothing on the way can name code to run, and every answer is decoded against its type.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from agentd.plugin_api import (
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
"""More than any listing needs; a plugin that floods cannot fill the daemon's memory."""


class PluginStart(msgspec.Struct, frozen=True):
    """The first frame: which plugin this process is, and where its code is found."""

    protocol: int
    path: list[str]
    target: str
    name: str
    settings: dict[str, Any]


class PluginCall(msgspec.Struct, frozen=True):
    """One method to call, with its arguments."""

    number: int
    method: str
    arguments: list[Any] = []


class Failure(StrEnum):
    """How a call failed: the plugin raised, has no hardware here, or is not what it says it is."""

    RAISED = "raised"
    ABSENT = "absent"
    INVALID = "invalid"


class PluginAnswer(msgspec.Struct, frozen=True, tag=True):
    """The outcome of a call: the encoded result, or why the call failed, and how."""

    number: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str | None = None
    failure: Failure = Failure.RAISED


class Changed(msgspec.Struct, frozen=True, tag=True):
    """Something happened to the plugin's devices; a new listing tells what."""


Message: TypeAlias = PluginAnswer | Changed


class Facts(msgspec.Struct, frozen=True):
    """The facts that a plugin's class declares."""

    api_version: object
    needs_table: bool
    has_events: bool
    has_measurements: bool
    hears_kernels: bool
    imports_of_agentd: Sequence[str] = ()
    file: str = ""
    has_partition: bool = False


class DeviceListing(msgspec.Struct, frozen=True):
    """Slot types and devices, as the plugin lists them now."""

    slot_types: Sequence[SlotTypeInfo]
    devices: Sequence[DeviceInfo]


RESULTS: Mapping[str, Any] = {
    "load": Facts,
    "validate": list[SettingProblem],
    "open": None,
    "listing": DeviceListing,
    "partition": PartitionInfo | None,
    "container_edits": ContainerEdits,
    "measure": list[Measurement],
    "kernel_event": None,
    "close": None,
}
"""The methods a child knows, and the type of what each answers."""

encode = msgspec.msgpack.encode


def framed(message: object) -> bytes:
    """Return a frame.

    Raises:
        TypeError: the message holds a value that cannot be encoded.
        ValueError: it is too long.
    """
    body = encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"{len(body)} bytes are more than the {MAX_FRAME_BYTES} of a frame")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def receive(channel: socket.socket) -> bytes | None:
    """Read the body of one frame, waiting for it; None at the end."""
    length = _read(channel, LENGTH_BYTES)
    return _read(channel, int.from_bytes(length, "big")) if length else None


def _read(channel: socket.socket, size: int) -> bytes | None:
    chunks = []
    while size:
        chunk = channel.recv(min(size, 1 << 16))
        if not chunk:
            return None
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)
