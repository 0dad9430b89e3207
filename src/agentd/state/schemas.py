"""The shapes of the files in the state folder, checked as they are read.

A newer agentd may have written further members; those are skipped. What is not of its
shape raises, so that no damaged value goes any further than this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from agentd.core.devices import Device
from agentd.core.kernel.record import MALFORMED
from agentd.core.partition.dealing import Dealing

SCHEMA = 1
UNREADABLE = (*MALFORMED, msgspec.MsgspecError)
"""What reading a damaged file raises."""


class SavedNode(msgspec.Struct):
    """`node.json`: the node id that the kernels here carry, and which runtimes may have some."""

    node_id: str
    runtimes: list[str]
    schema: int = SCHEMA


class SavedDevices(msgspec.Struct):
    """`devices.json`: the last inventory, and how plugins dealt its devices, by device name."""

    devices: Sequence[Device]
    schema: int = SCHEMA
    dealings: Mapping[str, Dealing] = {}
