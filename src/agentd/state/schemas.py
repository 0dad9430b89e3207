"""The schemas of the node's files in the state folder, validated on reading.

The records of kernels and claims have theirs in `core.kernel.record` and `core.claim.record`.
Unknown members, written by a newer agentd, are skipped. A value of the wrong type raises, so no
damaged value gets past this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from agentd.core.devices import Device, DeviceId
from agentd.core.partition.plugin_assignment import PluginAssignment
from agentd.core.slots import SlotType

SCHEMA = 1


class SavedNode(msgspec.Struct):
    """`node.json`: the node id of the kernels here, and the runtimes that may have some."""

    node_id: str
    runtimes: list[str]
    schema: int = SCHEMA


class StoppedPlugin(msgspec.Struct, frozen=True):
    """A plugin that an operator stopped: by whom, and the slots that it listed last."""

    reason: str
    slot_types: tuple[SlotType, ...]


class SavedDevices(msgspec.Struct):
    """`devices.json`: the last inventory.

    By device name, it has the dealings of plugins, and the plugins that are stopped. `forgotten`
    are ids of missing devices that an operator forgot.
    """

    devices: Sequence[Device]
    schema: int = SCHEMA
    dealings: Mapping[str, PluginAssignment] = {}
    stopped: Mapping[str, StoppedPlugin] = {}
    forgotten: Sequence[DeviceId] = ()


class SavedEngines(msgspec.Struct):
    """`engines.json`: the boot in which each engine was last ready."""

    ready: dict[str, str]
    schema: int = SCHEMA


class Phase(StrEnum):
    """The phase of a kernel in its record."""

    INTENT = "intent"
    LIVE = "held"
    ENDED = "ended"


class SavedRecord(msgspec.Struct, frozen=True):
    """A kernel's record in the state folder; `text` as on the kernel, empty if unreadable."""

    kernel_id: str
    phase: Phase
    text: str
